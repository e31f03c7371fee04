"""The raw samples: one line for each request that was sent, kept beside the record.

Owns: the line format and the compressed file. Promises: a file appears whole under the name of its digest or not at all.
Talks to: nobody. Times are seconds since the run began, on the client's monotonic clock.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson
import zstandard

from gateway.errors import PlimsollError
from gateway.qualify.stats import Sampled

ErrorKind = Literal["connect", "identity", "reset", "truncated", "malformed", "status", "stream_error", "unfinished"]
Status = Literal["ok", "error", "timeout", "cancelled"]
MAX_SAMPLES_BYTES = 2 * 1024**3
MAX_LINE_BYTES = 16 * 1024 * 1024


class SamplesError(PlimsollError):
    """The file of samples is not what the record says, or cannot be read."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """One request. `event_times` holds (seconds after dispatch, content events in that read); unknown is None.

    `intended_at` is when the plan wanted it sent; in a closed loop that is when it was sent. `in_flight` counts this run's
    requests at dispatch, itself included.
    """

    cell: int
    concurrency: int
    repeat: int
    wave: int
    index: int
    kind: str
    intended_at: float
    sent_at: float
    first_at: float | None
    last_at: float | None
    asked_input: int
    asked_output: int
    input_tokens: int | None
    output_tokens: int | None
    in_flight: int
    status: Status
    error: ErrorKind | None = None
    detail: str | None = None
    http_status: int | None = None
    event_times: tuple[tuple[float, int], ...] = ()
    open_loop: bool = False

    @property
    def start(self) -> float:
        """Where its latency starts: dispatch, or the intended instant of an open loop."""
        return self.intended_at if self.open_loop else self.sent_at

    @property
    def e2e_ms(self) -> float | None:
        """Milliseconds to the end of the answer; None unless it succeeded."""
        return (self.last_at - self.start) * 1000 if self.status == "ok" and self.last_at is not None else None

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds to the first content; None unless it succeeded."""
        return (self.first_at - self.start) * 1000 if self.status == "ok" and self.first_at is not None else None

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds a token after the first; None for fewer than two tokens."""
        if self.e2e_ms is None or self.ttft_ms is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Milliseconds between one content event and the next; events of one read came together."""
        gaps: list[float] = []
        previous: float | None = None
        for at, events in self.event_times if self.status == "ok" else ():
            if previous is not None:
                gaps.append((at - previous) * 1000)
            gaps.extend([0.0] * (events - 1))
            previous = at
        return tuple(gaps)


def sampled(samples: Iterable[RawSample], name: Literal["e2e_ms", "ttft_ms", "tpot_ms"]) -> Sampled:
    """One metric of every sample that has it, with repeats and waves."""
    rows = [(value, s.repeat, s.wave) for s in samples if (value := getattr(s, name)) is not None]
    return Sampled.of(rows)


def write(samples: Iterable[RawSample], directory: Path) -> tuple[str, str]:
    """Write `<digest>.jsonl.zst` into `directory`; its file name and hex digest. An interrupted write leaves nothing behind."""
    digest = hashlib.sha256()
    handle, name = tempfile.mkstemp(prefix=".samples-", suffix=".part", dir=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            packer = zstandard.ZstdCompressor(level=9).compressobj()
            for sample in samples:
                _put(file.write, digest.update, packer.compress(orjson.dumps(asdict(sample)) + b"\n"))
            _put(file.write, digest.update, packer.flush())
            file.flush()
            os.fsync(file.fileno())
        final = f"{digest.hexdigest()}.jsonl.zst"
        Path(name).replace(directory / final)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return final, digest.hexdigest()


def _put(write: object, update: object, chunk: bytes) -> None:
    if chunk:
        write(chunk)  # type: ignore[operator]
        update(chunk)  # type: ignore[operator]


def read(path: Path, sha256: str | None = None) -> list[RawSample]:
    """The samples of a file; with `sha256`, only if it is that file. Raises `SamplesError`."""
    try:
        raw = path.read_bytes()
        if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
            raise SamplesError(f"{path}: is not the file that the record names; its digest differs")
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            text = reader.read(MAX_SAMPLES_BYTES)
        return [_sample(line) for line in text.splitlines()]
    except OSError as error:
        raise SamplesError(f"{path}: cannot be read: {error.strerror}") from error
    except (zstandard.ZstdError, orjson.JSONDecodeError, TypeError) as error:
        raise SamplesError(f"{path}: not a file of samples: {error}") from error


def _sample(line: bytes) -> RawSample:
    row = orjson.loads(line)
    row["event_times"] = tuple((at, events) for at, events in row["event_times"])
    return RawSample(**row)
