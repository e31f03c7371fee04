"""The command `plimsoll`: mounts the subcommands and turns errors into one clear line and an exit code.

Exit codes: 0 good, 1 a negative answer (DEFER, not ready, refused), 2 usage or an error.
"""

from __future__ import annotations

import sys

import click
import typer

from gateway.commands import evidence, operate, records
from gateway.commands import serve as serving
from gateway.edge import keys_command
from gateway.errors import PlimsollError
from gateway.qualify import command as qualify_command
from gateway.simulator import command as simulator_command

app = typer.Typer(
    name="plimsoll",
    help="An OpenAI-compatible gateway in front of vLLM that admits a request only inside measured capacity.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_RUN, _EVIDENCE, _OPERATE = "Run", "Evidence", "Operate"
app.command("serve", rich_help_panel=_RUN)(serving.serve)
app.add_typer(simulator_command.app, name="simulator", rich_help_panel=_RUN)
app.command("identity", rich_help_panel=_EVIDENCE)(evidence.identity)
app.command("qualify", rich_help_panel=_EVIDENCE)(qualify_command.qualify)
app.command("evaluate", rich_help_panel=_EVIDENCE)(evidence.evaluate)
app.command("lab", rich_help_panel=_EVIDENCE)(evidence.lab)
app.add_typer(records.app, name="records", rich_help_panel=_EVIDENCE)
app.command("explain", rich_help_panel=_OPERATE)(operate.explain)
app.add_typer(operate.retest_app, name="retest", rich_help_panel=_OPERATE)
app.add_typer(keys_command.app, name="keys", rich_help_panel=_OPERATE)
app.add_typer(operate.policy_app, name="policy", rich_help_panel=_OPERATE)
app.command("health", rich_help_panel=_OPERATE)(operate.health)
app.command("top", rich_help_panel=_OPERATE)(operate.top)


def main() -> None:
    """Entry point of the command."""
    try:
        app(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except PlimsollError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
