"""Where the gateway's own secrets come from: an environment variable or a file, never a command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.errors import PlimsollError

if TYPE_CHECKING:  # a probe reads a key and has no use for policies
    from gateway import policy as policies


class SecretMissing(PlimsollError):
    """A secret is not where it was said to be, or cannot be used; the message says where it was looked for."""


def secret(env: str, file: Path | None) -> str | None:
    """A secret from a file, else from the environment. None when neither has one; raises SecretMissing for a bad file."""
    if file is not None:
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SecretMissing(f"{file}: the key cannot be read: {error}") from error
        if not found:
            raise SecretMissing(f"{file}: the key file is empty")
        return found
    return os.environ.get(env) or None


def backend_key(backend: policies.Backend) -> str | None:
    """The key the gateway shows to a backend; None when the policy names none. Raises SecretMissing when it is not there."""
    if backend.api_key_file is None and backend.api_key_env is None:
        return None
    found = secret(backend.api_key_env or "", backend.api_key_file)
    if found is None:
        raise SecretMissing(
            f"the key of {backend.url} is expected in the environment variable {backend.api_key_env}, which is empty"
        )
    if not found.isascii() or not found.isprintable() or " " in found:
        raise SecretMissing(f"the key of {backend.url} has characters that no HTTP header can carry")
    return found
