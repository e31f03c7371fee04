"""`plimsoll qualify`: the options, and how the result is printed.

Owns: what an operator types and reads. Promises: exit code 0 with a record, 1 when the server gave none, 2 for a wrong use (a
plan that is none); an interrupt leaves nothing behind; the API key comes from the environment or a file, never from an argument.
Talks to: `run`, `plan`, `progress`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from gateway import policy
from gateway.evidence.record import Level, Record
from gateway.qualify import plan as plans
from gateway.qualify.plan import Plan
from gateway.qualify.progress import display
from gateway.qualify.run import QualifyResult, Request
from gateway.qualify.run import qualify as measure
from gateway.qualify.search import Limits
from gateway.qualify.secret import api_key as find_api_key
from gateway.qualify.session import QualifyError

_SEARCH, _BACKEND = "Search", "Backend"


def qualify(
    backend: Annotated[str, typer.Option(help="URL of the vLLM server.", rich_help_panel=_BACKEND)],
    plan: Annotated[str, typer.Option(help="A plan file, or the name of a shipped plan: quick, standard, release.")] = "standard",
    out: Annotated[Path, typer.Option(help="Directory for the record and its raw samples.")] = Path("records"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent and how long it takes; send nothing.")
    ] = False,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the server's API key.", rich_help_panel=_BACKEND)
    ] = "VLLM_API_KEY",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File that holds the server's API key.", rich_help_panel=_BACKEND)
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(help="YAML file with a declared identity, for a server without the middleware.", rich_help_panel=_BACKEND),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Served model name; the first one where not given.")] = None,
    external_boundary: Annotated[
        str | None,
        typer.Option(help="The outer boundary that stands before the server, for the record.", rich_help_panel=_BACKEND),
    ] = None,
    supersede: Annotated[bool, typer.Option(help="Name the record of the same model that this one replaces.")] = True,
    find_concurrency: Annotated[
        bool,
        typer.Option("--find-concurrency", help="Find the largest concurrency that meets the limits.", rich_help_panel=_SEARCH),
    ] = False,
    max_concurrency: Annotated[int, typer.Option(min=1, help="The search goes no higher.", rich_help_panel=_SEARCH)] = 256,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="p95 end to end.", rich_help_panel=_SEARCH)] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="p95 to the first token.", rich_help_panel=_SEARCH)] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="p95 a token after the first.", rich_help_panel=_SEARCH)] = None,
    slo_output_tokens_per_s: Annotated[float | None, typer.Option(help="Least output.", rich_help_panel=_SEARCH)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a server and write a Capacity Evidence Record of it."""
    limits = Limits(slo_e2e_ms, slo_ttft_ms, slo_tpot_ms, slo_output_tokens_per_s)
    if find_concurrency != limits.stated:
        raise typer.BadParameter("--find-concurrency goes together with at least one of the --slo-... limits")
    try:
        chosen = plans.load(plan)
        if model is not None:
            chosen = chosen.model_copy(update={"model": model})
        if dry_run:
            _print_steps(chosen, as_json)
            return
        request = Request(
            backend=_backend(backend, identity),
            plan=chosen,
            out=out,
            api_key=find_api_key(api_key_env, api_key_file),
            search=limits if find_concurrency else None,
            most=max_concurrency,
            supersede=supersede,
            external_boundary=external_boundary,
        )
        with display() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measure(request, progress))
    except KeyboardInterrupt:
        typer.echo("interrupted: no record was written", err=True)
        raise
    except QualifyError as error:
        typer.echo(f"no record: {error}", err=True)
        raise typer.Exit(1) from None
    _print_result(result, as_json)


def _backend(url: str, identity: Path | None) -> policy.Backend:
    """Raises typer.BadParameter when the URL or the declared identity cannot be used."""
    try:
        if identity is None:
            return policy.Backend(url=url)
        declared = policy.DeclaredIdentity.model_validate(yaml.safe_load(identity.read_bytes()))
        return policy.Backend(url=url, identity=declared)
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{identity}: {error}") from error
    except ValidationError as error:
        raise typer.BadParameter("; ".join(e["msg"] for e in error.errors(include_url=False))) from error


def _print_steps(plan: Plan, as_json: bool) -> None:
    steps = plans.steps(plan)
    total = sum(step.seconds for step in steps)
    if as_json:
        found: dict[str, Any] = {"plan": plan.name, "digest": plan.digest, "steps": [step.model_dump() for step in steps]}
        typer.echo(json.dumps({**found, "seconds": total}))
        return
    table = Table(title=f"{plan.name}: {plan.repeats} repeats, about {_duration(total)}")
    for name in ("cell", "input", "output", "at once", "requests", "tokens in", "tokens out", "time"):
        table.add_column(name, justify="right")
    for step in steps:
        cell = plan.cells[step.cell]
        table.add_row(
            str(step.cell + 1), f"{cell.input_tokens.min}-{cell.input_tokens.max}",
            f"{cell.output_tokens.min}-{cell.output_tokens.max}", str(step.concurrency), f"{step.requests:,}",
            f"{step.input_tokens:,}", f"{step.output_tokens:,}", _duration(step.seconds),
        )  # fmt: skip
    print_table(table)
    warm = "no warm-up" if plan.warmup is None else f"warm-up of {plan.warmup.requests} to {plan.warmup.max_requests} requests"
    typer.echo(f"{plan.description}\nBefore it: {warm}. The times assume 15 ms a token; the plan's own limits cap them.")


def _print_result(result: QualifyResult, as_json: bool) -> None:
    if as_json:
        found = {
            "record": result.record_id,
            "path": str(result.path),
            "samples": str(result.samples),
            "notes": list(result.notes),
        }
        typer.echo(json.dumps(found))
        return
    print_table(level_table(result.record))
    for note in result.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"record   {result.path}\nsamples  {result.samples}\nreport   plimsoll records report {result.path}")


def print_table(table: Table) -> None:
    """To standard output; where that is no terminal, wide enough that nothing is cut."""
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)


def level_table(record: Record) -> Table:
    """Every level of every slice: what was measured, with the bounds in brackets."""
    table = Table(title="Measured, in milliseconds; in brackets the upper bound of the percentile")
    names = (
        "input",
        "output",
        "at once",
        "requests",
        "errors",
        "e2e p50",
        "e2e p95",
        "TTFT p95",
        "TPOT p95",
        "queue",
        "tokens/s",
    )
    for name in names:
        table.add_column(name, justify="right")
    for each in record.slices:
        for level in each.levels:
            failed = level.errors + level.timeouts
            mark = " void" if level.void else " rising" if level.oversaturated else ""
            table.add_row(
                f"{each.input_tokens.min}-{each.input_tokens.max}", f"{each.output_tokens.min}-{each.output_tokens.max}",
                f"{level.concurrency}{mark}", str(level.requests), str(failed), _ms(level, "e2e_ms", "p50"),
                _ms(level, "e2e_ms", "p95"), _ms(level, "ttft_ms", "p95"), _ms(level, "tpot_ms", "p95"),
                _round(level.queue_ms.mean), _round(level.output_tokens_per_s),
            )  # fmt: skip
    return table


def _ms(level: Level, metric: str, name: str) -> str:
    statistics = getattr(level, metric)
    value, upper = getattr(statistics, name), getattr(statistics, name + "_upper")
    return f"{_round(value)} ({_round(upper)})" if value is not None else "-"


def _round(value: str | None) -> str:
    if value is None:
        return "-"
    number = float(value)
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
