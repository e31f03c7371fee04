"""The exit checklist: what has to be answered before anybody relies on a record, answered from the record.

Owns: the questions and where their answers stand. Promises: every question gets a row; what is not known says so.
Talks to: `record`, `states`. `plimsoll evaluate` prints it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.evidence.record import Level, Record, Slice, Statistics
from gateway.evidence.states import Verdict

NOT_KNOWN = "not known"


class Row(NamedTuple):
    """One question: its answer in words, and whether it is answered."""

    question: str
    answer: str
    answered: bool


def exit_checklist(record: Record, verdict: Verdict) -> tuple[Row, ...]:
    """The rows in the order in which they are asked; the decision comes last."""
    return (
        *_identity(record),
        *_configuration(record.configuration),
        *(row for number, each in enumerate(record.slices, 1) for row in _slice(f"slice {number}", each)),
        _warmup(record),
        _boundary(record),
        Row("explicit retest triggers", ", ".join(record.retest_triggers), True),
        Row("valid until", record.valid_until or "no date set", True),
        Row("decision", f"{verdict.final_decision} ({verdict.reason_class})", True),
    )


def _identity(record: Record) -> Iterator[Row]:
    names = {
        "model_revision": "exact model revision",
        "vllm_version": "vLLM version",
        "hardware_profile": "hardware profile",
        "server_configuration_hash": "configuration hash",
    }
    for name, question in names.items():
        value = getattr(record.identity, name)
        yield Row(question, value or NOT_KNOWN, value is not None)


def _configuration(document: dict[str, Any]) -> Iterator[Row]:
    wanted = {
        "parallelism": ("parallelism", ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")),
        "context length": ("model", ("max_model_len",)),
        "batching limits": ("scheduler", ("max_num_seqs", "max_num_batched_tokens")),
        "memory budget": ("cache", ("gpu_memory_utilization", "kv_cache_memory_bytes")),
    }
    for question, (group, names) in wanted.items():
        fields = document.get(group)
        values = fields if isinstance(fields, dict) else {}
        answered = [name for name in names if values.get(name) not in (None, "unknown")]
        answer = ", ".join(f"{name} {values[name]}" for name in answered)
        yield Row(question, answer or NOT_KNOWN, bool(answered))


def _slice(name: str, each: Slice) -> Iterator[Row]:
    extra = "".join(f" +{feature}" for feature in each.features)
    ranges = (
        f"{each.task}{extra}: {each.input_tokens.min}-{each.input_tokens.max} in, {each.output_tokens.min}-"
        f"{each.output_tokens.max} out, concurrency {each.concurrency.min}-{each.concurrency.max}, reuse {each.prefix_reuse}"
    )
    yield Row(f"{name}: measured ranges", ranges, True)
    for level in each.levels:
        yield _level(f"{name}: concurrency {level.concurrency}", level)


def _level(name: str, level: Level) -> Row:
    parts = [
        _spread("e2e", level.e2e_ms),
        _spread("ttft", level.ttft_ms),
        _spread("queue", level.queue_ms),
        f"{level.output_tokens_per_s or NOT_KNOWN} tokens/s",
        f"{level.errors} errors, {level.timeouts} timeouts of {level.requests}",
        *(["VOID"] if level.void else []),
        *(["not steady"] if level.oversaturated else []),
    ]
    whole = level.e2e_ms.p95 is not None and level.output_tokens_per_s is not None and not level.void
    return Row(name, "; ".join(parts), whole)


def _spread(name: str, statistics: Statistics) -> str:
    if statistics.p50 is None and statistics.p95 is None:
        return f"{name} {NOT_KNOWN}" if statistics.mean is None else f"{name} mean {statistics.mean} ms"
    bound = f" (bound {statistics.p95_upper})" if statistics.p95_upper is not None else ""
    return f"{name} p50 {statistics.p50 or '-'} p95 {statistics.p95 or '-'}{bound} ms"


def _warmup(record: Record) -> Row:
    state, count = record.protocol.warmup_state, record.protocol.warmup_requests
    return Row("warm-up state", state if count is None else f"{state}, {count} requests", state != "unknown")


def _boundary(record: Record) -> Row:
    note = record.security_boundary_note
    if note is None or not (note.api_key_covers.strip() and note.external_boundary.strip()):
        return Row("security boundary note", "missing", False)
    return Row("security boundary note", f"key covers: {note.api_key_covers}; outside: {note.external_boundary}", True)
