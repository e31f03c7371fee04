"""Where the commands of this package find the server's API key: the environment or a file, never an argument."""

from __future__ import annotations

import os
from pathlib import Path

import typer


def api_key(variable: str, file: Path | None) -> str | None:
    """The key; None where there is none. Raises typer.BadParameter when the file cannot be read."""
    if file is None:
        return os.environ.get(variable) or None
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {error}") from error
