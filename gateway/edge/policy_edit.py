"""Edits of the `keys` section of a policy file that leave everything else as the operator wrote it, comments included.

Owns the text changes and the safe replacement of the file. Promises: the new text is checked as a whole policy before it
replaces the old one, at once and with the old file's owner and mode; a text that another edit has changed meanwhile is
not overwritten.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError

from gateway import policy as policies
from gateway.policy import Policy, PolicyError


def key_line(id: str, hash: str, role: str, tenant: str | None, expires: str | None) -> str:
    """The line an operator adds under `keys:`."""
    parts = [f"id: {id}", f'hash: "{hash}"', f"role: {role}"]
    if tenant is not None:
        parts.append(f"tenant: {tenant}")
    if expires is not None:
        parts.append(f'expires: "{expires}"')
    return "- {" + ", ".join(parts) + "}"


def add_key(text: str, line: str) -> str:
    """The text with one key more. Raises PolicyError when the text is not YAML with a list of keys."""
    document = _read(text)
    keys = document.setdefault("keys", CommentedSeq())
    if keys is None:
        keys = document["keys"] = CommentedSeq()
    keys.append(_read(line)[0])
    keys.fa.set_block_style()
    return _write(document)


def remove_key(text: str, id: str) -> str:
    """The text without the key of that id. Raises PolicyError when there is none."""
    document = _read(text)
    keys = document.get("keys") or []
    for index, key in enumerate(keys):
        if key.get("id") == id:
            del keys[index]
            return _write(document)
    raise PolicyError(f"there is no key with the id {id!r}")


def expire_key(text: str, id: str, expires: str) -> str:
    """The text with that key's end set. Raises PolicyError when there is no such key."""
    document = _read(text)
    for key in document.get("keys") or []:
        if key.get("id") == id:
            key["expires"] = expires
            return _write(document)
    raise PolicyError(f"there is no key with the id {id!r}")


def check(text: str, path: Path) -> Policy:
    """The text as a policy at `path`. Raises PolicyError."""
    return policies.parse(text, base=path.resolve().parent, name=str(path))


def replace(path: Path, old: str, new: str) -> None:
    """Check `new` and put it in the place of `old`. Raises PolicyError; the file is then as it was."""
    check(new, path)
    target = path.resolve()  # a symbolic link stays one
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.read_text(encoding="utf-8") != old:
            raise PolicyError(f"{path} has been changed by someone else meanwhile; nothing was written")
        was = target.stat()
        part.touch(mode=0o600)
        with part.open("w", encoding="utf-8") as file:
            _as_before(file.fileno(), was)
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise PolicyError(f"{path}: cannot be written: {error}") from error


def _as_before(file: int, was: os.stat_result) -> None:
    """Owner, group and mode of the old file: root may be at work here, and the gateway must be able to read what it wrote."""
    now = os.fstat(file)
    if (now.st_uid, now.st_gid) != (was.st_uid, was.st_gid):
        os.fchown(file, was.st_uid, was.st_gid)
    os.fchmod(file, was.st_mode & 0o777)


def _yaml() -> YAML:
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 10_000  # long flow mappings stay on their line
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _read(text: str) -> Any:
    try:
        document = _yaml().load(text)
    except YAMLError as error:
        raise PolicyError(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, CommentedMap | CommentedSeq):
        raise PolicyError("a policy is a mapping of sections")
    return document


def _write(document: Any) -> str:
    out = io.StringIO()
    _yaml().dump(document, out)
    return out.getvalue()
