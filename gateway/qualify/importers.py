"""Results of other tools as samples: `vllm bench serve --save-detailed`, and GuideLLM reports.

Owns: reading both formats, and the corrections that keep a record from claiming more than was measured. Promises: pure functions
over parsed JSON; a result without single requests, or with only a sample of them, is refused with the reason.
Talks to: `samples`, `levels`; `import_command` does the reading and writing.

What is corrected, and why:
- The concurrency is counted from starts and ends: that in flight at dispatch for one request in twenty. What the tool was asked
  for, or the highest instant it saw, is not what was held.
- vllm bench counts an error in the middle of a stream as a success. Where nearly all answers have one length, or the asked
  length is given, a shorter answer is an error.
- vllm bench sends its first prompt before the run, as a test and as warm-up, which primes the prefix cache: the first request
  is left out.
- Requests that a run cut off at its end are cancelled, and neither successes nor errors.
- Each result file, or each benchmark of a report, is one repeat of the concurrency it held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gateway.errors import PlimsollError
from gateway.evidence.record import Slice
from gateway.qualify.levels import Measured, reached, slice_of
from gateway.qualify.plan import Cell, TokenRange
from gateway.qualify.samples import ErrorKind, RawSample, Status

Arrival = Literal["closed_loop", "open_loop_poisson", "trace", "unknown"]
_SAME_LENGTH_SHARE = 0.9
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
_CLOSED = frozenset({"synchronous", "concurrent", "throughput"})


class ImportFailed(PlimsollError):
    """The result cannot become a record; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Run:
    """One repeat: its requests in order of dispatch, how they arrived, and notes on what was left out or changed."""

    samples: tuple[RawSample, ...]
    arrival: Arrival
    model: str | None
    notes: tuple[str, ...] = ()

    @property
    def concurrency(self) -> int:
        """What it held."""
        return max(1, reached(self.samples))


@dataclass(frozen=True, slots=True)
class _Row:
    """One request as the other tool saw it. Seconds on its clock; `end` None: it has no end."""

    start: float
    first: float | None
    end: float | None
    input_tokens: int | None
    output_tokens: int | None
    status: Status = "ok"
    error: ErrorKind | None = None
    detail: str | None = None
    events: tuple[tuple[float, int], ...] = ()


def runs(document: object, *, least_output: int | None = None) -> list[Run]:
    """The runs of a parsed result, whichever tool wrote it. Raises `ImportFailed`."""
    if isinstance(document, Mapping) and isinstance(document.get("benchmarks"), list):
        return [guidellm_run(each) for each in document["benchmarks"]]
    if isinstance(document, Mapping) and "request_throughput" in document:
        return [vllm_run(document, least_output=least_output)]
    raise ImportFailed("neither a result of vllm bench serve nor a GuideLLM report")


def vllm_run(result: Mapping[str, Any], *, least_output: int | None = None) -> Run:
    """A result of `vllm bench serve --save-detailed`. `least_output`: the fewest tokens that were asked for."""
    columns = {name: result.get(name) for name in _LISTS}
    missing = [name for name, column in columns.items() if not isinstance(column, list)]
    if missing:
        raise ImportFailed(f"the result holds no {', '.join(missing)}: run vllm bench serve with --save-detailed")
    if result.get("ramp_up_strategy") is not None:
        raise ImportFailed("the request rate was ramped up, so that no level was held")
    latencies = result.get("latencies")
    try:
        rows = [
            _vllm_row(*values, latency=latencies[place] if isinstance(latencies, list) else None)
            for place, values in enumerate(zip(*columns.values(), strict=True))
        ]
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise ImportFailed(f"the result's lists do not belong together: {error}") from error
    notes = ["the first request was left out: vllm bench sends its prompt before the run"] if rows else []
    rows, shortened = _short_answers(rows[1:], least_output)
    if shortened:
        notes.append(f"{shortened} answers were shorter than asked for and count as errors")
    arrival: Arrival = "closed_loop" if result.get("request_rate") in ("inf", None) else "unknown"
    if arrival == "unknown" and result.get("burstiness") == 1:
        arrival = "open_loop_poisson"
    return Run(_samples(rows), arrival, _name(result.get("model_id")), tuple(notes))


def guidellm_run(benchmark: object) -> Run:
    """One benchmark of a GuideLLM report."""
    document = _mapping(benchmark, "benchmark")
    requests = _mapping(document.get("requests"), "requests")
    totals = document.get("metrics", {}).get("request_totals") if isinstance(document.get("metrics"), Mapping) else None
    rows: list[_Row] = []
    statuses: tuple[tuple[str, Status], ...] = (("successful", "ok"), ("errored", "error"), ("incomplete", "cancelled"))
    for name, status in statuses:
        listed = requests.get(name) or []
        told = totals.get(name) if isinstance(totals, Mapping) else None
        if not isinstance(listed, list) or (isinstance(told, int) and told != len(listed)):
            raise ImportFailed(f"the report holds only some of the {name} requests: run GuideLLM without sampling of requests")
        try:
            rows += [_guidellm_row(_mapping(each, "request"), status) for each in listed]
        except (TypeError, ValueError) as error:
            raise ImportFailed(f"a request of the report cannot be read: {error}") from error
    strategy = _strategy(document)
    kind = strategy.get("type_") or strategy.get("kind")
    arrival: Arrival = "closed_loop" if kind in _CLOSED else "open_loop_poisson" if kind == "poisson" else "unknown"
    return Run(_samples(sorted(rows, key=lambda row: row.start)), arrival, None)


def slice_of_runs(
    found: Sequence[Run], *, confidence: float, prefix_reuse: str, task: Literal["generate", "pool"] = "generate"
) -> tuple[Slice, list[RawSample]]:
    """One slice of all runs, by the concurrency each held, and its samples. Raises `ImportFailed`."""
    by_level: dict[int, list[Run]] = {}
    for run in found:
        by_level.setdefault(run.concurrency, []).append(run)
    measured = [
        Measured(level, tuple(_as_repeats(each, level)))
        for level, each in sorted(by_level.items())
        if any(r.samples for r in each)
    ]
    top = max(by_level, default=1)
    cell = Cell(task=task, input_tokens=TokenRange(min=1, max=1), concurrency=(top,),
                output_tokens=TokenRange(min=1, max=1) if task == "generate" else TokenRange(min=0, max=0))  # fmt: skip
    made = slice_of(cell, measured, confidence)
    if made is None:
        raise ImportFailed("no sizes are common to all the results, or no request succeeded: import them one by one")
    return made.model_copy(update={"prefix_reuse": prefix_reuse}), [sample for each in measured for sample in each.samples]


def _vllm_row(
    input_len: int, output_len: int, ttft: float, itl: list[float], start: float, error: str, *, latency: float | None
) -> _Row:
    if error or output_len < 1:
        detail = error.strip().splitlines()[-1][:300] if error else "no token was generated"
        return _Row(float(start), None, None, None, None, "error", "stream_error" if ttft else "status", detail)
    total = float(latency) if latency else float(ttft) + sum(itl)
    events, at = [(float(ttft), 1)], float(ttft)
    for gap in itl:
        at += gap
        events.append((at, 1))
    return _Row(float(start), start + float(ttft), start + total, int(input_len), int(output_len), events=tuple(events))


def _guidellm_row(request: Mapping[str, Any], status: Status) -> _Row:
    start = request.get("request_start_time", request.get("start_time"))
    end = request.get("request_end_time", request.get("end_time"))
    if start is None and status != "ok":
        start = end
    if start is None or end is None:
        raise ValueError("a request without its start or end")
    latency, ttft = request.get("request_latency"), request.get("time_to_first_token_ms")
    done = float(start) + float(latency) if latency is not None else float(end)
    good = status == "ok"
    return _Row(
        float(start), float(start) + float(ttft) / 1000 if good and ttft is not None else None, done,
        request.get("prompt_tokens") if good else None, request.get("output_tokens") if good else None, status,
        "stream_error" if status == "error" else None,
    )  # fmt: skip


def _short_answers(rows: list[_Row], least: int | None) -> tuple[list[_Row], int]:
    """Mark successes below the asked length, or below the one length that nearly all have, as errors; how many."""
    lengths = Counter(row.output_tokens for row in rows if row.status == "ok" and row.output_tokens is not None)
    if least is None and lengths:
        usual, count = lengths.most_common(1)[0]
        least = usual if count >= _SAME_LENGTH_SHARE * sum(lengths.values()) else None
    if least is None:
        return rows, 0
    marked = [
        replace(row, status="error", error="unfinished", detail=f"{row.output_tokens} tokens, fewer than {least}")
        if row.status == "ok" and (row.output_tokens or 0) < least
        else row
        for row in rows
    ]
    return marked, sum(a is not b for a, b in zip(rows, marked, strict=True))


def _samples(rows: Sequence[_Row]) -> tuple[RawSample, ...]:
    """Rows in order of dispatch as samples of one repeat, with the number in flight at each dispatch."""
    if not rows:
        return ()
    began = min(row.start for row in rows)
    ends = sorted(row.end if row.end is not None else row.start for row in rows)
    ordered = sorted(rows, key=lambda row: row.start)
    made, gone = [], 0
    for place, row in enumerate(ordered):
        while gone < len(ends) and ends[gone] <= row.start:
            gone += 1
        made.append(
            RawSample(
                cell=0, concurrency=0, repeat=0, wave=0, index=place, kind="imported", intended_at=row.start - began,
                sent_at=row.start - began, first_at=None if row.first is None else row.first - began,
                last_at=None if row.end is None else row.end - began, asked_input=row.input_tokens or 0,
                asked_output=row.output_tokens or 0, input_tokens=row.input_tokens, output_tokens=row.output_tokens,
                in_flight=max(1, place + 1 - gone), status=row.status, error=row.error, detail=row.detail,
                event_times=row.events,
            )
        )  # fmt: skip
    return tuple(made)


def _as_repeats(found: Iterable[Run], level: int) -> list[RawSample]:
    """The runs of one level as repeats; every `level` requests in order of dispatch are taken for a wave."""
    return [
        replace(sample, concurrency=level, repeat=repeat, wave=sample.index // level)
        for repeat, run in enumerate(found)
        for sample in run.samples
    ]


def _strategy(document: Mapping[str, Any]) -> Mapping[str, Any]:
    for group in ("config", "scheduler", "args"):
        holder = document.get(group)
        if isinstance(holder, Mapping) and isinstance(holder.get("strategy"), Mapping):
            found: Mapping[str, Any] = holder["strategy"]
            return found
    return {}


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ImportFailed(f"{what} is not an object")
    return value


def _name(value: object) -> str | None:
    return value if isinstance(value, str) else None
