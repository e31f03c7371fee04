"""`plimsoll policy check`, `explain`, `retest …` and `top`: questions to a policy file and to a running gateway."""

from __future__ import annotations

import datetime as dt
import time
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway import policy as policies
from gateway.commands.output import NEGATIVE, AsJson, CommandError, KeyEnv, KeyFile, console, emit_json, table
from gateway.commands.remote import Gateway, ask, operator_key
from gateway.credentials import secret
from gateway.evidence.record import RecordError
from gateway.evidence.store import RecordStore, StoreError
from gateway.queue_time import QueueTimeError, check_queue_times

policy_app = typer.Typer(help="The policy file.", no_args_is_help=True)
retest_app = typer.Typer(help="Traffic that left the measured slices, and the plan that would cover it.", no_args_is_help=True)
ADMIN = "http://127.0.0.1:8081"


@policy_app.command("check")
def check(file: Annotated[Path, typer.Argument(help="The policy file.")], as_json: AsJson = False) -> None:
    """Check a policy file as `serve` would, before it is put in force. Exit 1 when it would be refused."""
    try:
        rules = policies.load(file)
        notes = [*_notes(rules), *check_queue_times(rules, RecordStore(rules.records).load().records)]
    except (policies.PolicyError, QueueTimeError) as error:
        if as_json:
            emit_json({"usable": False, "problem": str(error)})
        else:
            console().print(f"[bold red]refused[/] {error}", soft_wrap=True)
        raise typer.Exit(NEGATIVE) from error
    except (StoreError, RecordError) as error:
        raise CommandError(f"the records cannot be read: {error}") from error
    if as_json:
        emit_json({"usable": True, "notes": notes})
        return
    out = console()
    out.print(f"[bold green]usable[/] {len(rules.models)} models, {len(rules.backends)} backends, {len(rules.keys)} keys")
    for note in notes:
        out.print(f"  - {note}", markup=False, soft_wrap=True)


def _notes(rules: policies.Policy) -> list[str]:
    """What is legal and still worth a second look."""
    roles = {key.role for key in rules.keys}
    if rules.oidc is not None:
        roles |= set(rules.oidc.roles.values()) or {"client"}
    notes = [f"no key has the role {role}: nobody can {what}" for role, what in _NEEDS.items() if role not in roles]
    if rules.enforcement == "observe":
        notes.append("enforcement is observe: nothing is refused for lack of evidence, it is only counted")
    for name, backend in rules.backends.items():
        if backend.source != "attested":
            most = "CONDITIONAL" if backend.source == "declared" else "DEFER"
            notes.append(f"backend {name} is {backend.source}: its verdict is at most {most}")
    return notes


_NEEDS = {"client": "use a model", "operator": "use the admin address", "scraper": "read /metrics", "prober": "ask /health"}


def explain(
    model: Annotated[str, typer.Option(help="The model's name in the policy.")],
    input_: Annotated[int, typer.Option("--input", min=0, help="Input tokens per sequence.")],
    output: Annotated[int | None, typer.Option("--output", min=0, help="Output tokens per sequence; else the default.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Prompts × n.")] = 1,
    task: Annotated[str, typer.Option(help="generate, pool or transcribe.")] = "generate",
    feature: Annotated[list[str] | None, typer.Option(help="A feature in use, such as logprobs. May be repeated.")] = None,
    tenant: Annotated[str | None, typer.Option(help="As this tenant.")] = None,
    gateway: Gateway = ADMIN,
    key_env: KeyEnv = "PLIMSOLL_KEY",
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Would such a request be admitted now, would it wait, or be refused, and by which rule? Exit 1 unless admitted."""
    question = {
        "model": model, "input_tokens": input_, "output_tokens": output, "sequences": sequences,
        "task": task, "features": feature or [], "tenant": tenant,
    }  # fmt: skip
    found = ask("POST", gateway, "/admin/explain", operator_key(key_env, key_file), json=question)
    if as_json:
        emit_json(found)
    else:
        console().print(table("Explanation", ("what", "answer"), _flat(found)))
    if found.get("decision") != "admit":
        raise typer.Exit(NEGATIVE)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [row for name, item in value.items() for row in _flat(item, f"{prefix}.{name}" if prefix else name)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [row for n, item in enumerate(value, 1) for row in _flat(item, f"{prefix} {n}")]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else value)]


@retest_app.command("list")
def retest_list(
    gateway: Gateway = ADMIN, key_env: KeyEnv = "PLIMSOLL_KEY", key_file: KeyFile = None, as_json: AsJson = False
) -> None:
    """What was asked for outside the slices, by model, configuration and axis."""
    found = ask("GET", gateway, "/admin/retest", operator_key(key_env, key_file))
    if as_json:
        emit_json(found)
        return
    out = console()
    rows = [
        (g["model"], g["hash"][:19], g["axis"], g["count"], moment(g["first"]), moment(g["last"]), _sizes(g))
        for g in found["groups"]
    ]
    out.print(
        table(
            "Retest triggers",
            ("model", "configuration", "axis", "count", "first seen", "last seen", "asked for"),
            rows,
            right=("count",),
        )
    )
    if found.get("replicas", 1) > 1:
        out.print(f"counted over {found['replicas']} replicas", markup=False)
    if not rows:
        out.print("nothing has left the measured slices")
    if found["changes"]:
        changes = [(moment(c["at"]), c["backend"], ", ".join(c["fields"]) or "-") for c in found["changes"]]
        out.print(table("Identity changes", ("when", "backend", "fields that differ"), changes))


def moment(seconds: float) -> str:
    """Unix seconds as people write it, in UTC."""
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _sizes(group: dict[str, Any]) -> str:
    """What was asked for on the axis that the group is about; on every axis where it is about none of them."""
    asked = group.get("asked") or {}
    axes = [group["axis"]] if group["axis"] in asked else list(asked)
    return (
        "; ".join(
            f"{axis} p50 {asked[axis].get('p50')} p95 {asked[axis].get('p95')} max {asked[axis].get('max')}"
            for axis in axes
            if asked[axis]
        )
        or "-"
    )


@retest_app.command("plan")
def retest_plan(
    model: Annotated[str, typer.Option(help="The model whose demand is to be covered.")],
    share: Annotated[float, typer.Option(min=0.5, max=1.0, help="The share of the demand to cover.")] = 0.95,
    out: Annotated[Path | None, typer.Option(help="Write the plan here instead of standard output.")] = None,
    gateway: Gateway = ADMIN,
    key_env: KeyEnv = "PLIMSOLL_KEY",
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Write the measurement plan (for `plimsoll qualify --plan`) that would cover what was asked for."""
    body = {"model": model, "share": share}
    found = ask("POST", gateway, "/admin/retest/plan", operator_key(key_env, key_file), json=body)
    if as_json:
        emit_json(found)
        return
    text = yaml.safe_dump(found, sort_keys=False)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
        console().print(f"wrote {out}; measure it with: plimsoll qualify --backend URL --plan {out} --out records/", markup=False)


def top(
    gateway: Gateway = ADMIN,
    key_env: KeyEnv = "PLIMSOLL_KEY",
    key_file: KeyFile = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a gateway: gates, what is in flight, what waits, what was refused last."""
    key = secret(key_env, key_file) or operator_key(key_env, key_file)
    if as_json:
        emit_json(ask("GET", gateway, "/admin/status", key))
        return
    if once:
        console().print(_screen(gateway, key))
        return
    with Live(_screen(gateway, key), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_screen(gateway, key), refresh=True)


def _screen(gateway: str, key: str) -> RenderableType:
    status = ask("GET", gateway, "/admin/status", key)
    ready = "ready" if status["ready"] else f"NOT READY: {status['not_ready_because']}"
    head = Text(
        f"plimsoll {status['version']} at {gateway}, {ready}, enforcement {status['enforcement']}, up {status['uptime_s']:.0f} s"
    )
    backends = [
        (
            b["name"], b["gate"], (b["hash"] or "-")[:19], f"{b['in_flight_sequences']}/{b['limits'].get('concurrency', '-')}",
            f"{b['reserved_tokens']}/{b['token_budget'] or '-'}", b["breaker"], b["gate_message"] or "",
        )
        for b in status["backends"]
    ]  # fmt: skip
    queues = [
        (q["name"], q["requests"], q["tokens"], None if q["oldest_s"] is None else f"{q['oldest_s']:.1f}")
        for q in status["queues"]
    ]
    recent = ask("GET", gateway, "/admin/journal?limit=8", key)
    rows = [(r.get("time"), r.get("model"), r.get("tenant"), r.get("reason"), r.get("message")) for r in _rows(recent)]
    return Group(
        head,
        table("Backends", ("backend", "gate", "configuration", "sequences", "tokens", "breaker", "why"), backends),
        table("Queue", ("class", "requests", "tokens", "oldest s"), queues, right=("requests", "tokens", "oldest s")),
        table("Not served, latest first", ("time", "model", "tenant", "reason", "message"), rows),
    )


def _rows(found: Any) -> list[dict[str, Any]]:
    return list(found["requests"])
