"""`plimsoll records report`: a record as a page and pictures.

Owns: what an operator types for it. Promises: a record whose raw samples are missing or changed still gets its report, which
says so. Talks to: `report`, `samples`.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

from gateway import policy
from gateway.errors import PlimsollError
from gateway.evidence.record import Record, load
from gateway.evidence.target import Target
from gateway.qualify import samples
from gateway.qualify.report import report as make_report
from gateway.qualify.samples import RawSample, SamplesError


class ReportError(PlimsollError):
    """No report can be made; the message says why."""


def report(
    record: Annotated[Path, typer.Argument(help="The record's file.")],
    out: Annotated[Path | None, typer.Option(help="The page; beside the record where not given.")] = None,
    png: Annotated[Path | None, typer.Option(help="Directory for the pictures as PNG files.")] = None,
    policy_file: Annotated[Path | None, typer.Option("--policy", help="Judge by the target of a model in this policy.")] = None,
    model: Annotated[str | None, typer.Option(help="The model in the policy; its only one where not given.")] = None,
) -> None:
    """One self-contained HTML page about a record, with its pictures."""
    found = _record(record)
    raw, problem = _samples(found, record.parent)
    target = None if policy_file is None else _target(policy_file, model)
    made = make_report(found, raw, target, dt.datetime.now(dt.UTC), png=png is not None)
    page = out or record.with_suffix(".html")
    try:
        page.write_text(made.html, encoding="utf-8")
        if png is not None:
            png.mkdir(parents=True, exist_ok=True)
            for picture in made.pictures:
                (png / f"{picture.name}.png").write_bytes(picture.png or b"")
    except OSError as error:
        raise ReportError(f"{error.filename}: {error.strerror}") from error
    if problem is not None:
        typer.echo(f"note: without raw samples: {problem}", err=True)
    typer.echo(str(page))


def _record(path: Path) -> Record:
    try:
        return load(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error


def _samples(record: Record, directory: Path) -> tuple[list[RawSample], str | None]:
    """The raw samples beside the record; or none, and why."""
    if record.samples is None:
        return [], "the record names none"
    try:
        return samples.read(directory / record.samples.file, record.samples.sha256), None
    except SamplesError as error:
        return [], str(error)


def _target(path: Path, model: str | None) -> Target:
    models = policy.load(path).models
    name = model or (next(iter(models)) if len(models) == 1 else None)
    if name not in models:
        raise ReportError(f"{path}: name one of its models with --model: {', '.join(models)}")
    return Target.from_policy(models[name].target)
