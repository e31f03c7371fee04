"""The whole of a qualification: attest, warm up, measure, and write the record.

Owns: the order of these, and the record made of them. Promises: nothing is written unless the identity stayed the same to the
end; the raw samples are on disk, whole, before the record that names them; an interrupted run leaves no file.
Talks to: `session`, `bench`, `levels`, `search`; `evidence.store` writes.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gateway import policy
from gateway.evidence.identity import ObservedIdentity
from gateway.evidence.record import (
    ALL_TRIGGERS,
    SCHEMA,
    BoundaryNote,
    Protocol,
    Record,
    RecordIdentity,
    Samples,
    decimal_text,
    instant,
    record_id,
)
from gateway.evidence.signing import supersede
from gateway.evidence.store import RecordStore
from gateway.qualify import boundary
from gateway.qualify.bench import Bench, LevelKey, Progress, keys_of
from gateway.qualify.levels import Measured, narrowed, slice_of
from gateway.qualify.plan import Plan, Poisson, Trace
from gateway.qualify.samples import RawSample, encode
from gateway.qualify.search import Limits, find
from gateway.qualify.session import QualifyError, Session, opened


@dataclass(frozen=True, slots=True)
class Request:
    """What to qualify. `search`: find the largest concurrency that meets these limits first, up to `most`."""

    backend: policy.Backend
    plan: Plan
    out: Path
    api_key: str | None = None
    search: Limits | None = None
    most: int = 256
    supersede: bool = True
    external_boundary: str | None = None


@dataclass(frozen=True, slots=True)
class QualifyResult:
    """What was written, and what the operator should hear about it."""

    record: Record
    record_id: str
    path: Path
    samples: Path
    notes: tuple[str, ...]


async def qualify(request: Request, progress: Progress) -> QualifyResult:
    """Measure the backend by the plan and write the record. Raises `QualifyError`, `IdentityChanged` or `StoreError`."""
    started = dt.datetime.now(dt.UTC)
    async with opened(request.backend, request.api_key, request.plan) as session:
        fits(request.plan, session.observed)
        note = await boundary.observe(session.http, session.base_url, request.api_key)
        if request.external_boundary is not None:
            note = BoundaryNote(api_key_covers=note.api_key_covers, external_boundary=request.external_boundary)
        plan, bench = request.plan, Bench(session, request.plan, progress)
        warmed = await bench.warm_up()
        if request.search is not None:
            plan, measured = await _searched(session, request, bench, progress)
        else:
            measured = await bench.measure(keys_of(plan))
        await session.check()
    unsigned = record_of(plan, session, measured, warmed, started, note)
    return await asyncio.to_thread(_write, request, unsigned, measured)


def fits(plan: Plan, observed: ObservedIdentity) -> None:
    """Raises `QualifyError` when the largest request of a cell is longer than the server's context."""
    model = observed.document.get("model")
    length = model.get("max_model_len") if isinstance(model, dict) else None
    for index, cell in enumerate(plan.cells, 1):
        wanted = cell.input_tokens.max + cell.output_tokens.max
        if isinstance(length, int) and wanted > length:
            raise QualifyError(
                f"cell {index} asks for {cell.input_tokens.max} in and {cell.output_tokens.max} out, together {wanted} tokens; "
                f"the server's max_model_len is {length}"
            )


def record_of(
    plan: Plan,
    session: Session,
    measured: dict[LevelKey, Measured],
    warmed: int,
    started: dt.datetime,
    note: BoundaryNote | None,
) -> Record:
    """The record, not yet naming its samples. Raises `QualifyError` when no cell holds a slice."""
    observed, slices, notes = session.observed, [], list(_shortfalls(plan, measured))
    for index, cell in enumerate(plan.cells):
        levels = [each for key, each in measured.items() if key.cell == index]
        made = slice_of(cell, _rising(levels), plan.confidence)
        notes += [f"cell {index + 1}: {text}" for text in narrowed(cell, made)]
        if made is not None:
            slices.append(made)
    if not slices:
        raise QualifyError(_nothing(measured))
    finished = dt.datetime.now(dt.UTC)
    return Record(
        schema_=SCHEMA,
        identity=RecordIdentity(
            model_revision=observed.identity.model_revision,
            vllm_version=observed.identity.vllm_version,
            server_configuration_hash=observed.identity.server_configuration_hash,
            hardware_profile=observed.identity.hardware_profile,
        ),
        configuration=dict(observed.document),
        capabilities=dict(observed.capabilities),
        protocol=_protocol(plan, session, warmed, started, finished, tuple(notes)),
        slices=tuple(slices),
        security_boundary_note=note,
        retest_triggers=ALL_TRIGGERS,
        valid_until=None if plan.valid_days is None else _text(finished + dt.timedelta(days=plan.valid_days)),
    )


def _protocol(
    plan: Plan, session: Session, warmed: int, started: dt.datetime, finished: dt.datetime, notes: tuple[str, ...]
) -> Protocol:
    observed = session.observed
    arrivals = {_arrival(plan, index) for index in range(len(plan.cells))}
    return Protocol(
        tool=f"plimsoll {version('plimsoll-gateway')}",
        started_at=_text(started),
        finished_at=_text(finished),
        warmup_state="omitted" if plan.warmup is None else "completed",
        warmup_requests=warmed,
        arrival=arrivals.pop() if len(arrivals) == 1 else "unknown",
        dataset="random tokens, sizes mixed over the box",
        route=plan.route,
        seed=plan.seed,
        repeats=plan.repeats,
        path="direct",
        kv_cache_tokens=observed.kv_cache_tokens,
        confidence=decimal_text(plan.confidence),
        identity_source="attested" if session.declared is None else "declared",
        plan=plan.digest,
        notes=notes,
    )


def _arrival(plan: Plan, index: int) -> Any:
    cell = plan.cells[index]
    if isinstance(cell.arrival, Poisson):
        return "open_loop_poisson"
    return "trace" if isinstance(cell.prefix_reuse, Trace) else "closed_loop"


async def _searched(
    session: Session, request: Request, bench: Bench, progress: Progress
) -> tuple[Plan, dict[LevelKey, Measured]]:
    """Find the level, then measure it afresh; what the search saw is dropped. Raises `QualifyError` when none will do."""
    limits, plan, cell = request.search, request.plan, request.plan.cells[0]
    assert limits is not None

    async def measure(concurrency: int) -> Measured:
        one = plan.model_copy(update={"cells": (cell.model_copy(update={"concurrency": (concurrency,)}),)})
        key = LevelKey(0, concurrency)
        return (await Bench(session, one, progress, overhead=bench.overhead).measure([key]))[key]

    level, fresh = await find(measure, limits, request.most, plan.confidence, progress.note)
    kept = plan.model_copy(update={"cells": (cell.model_copy(update={"concurrency": (level,)}),)})
    return kept, {LevelKey(0, level): fresh}


def _write(request: Request, record: Record, measured: dict[LevelKey, Measured]) -> QualifyResult:
    """Samples first, then the record that names them."""
    store = RecordStore(request.out)
    name, packed = encode(_all_samples(measured))
    sha256 = store.put_samples(name, packed)
    record = record.model_copy(update={"samples": Samples(file=name, sha256=sha256)})
    old = _predecessor(store, record) if request.supersede else None
    if old is not None:
        record = supersede(record, old)
    identity = store.put(record)
    return QualifyResult(record, identity, request.out / f"{identity}.json", request.out / name, _notes(record, old))


def _predecessor(store: RecordStore, record: Record) -> Record | None:
    """The newest record in the store of the same model on another identity, that no other record has replaced yet."""
    if not store.directory.is_dir():
        return None
    known = store.load().records
    replaced = {each.supersedes.record for each in known.values() if each.supersedes is not None}
    candidates = [
        each
        for identity, each in known.items()
        if identity not in replaced and each.identity != record.identity and _model(each) == _model(record)
    ]
    return max(candidates, key=lambda each: instant(each.protocol.started_at), default=None)


def _model(record: Record) -> object:
    model = record.configuration.get("model")
    return model.get("id") if isinstance(model, dict) else record.identity.model_revision


def _notes(record: Record, old: Record | None) -> tuple[str, ...]:
    """What the record says of its own shortfalls, and what its numbers show."""
    notes = list(record.protocol.notes)
    for each in record.slices:
        for level in each.levels:
            if level.oversaturated:
                notes.append(f"{level.concurrency} at once: over-saturated, waits grew while it ran")
            if level.e2e_ms.p95 is not None and level.e2e_ms.p95_upper is None:
                notes.append(f"{level.concurrency} at once: too few or too different samples for a bound on p95")
            if level.errors or level.timeouts:
                notes.append(f"{level.concurrency} at once: {level.errors} errors, {level.timeouts} timeouts")
    if old is not None:
        notes.append(f"supersedes {record_id(old)[:16]}, which was measured on another configuration")
    return tuple(notes)


def _shortfalls(plan: Plan, measured: dict[LevelKey, Measured]) -> Iterator[str]:
    """Levels that are void, and those that the plan's time ended before all was sent."""
    for key, each in measured.items():
        cell = plan.cells[key.cell]
        if each.void:
            yield f"cell {key.cell + 1}, {key.concurrency} at once: void, {each.void}"
        wanted = cell.per_repeat(key.concurrency, plan.repeats) * plan.repeats
        if len(each.samples) < wanted:
            text = f"{len(each.samples)} of {wanted} requests were sent within max_seconds ({cell.max_seconds:g})"
            yield f"cell {key.cell + 1}, {key.concurrency} at once: {text}"


def _nothing(measured: dict[LevelKey, Measured]) -> str:
    """Why there is nothing to record."""
    if any(each.good for each in measured.values()):
        return "no cell has sizes that all of its levels hold, so there is nothing to record: more requests, or more max_seconds"
    failed = (sample for each in measured.values() for sample in each.samples if sample.status != "ok")
    first = next((f"{sample.status}, {sample.detail or sample.error}" for sample in failed), "nothing was sent")
    return f"no request succeeded, so there is nothing to record: {first}"


def _rising(levels: Sequence[Measured]) -> list[Measured]:
    """By concurrency; of two open-loop levels that held the same, the later."""
    return [each for _, each in sorted({each.concurrency: each for each in levels}.items())]


def _all_samples(measured: dict[LevelKey, Measured]) -> list[RawSample]:
    return [sample for each in measured.values() for sample in each.samples]


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
