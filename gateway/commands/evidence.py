"""`plimsoll identity`, `evaluate`, `lab` and `records …`: evidence on the command line. Nothing here decides; it shows."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from gateway import policy as policies
from gateway.commands.output import NEGATIVE, AsJson, CommandError, KeyEnv, KeyFile, console, emit_json, table
from gateway.credentials import backend_key, secret
from gateway.evidence import identity_client
from gateway.evidence.checklist import exit_checklist
from gateway.evidence.identity import IdentityError, ObservedIdentity
from gateway.evidence.lab import run_lab
from gateway.evidence.record import BoundaryNote, Record, RecordError, load
from gateway.evidence.states import Verdict
from gateway.evidence.target import Target, TargetSlice
from gateway.evidence.verdict import evaluate as judge
from gateway.forward.endpoint import Endpoint
from gateway.forward.watch import http_client
from gateway.qualify import boundary
from gateway.qualify.plan import Plan
from gateway.qualify.settle import NoPlan, settling

Backend = Annotated[str, typer.Option("--backend", help="URL of the vLLM server, for example http://127.0.0.1:8000.")]


def identity(
    backend: Backend,
    api_key_env: KeyEnv = "VLLM_API_KEY",
    api_key_file: KeyFile = None,
    probed: Annotated[bool, typer.Option(help="Ask the stock endpoints only, as for a server without the middleware.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a backend's effective configuration and the hash that names it."""
    seen = asyncio.run(
        _observe(policies.Backend(url=backend, identity="probed" if probed else "attested"), secret(api_key_env, api_key_file))
    )
    if as_json:
        emit_json(asdict(seen))
    else:
        _print_identity(backend, seen)
    if seen.identity.missing:
        raise typer.Exit(NEGATIVE)


def _print_identity(backend: str, seen: ObservedIdentity) -> None:
    out = console()
    rows: list[tuple[str, Any]] = [("source", seen.source), *((n, getattr(seen.identity, n) or "unknown") for n in _FIELDS)]
    rows += [("KV cache, tokens", seen.kv_cache_tokens), ("engine start", seen.engine_start_id), ("started at", seen.started_at)]
    rows += [("requests of others in flight", seen.foreign_in_flight)]
    out.print(table(f"Identity of {backend}", ("field", "value"), rows))
    leaves = [(f"{group}.{name}", value) for group, fields in seen.document.items() for name, value in _items(fields)]
    out.print(table("Effective configuration (what the hash covers)", ("field", "value"), leaves))
    if seen.unknown:
        out.print(f"[yellow]unknown:[/] {', '.join(seen.unknown)}")


_FIELDS = ("model_revision", "vllm_version", "server_configuration_hash", "hardware_profile")


def _items(fields: Any) -> list[tuple[str, Any]]:
    return list(fields.items()) if isinstance(fields, dict) else [("", fields)]


async def _boundary(backend: policies.Backend) -> BoundaryNote:
    client, base = http_client(backend.url, Endpoint.from_policy(backend), "plimsoll-cli")
    async with client:
        return await boundary.observe(client, base, backend_key(backend))


async def _observe(backend: policies.Backend, key: str | None) -> ObservedIdentity:
    client, base = http_client(backend.url, Endpoint.from_policy(backend), "plimsoll-cli")
    async with client:
        if isinstance(backend.identity, policies.DeclaredIdentity):
            return await identity_client.fetch_declared(client, base, key, backend.identity)
        ask = identity_client.fetch_attested if backend.identity == "attested" else identity_client.fetch_probed
        return await ask(client, base, key)


def evaluate(
    record: Annotated[Path, typer.Argument(help="The record's file.")],
    policy: Annotated[Path, typer.Option(help="The policy whose model and backend are meant.")],
    model: Annotated[str | None, typer.Option(help="A model of the policy; may be left out when there is one.")] = None,
    backend: Annotated[str | None, typer.Option(help="A backend of that model; may be left out when there is one.")] = None,
    input_: Annotated[int | None, typer.Option("--input", min=1, help="Target input, tokens per sequence.")] = None,
    output: Annotated[int | None, typer.Option("--output", min=0, help="Target output, tokens per sequence.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", min=1, help="Target sequences at once.")] = None,
    plan: Annotated[Path | None, typer.Option(help="On DEFER, write here the measurement plan that would settle it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a record for a running backend and a target: eight fields, then the exit checklist. Exit 1 on DEFER."""
    evidence = read_record(record)
    rules = policies.load(policy)
    model_name, chosen = _choose(rules, model, backend)
    target = Target.from_policy(rules.models[model_name].target)
    asked = (input_, output, concurrency)
    if any(part is not None for part in asked):
        if any(part is None for part in asked):
            raise CommandError("--input, --output and --concurrency go together: a target slice has all three")
        target = replace(target, slice=TargetSlice(input_ or 1, output or 0, concurrency or 1))
    seen, problem = _observed(rules.backends[chosen])
    note = None if seen is None else asyncio.run(_boundary(rules.backends[chosen]))
    filled = note is not None and evidence.security_boundary_note is None
    if filled:  # a record that was made without one: what answers without a key is seen from here just as well
        evidence = evidence.model_copy(update={"security_boundary_note": note})
    verdict = judge(evidence, seen, target, dt.datetime.now(dt.UTC))
    offer: dict[str, str] = {}
    if plan is not None:
        served = rules.models[model_name].upstream_model or model_name
        offer = _offer(plan, lambda: settling(evidence, seen, target, verdict, served))
    if as_json:
        told: dict[str, Any] = {"details": verdict.details, "triggers": verdict.triggers, "backend_problem": problem}
        told["security_boundary_now"] = None if note is None else note.model_dump()
        emit_json({**verdict.fields, **told, **offer})
    else:
        print_verdict(evidence, verdict, f"record {record.name[:16]} for {model_name} on {chosen}", problem)
        if note is not None:
            whose = "the record has no security boundary note; judged with what was seen now" if filled else "seen from here now"
            console().print(f"{whose}: {note.api_key_covers}", markup=False, soft_wrap=True)
        if plan is not None:
            command = f"plimsoll qualify --backend {rules.backends[chosen].url} --plan {plan} --out {record.parent}"
            text = f"wrote {plan}; measure it with: {command}" if "plan" in offer else f"no plan is written: {offer['no_plan']}"
            console().print(text, markup=False, soft_wrap=True)
    if verdict.fields["final_decision"] == "DEFER":
        raise typer.Exit(NEGATIVE)


def _offer(file: Path, made: Callable[[], Plan]) -> dict[str, str]:
    """Write the plan that would settle a DEFER: {"plan": its file}, or {"no_plan": why there is none}. Raises CommandError."""
    try:
        text = yaml.safe_dump(made().model_dump(mode="json", by_alias=True, exclude_unset=True), sort_keys=False)
        file.write_text(text, encoding="utf-8")
    except NoPlan as reason:
        return {"no_plan": str(reason)}
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from error
    return {"plan": str(file)}


def _observed(backend: policies.Backend) -> tuple[ObservedIdentity | None, str | None]:
    try:
        return asyncio.run(_observe(backend, backend_key(backend))), None
    except IdentityError as error:
        return None, str(error)


def _choose(rules: policies.Policy, model: str | None, backend: str | None) -> tuple[str, str]:
    if model is None and len(rules.models) != 1:
        raise CommandError(f"--model is needed: the policy has {', '.join(rules.models)}")
    name = model or next(iter(rules.models))
    if name not in rules.models:
        raise CommandError(f"no model {name!r} in the policy; it has {', '.join(rules.models)}")
    names = rules.models[name].backends
    if backend is None and len(names) != 1:
        raise CommandError(f"--backend is needed: {name} has {', '.join(names)}")
    chosen = backend or names[0]
    if chosen not in names:
        raise CommandError(f"model {name!r} has no backend {chosen!r}; it has {', '.join(names)}")
    return name, chosen


_COLOURS = {"PASS": "bold green", "CONDITIONAL": "bold yellow", "DEFER": "bold red"}


def print_verdict(record: Record, verdict: Verdict, what: str, problem: str | None) -> None:
    """The eight fields, what led to them, and the exit checklist."""
    out = console()
    rows = [
        (name, f"[{_COLOURS.get(value, 'none')}]{value}[/]" if value in _COLOURS else value)
        for name, value in verdict.fields.items()
    ]
    out.print(table(f"Verdict: {what}", ("field", "value"), rows))
    for line in (*([problem] if problem else []), *verdict.details):
        out.print(f"  - {line}", markup=False)
    if verdict.triggers:
        out.print(f"  retest triggers: {', '.join(verdict.triggers)}", markup=False)
    checklist = [(row.question, row.answer, "yes" if row.answered else "NO") for row in exit_checklist(record, verdict)]
    out.print(table("Exit checklist", ("question", "answer", "answered"), checklist))


def read_record(path: Path) -> Record:
    """A record from its file. Raises CommandError naming the file."""
    try:
        return load(path.read_bytes())
    except (OSError, RecordError) as error:
        raise CommandError(f"{path}: {error}") from error


def lab(
    directory: Annotated[Path | None, typer.Option(help="Fixtures to run instead of the built-in ones.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the eight fixtures: small records whose verdict is known. Exit 1 when one disagrees."""
    rows = run_lab(directory)
    if as_json:
        emit_json([{"name": r.name, "agrees": r.agrees, **r.verdict.fields, "explanation": r.explanation} for r in rows])
    else:
        states = [(r.name, *list(r.verdict.fields.values())[:6]) for r in rows]
        fields = ("fixture", "provenance", "measurement", "slice", "service", "boundary", "retest")
        console().print(table("The lab: eight records whose verdict is known", fields, states))
        verdicts = [(r.name, *list(r.verdict.fields.values())[6:], "yes" if r.agrees else "NO", r.explanation) for r in rows]
        columns = ("fixture", "decision", "reason", "as expected", "what it teaches")
        console().print(table("Decisions", columns, verdicts))
    if not all(row.agrees for row in rows):
        raise typer.Exit(NEGATIVE)
