"""The command `plimsoll`: mounts the subcommands and turns errors into one clear line and an exit code.

Exit codes: 0 good, 1 a negative answer (DEFER, not ready, refused), 2 usage or an error. A subcommand's module is imported
only when it is the one that was asked for, so that an exec probe does not pay for plots.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

import typer

from gateway.errors import PlimsollError


class Mount(NamedTuple):
    """Where a subcommand lives: a function, or a Typer application of its own."""

    panel: str
    module: str
    attribute: str


_RUN, _EVIDENCE, _OPERATE = "Run", "Evidence", "Operate"
MOUNTS = {
    "serve": Mount(_RUN, "gateway.commands.serve", "serve"),
    "simulator": Mount(_RUN, "gateway.simulator.command", "app"),
    "identity": Mount(_EVIDENCE, "gateway.commands.evidence", "identity"),
    "qualify": Mount(_EVIDENCE, "gateway.qualify.command", "qualify"),
    "evaluate": Mount(_EVIDENCE, "gateway.commands.evidence", "evaluate"),
    "lab": Mount(_EVIDENCE, "gateway.commands.evidence", "lab"),
    "records": Mount(_EVIDENCE, "gateway.commands.records", "app"),
    "explain": Mount(_OPERATE, "gateway.commands.operate", "explain"),
    "retest": Mount(_OPERATE, "gateway.commands.operate", "retest_app"),
    "top": Mount(_OPERATE, "gateway.commands.operate", "top"),
    "health": Mount(_OPERATE, "gateway.commands.health", "health"),
    "keys": Mount(_OPERATE, "gateway.edge.keys_command", "app"),
    "policy": Mount(_OPERATE, "gateway.commands.operate", "policy_app"),
}


def build(asked: str | None) -> typer.Typer:
    """The application with the subcommand that is asked for; with all of them when that is none of them."""
    app = typer.Typer(
        name="plimsoll",
        help="An OpenAI-compatible gateway in front of vLLM that admits a request only inside measured capacity.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name in [asked] if asked in MOUNTS else MOUNTS:
        mount = MOUNTS[str(name)]
        found = getattr(import_module(mount.module), mount.attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, rich_help_panel=mount.panel)
        else:
            app.command(name, rich_help_panel=mount.panel)(found)
    return app


def _root() -> None:
    """Keeps subcommands subcommands, even where only one is mounted."""


_root.__doc__ = None


def main() -> None:
    """Entry point of the command."""
    try:
        build(sys.argv[1] if len(sys.argv) > 1 else None)()
    except PlimsollError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
