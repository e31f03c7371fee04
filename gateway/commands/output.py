"""How commands talk: tables for people, JSON for programs, one clear sentence for errors.

Owns the console and the exit codes: 0 good, 1 a negative answer (DEFER, not ready, refused), 2 usage or an error.
Promises: with `--json` standard output is one JSON document and nothing else; everything for people that is not the
answer goes to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gateway.errors import PlimsollError

NEGATIVE = 1
USAGE = 2

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
KeyEnv = Annotated[str, typer.Option(help="Environment variable that holds the key.")]
KeyFile = Annotated[Path | None, typer.Option(help="File that holds the key, instead of the environment.")]


class CommandError(PlimsollError):
    """A command cannot do what was asked; the message is the whole explanation."""


def console() -> Console:
    """Standard output for people; as wide as the terminal, 120 columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def emit_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=1, default=str, ensure_ascii=False) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """A table; columns named in `right` hold numbers. None is shown as a dash."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", show_lines=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*("-" if cell is None else str(cell) for cell in row))
    return made
