"""`plimsoll records …`: the store on the command line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.evidence import read_record
from gateway.commands.output import NEGATIVE, AsJson, CommandError, KeyEnv, KeyFile, console, emit_json, table
from gateway.commands.remote import ask
from gateway.credentials import secret
from gateway.evidence import signing
from gateway.evidence.identity import diff, triggers_of
from gateway.evidence.record import Record, record_id
from gateway.evidence.record import as_json as record_json
from gateway.evidence.store import RecordStore
from gateway.qualify import import_command, report_command

app = typer.Typer(help="Evidence records: write-once files named by their digest.", no_args_is_help=True)
Store = Annotated[Path, typer.Option("--store", help="The directory of records.")]
File = Annotated[Path, typer.Argument(help="A record's file, or the start of its id in the store.")]
STORE = Path("records")
app.command("report")(report_command.report)
app.command("import")(import_command.import_results)


def find(name: Path, store: Path) -> tuple[Path, Record]:
    """A record by its file, or by the start of its id in `store`. Raises CommandError."""
    if name.exists():
        return name, read_record(name)
    start = name.name.removesuffix(".json")
    if not re.fullmatch(r"[0-9a-f]{4,64}", start):
        raise CommandError(f"{name}: no such file, and not the start of a record's id (4 hex digits or more)")
    found = [path for path in sorted(store.glob(f"{start}*.json")) if not path.name.endswith(".sig.json")]
    if len(found) != 1:
        raise CommandError(f"{start}: {len(found)} records in {store} start with it")
    return found[0], read_record(found[0])


@app.command("list")
def list_records(store: Store = STORE, as_json: AsJson = False) -> None:
    """Every record of the store, and every file that is refused with the reason. Exit 1 when one is refused."""
    report = RecordStore(store).load()
    if as_json:
        emit_json(
            {"records": [_row_json(i, r) for i, r in report.records.items()], "refused": [f._asdict() for f in report.refused]}
        )
    else:
        rows = [
            (
                *(i[:16], r.identity.model_revision, r.identity.vllm_version, _slices(r)),
                *(r.protocol.started_at, r.valid_until, len(report.signatures.get(i, ()))),
            )
            for i, r in report.records.items()
        ]
        columns = (
            "id",
            "model revision",
            "vLLM",
            "slices (input × output × concurrency)",
            "measured",
            "valid until",
            "signatures",
        )
        console().print(table(f"Records in {store}", columns, rows, right=("signatures",)))
        for each in report.refused:
            console().print(f"[bold red]refused[/] {each.name}: {each.reason}", soft_wrap=True)
    if report.refused:
        raise typer.Exit(NEGATIVE)


def _row_json(identity: str, record: Record) -> dict[str, object]:
    return {
        "id": identity,
        "identity": record.identity.model_dump(),
        "slices": _slices(record),
        "started_at": record.protocol.started_at,
        "valid_until": record.valid_until,
    }


def _slices(record: Record) -> str:
    return "; ".join(
        f"{s.input_tokens.min}-{s.input_tokens.max} × {s.output_tokens.min}-{s.output_tokens.max} × {s.levels[-1].concurrency}"
        + (f" +{','.join(s.features)}" if s.features else "")
        for s in record.slices
    )


@app.command()
def show(record: File, store: Store = STORE, as_json: AsJson = False) -> None:
    """What a record says: who was measured, how, and every level."""
    path, found = find(record, store)
    if as_json:
        emit_json(record_json(found))
        return
    out = console()
    out.print(table(f"Record {record_id(found)[:16]} ({path.name})", ("field", "value"), _head(found)))
    rows = [
        (
            f"{s.task} {s.input_tokens.min}-{s.input_tokens.max} × {s.output_tokens.min}-{s.output_tokens.max}",
            *(v.concurrency, v.requests, f"{v.errors}/{v.timeouts}", v.e2e_ms.p50, v.e2e_ms.p95, v.e2e_ms.p95_upper),
            *(v.ttft_ms.p95, v.output_tokens_per_s, "void" if v.void else "not steady" if v.oversaturated else ""),
        )
        for s in found.slices
        for v in s.levels
    ]
    columns = ("slice", "conc.", "requests", "err/timeouts", "e2e p50", "p95", "p95 bound", "ttft p95", "tokens/s", "note")
    out.print(table("Levels (milliseconds)", columns, rows, right=columns[1:-1]))


def _head(found: Record) -> list[tuple[str, object]]:
    protocol, note = found.protocol, found.security_boundary_note
    return [
        *((name, value or "unknown") for name, value in found.identity.model_dump().items()),
        ("measured", f"{protocol.started_at} to {protocol.finished_at or '?'} with {protocol.tool}"),
        ("protocol", f"{protocol.arrival}, {protocol.dataset}, {protocol.repeats} repeats, warm-up {protocol.warmup_state}"),
        ("confidence", protocol.confidence),
        ("raw samples", found.samples.file if found.samples else None),
        ("API key covers", note.api_key_covers if note else "missing"),
        ("outer boundary", note.external_boundary if note else "missing"),
        ("notes", "; ".join(protocol.notes) or None),
        ("retest triggers", ", ".join(found.retest_triggers)),
        ("valid until", found.valid_until),
        ("supersedes", found.supersedes.record[:16] if found.supersedes else None),
    ]


@app.command("diff")
def diff_records(a: File, b: File, store: Store = STORE, as_json: AsJson = False) -> None:
    """What changed between two records, and which evidence that makes history. Exit 1 when they are of different servers."""
    (_, old), (_, new) = find(a, store), find(b, store)
    changes = diff(old.configuration, new.configuration)
    triggers = triggers_of(changes)
    if as_json:
        emit_json(
            {"changes": [c._asdict() for c in changes], "triggers": triggers, "slices": {"a": _slices(old), "b": _slices(new)}}
        )
    else:
        out = console()
        names = ("field", record_id(old)[:16], record_id(new)[:16])
        out.print(table("Configuration fields that differ", names, [(c.field, c.old, c.new) for c in changes]))
        out.print(
            table(
                "Measured slices",
                ("record", "slices"),
                [(record_id(old)[:16], _slices(old)), (record_id(new)[:16], _slices(new))],
            )
        )
        if changes:
            out.print(f"retest triggers: {', '.join(triggers)}", markup=False)
            out.print("No slice of one is evidence for the server of the other: they are different configurations.")
        else:
            out.print("Both are evidence for the same configuration.")
    if changes:
        raise typer.Exit(NEGATIVE)


@app.command()
def verify(
    record: File,
    store: Store = STORE,
    trusted: Annotated[list[str] | None, typer.Option(help="A public key that must have signed. May be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a record's name, its raw samples and its signatures against its content. Exit 1 on a problem."""
    path, found = find(record, store)
    identity, problems = record_id(found), []
    directory = RecordStore(path.parent)
    if path.name != f"{identity}.json":
        problems.append(f"the file is named {path.name}, its content is record {identity[:16]}")
    if problem := directory.check_samples(found):
        problems.append(problem)
    signatures = directory.load().signatures.get(identity, ())
    signers = [s.public_key for s in signatures if signing.holds(found, s)]
    problems += [f"the signature of {s.public_key[:24]} does not hold" for s in signatures if s.public_key not in signers]
    if trusted:
        try:
            signing.require(found, signatures, trusted)
        except signing.SignatureError as error:
            problems.append(str(error))
    if as_json:
        emit_json({"id": identity, "good": not problems, "problems": problems, "signed_by": signers})
    else:
        rows = [("id", identity), ("signed by", ", ".join(signers) or None), ("problems", "; ".join(problems) or "none")]
        console().print(table("Verification", ("what", "answer"), rows))
    if problems:
        raise typer.Exit(NEGATIVE)


@app.command()
def sign(
    record: File,
    key_file: Annotated[Path, typer.Option(help="The Ed25519 private key, PEM.")],
    store: Store = STORE,
) -> None:
    """Sign a record; the signature is kept beside it."""
    path, found = find(record, store)
    try:
        signature = signing.sign(found, key_file.read_bytes())
    except OSError as error:
        raise CommandError(f"{key_file}: {error.strerror}") from error
    RecordStore(path.parent).put_signature(record_id(found), signature)
    console().print(f"signed {record_id(found)[:16]} as {signature.public_key}", markup=False, soft_wrap=True)


@app.command("new-key")
def new_key(out: Annotated[Path, typer.Option(help="Where the private key is written (0600). It must not exist.")]) -> None:
    """Make an Ed25519 key for signing records; the public key is printed, for `require_signature` in the policy."""
    pem, public = signing.new_key()
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(pem)
    console().print(public, markup=False, soft_wrap=True)


@app.command()
def push(
    record: File,
    gateway: Annotated[str, typer.Option("--gateway", help="The gateway's admin address.")] = "http://127.0.0.1:8081",
    store: Store = STORE,
    key_env: KeyEnv = "PLIMSOLL_KEY",
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Send a record to a running gateway; its verdict on each backend comes back. Exit 1 when it opens no gate."""
    path, found = find(record, store)
    key = secret(key_env, key_file)
    signatures = RecordStore(path.parent).load().signatures.get(record_id(found), ())
    lines = [("x-plimsoll-signature", signing.written(each)) for each in signatures]
    answer = ask("POST", gateway, "/admin/records", key, more=lines, content=path.read_bytes())
    if as_json:
        emit_json(answer)
    else:
        verdicts = answer.get("verdicts", [])
        console().print(
            f"record {answer.get('id', '')[:16]} {'stored' if answer.get('new') else 'was there already'}", markup=False
        )
        rows = [
            (
                *(v.get("backend"), v.get("model"), v.get("decision"), v.get("reason"), v.get("failed")),
                *(v.get("slices_open"), "; ".join(v.get("details", [])[:6])),
            )
            for v in verdicts
        ]
        console().print(
            table("Verdicts", ("backend", "model", "decision", "reason", "field that failed", "slices open", "why"), rows)
        )
    if not any(v.get("slices_open") for v in answer.get("verdicts", [])):
        raise typer.Exit(NEGATIVE)
