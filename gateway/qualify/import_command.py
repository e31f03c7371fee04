"""`plimsoll records import`: results of other tools become records.

Owns: what an operator types for it, and which identity an imported record may carry. Promises: an attested identity is taken only
from an engine that was running, and has not been started again, since before the measurement; what the tool does not tell
(warm-up, prefix reuse) is unknown unless it is stated. Talks to: `importers`, `evidence.store`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import orjson
import typer
import yaml
from pydantic import ValidationError

from gateway import policy
from gateway.evidence.identity import ObservedIdentity
from gateway.evidence.identity_client import fetch_attested
from gateway.evidence.record import (
    ALL_TRIGGERS,
    SCHEMA,
    BoundaryNote,
    Protocol,
    Record,
    RecordIdentity,
    Samples,
    Slice,
    decimal_text,
    instant,
)
from gateway.evidence.stock import declared as as_declared
from gateway.evidence.stock import probed
from gateway.evidence.store import RecordStore
from gateway.qualify import boundary
from gateway.qualify.importers import ImportFailed, Run, runs, slice_of_runs
from gateway.qualify.samples import encode
from gateway.qualify.secret import api_key

MAX_RESULT_BYTES = 1024**3


def import_results(
    results: Annotated[list[Path], typer.Argument(help="Files of `vllm bench serve --save-detailed`, or GuideLLM reports.")],
    out: Annotated[Path, typer.Option(help="Directory for the record.")] = Path("records"),
    backend: Annotated[
        str | None, typer.Option(help="The server that was measured and still runs: its identity is attested.")
    ] = None,
    identity: Annotated[
        Path | None, typer.Option(help="YAML file with a declared identity, where it cannot be attested.")
    ] = None,
    warmup: Annotated[str, typer.Option(help="completed, omitted or unknown. Unknown opens no gate.")] = "unknown",
    prefix_reuse: Annotated[
        str, typer.Option(help="none, when no two prompts shared a head; else the name of the regime.")
    ] = "unknown",
    least_output: Annotated[
        int | None, typer.Option(min=1, help="Fewest output tokens asked for; shorter answers are errors.")
    ] = None,
    confidence: Annotated[float, typer.Option(min=0.8, max=0.999, help="Of the bounds.")] = 0.95,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the server's API key.")] = "VLLM_API_KEY",
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the server's API key.")] = None,
) -> None:
    """Make a record of what another tool measured. Several files at one concurrency are repeats of it."""
    if (backend is None) == (identity is None):
        raise typer.BadParameter("give either --backend or --identity")
    if warmup not in ("completed", "omitted", "unknown"):
        raise typer.BadParameter("--warmup is completed, omitted or unknown")
    found: list[Run] = []
    spans: list[tuple[dt.datetime, dt.datetime]] = []
    for path in results:
        document = _read(path)
        found += runs(document, least_output=least_output)
        spans.append(_span(document, path))
    made, samples = slice_of_runs(found, confidence=confidence, prefix_reuse=prefix_reuse)
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    observed, note = _identity(backend, identity, api_key(api_key_env, api_key_file), first)
    store = RecordStore(out)
    name, packed = encode(samples)
    protocol = _protocol(found, made, first, last, warmup, confidence, observed)
    record = _record(observed, protocol, made, note, Samples(file=name, sha256=store.put_samples(name, packed)))
    typer.echo(str(out / f"{store.put(record)}.json"))
    for text in protocol.notes:
        typer.echo(f"note: {text}", err=True)


def _record(observed: ObservedIdentity, protocol: Protocol, made: Slice, note: BoundaryNote | None, samples: Samples) -> Record:
    known = observed.identity
    return Record(
        schema_=SCHEMA,
        identity=RecordIdentity(
            model_revision=known.model_revision, vllm_version=known.vllm_version,
            server_configuration_hash=known.server_configuration_hash, hardware_profile=known.hardware_profile,
        ),
        configuration=dict(observed.document),
        capabilities=dict(observed.capabilities),
        protocol=protocol,
        slices=(made,),
        samples=samples,
        security_boundary_note=note,
        retest_triggers=ALL_TRIGGERS,
    )  # fmt: skip


def _protocol(
    found: list[Run],
    made: Slice,
    first: dt.datetime,
    last: dt.datetime,
    warmup: Any,
    confidence: float,
    observed: ObservedIdentity,
) -> Protocol:
    arrivals = {run.arrival for run in found}
    repeats = min(sum(run.concurrency == level.concurrency for run in found) for level in made.levels)
    source: Literal["attested", "declared"] = "attested" if observed.source == "attested" else "declared"
    return Protocol(
        tool=f"plimsoll {version('plimsoll-gateway')}, imported",
        started_at=_text(first),
        finished_at=_text(last),
        warmup_state=warmup,
        arrival=arrivals.pop() if len(arrivals) == 1 else "unknown",
        dataset="imported",
        repeats=repeats,
        path="unknown",
        kv_cache_tokens=observed.kv_cache_tokens,
        confidence=decimal_text(confidence),
        identity_source=source,
        notes=tuple(dict.fromkeys(note for run in found for note in run.notes)),
    )


def _identity(
    backend: str | None, file: Path | None, key: str | None, measured: dt.datetime
) -> tuple[ObservedIdentity, BoundaryNote | None]:
    """Attested by the running server, with a boundary note; or declared, without. Raises `ImportFailed`."""
    if backend is None:
        assert file is not None
        try:
            stated = policy.DeclaredIdentity.model_validate(yaml.safe_load(file.read_bytes()))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise ImportFailed(f"{file}: not a declared identity: {error}") from error
        return as_declared(stated, probed(None, None, None)), None
    observed, note = asyncio.run(_attested(backend.rstrip("/"), key))
    if observed.started_at is None or instant(observed.started_at) > measured:
        raise ImportFailed(
            "the engine was started after the measurement, so that it may be another: declare the identity instead"
        )
    return observed, note


async def _attested(backend: str, key: str | None) -> tuple[ObservedIdentity, BoundaryNote]:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await fetch_attested(client, backend, key), await boundary.observe(client, backend, key)


def _read(path: Path) -> object:
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise ImportFailed(f"{path}: more than {MAX_RESULT_BYTES} bytes")
        raw = path.read_bytes()
        return orjson.loads(raw)
    except OSError as error:
        raise ImportFailed(f"{path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ImportFailed(f"{path}: not JSON: {error}") from error


def _span(document: object, path: Path) -> tuple[dt.datetime, dt.datetime]:
    """When the measurement began and ended: what the result says, else when its file was written."""
    values = document if isinstance(document, dict) else {}
    end = dt.datetime.fromtimestamp(path.stat().st_mtime, dt.UTC)
    if isinstance(values.get("date"), str):
        try:
            end = dt.datetime.strptime(values["date"], "%Y%m%d-%H%M%S").astimezone(dt.UTC)
        except ValueError as error:
            raise ImportFailed(f"{path}: its date cannot be read: {values['date']!r}") from error
    stamps = [each.get("start_time") for each in values.get("benchmarks", []) if isinstance(each, dict)]
    known = [stamp for stamp in stamps if isinstance(stamp, int | float)]
    if known:
        return dt.datetime.fromtimestamp(min(known), dt.UTC), end
    duration = values.get("duration")
    return end - dt.timedelta(seconds=duration if isinstance(duration, int | float) else 0), end


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
