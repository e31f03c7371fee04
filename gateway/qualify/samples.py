"""The raw samples: one line for each request that was sent, kept beside the record.

Owns: the line format and its compression. Promises: what was written is what is read, or `SamplesError` says why not.
Talks to: nobody; `evidence.store` does the writing. Times are seconds since the run began, on the client's monotonic clock.
"""

from __future__ import annotations

import hashlib
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
    """One metric of every sample that has it, with its repeat, wave and kind."""
    rows = [(value, s.repeat, s.wave, s.kind) for s in samples if (value := getattr(s, name)) is not None]
    return Sampled.of(rows)


def encode(samples: Iterable[RawSample]) -> tuple[str, bytes]:
    """The compressed lines, and the file name that holds their digest. The store writes them, whole or not at all."""
    lines = b"".join(orjson.dumps(asdict(sample)) + b"\n" for sample in samples)
    packed = zstandard.ZstdCompressor(level=9).compress(lines)
    return f"{hashlib.sha256(packed).hexdigest()}.jsonl.zst", packed


def read(path: Path, sha256: str | None = None) -> list[RawSample]:
    """The samples of a file; with `sha256`, only if it is that file. Raises `SamplesError`."""
    try:
        raw = path.read_bytes()
        if sha256 is not None and hashlib.sha256(raw).hexdigest() != sha256:
            raise SamplesError(f"{path}: is not the file that the record names; its digest differs")
        size = zstandard.frame_content_size(raw)
        if not 0 <= size <= MAX_SAMPLES_BYTES:
            raise SamplesError(f"{path}: states no size, or more than {MAX_SAMPLES_BYTES} bytes")
        text = zstandard.ZstdDecompressor().decompress(raw)
        return [_sample(line) for line in text.splitlines()]
    except OSError as error:
        raise SamplesError(f"{path}: cannot be read: {error.strerror}") from error
    except (zstandard.ZstdError, orjson.JSONDecodeError, TypeError) as error:
        raise SamplesError(f"{path}: not a file of samples: {error}") from error


def _sample(line: bytes) -> RawSample:
    row = orjson.loads(line)
    row["event_times"] = tuple((at, events) for at, events in row["event_times"])
    return RawSample(**row)
