"""`plimsoll serve`: the gateway in the foreground."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway import server


def serve(
    policy: Annotated[Path, typer.Option(help="The policy file; read again when it changes or on SIGHUP.")],
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; on standard error.")] = "info",
) -> None:
    """Run the gateway. SIGTERM drains, a second one ends at once, SIGHUP reloads the policy."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter("debug, info, warning or error", param_hint="--log-level")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("plimsoll").setLevel(level)
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it warns of each bad upload: no client fills the log
    code = uvloop.run(server.run(policy))
    if code:
        raise typer.Exit(code)
