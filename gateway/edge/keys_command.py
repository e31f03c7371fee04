"""`plimsoll keys`: make, list, revoke and rotate keys in a policy file.

Owns the command's words and its exit codes (0 done, 1 no, 2 usage). A key is printed once, to standard output, and is nowhere
else. Without `--write` the file is not touched: the line to add is printed instead.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from gateway.edge import policy_edit
from gateway.edge.keys import digest_of, new_key
from gateway.policy import Key, Policy, PolicyError

app = typer.Typer(help="Keys: made here, shown once, stored as digests.", no_args_is_help=True)

PolicyOption = Annotated[Path, typer.Option("--policy", help="The policy file.")]
MaybePolicy = Annotated[Path | None, typer.Option("--policy", help="The policy file (needed with --write).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
ExpiresOption = Annotated[str | None, typer.Option(help="A date such as 2027-01-01T00:00:00Z, or a time from now: 90d, 12h.")]
WriteOption = Annotated[bool, typer.Option("--write", help="Edit the policy file.")]


@app.command()
def new(
    id: Annotated[str, typer.Option("--id", help="A name for the key; it stands in the journal.")],
    role: Annotated[str, typer.Option(help="client, operator, scraper or prober.")] = "client",
    tenant: Annotated[str | None, typer.Option(help="The tenant of a client key.")] = None,
    expires: ExpiresOption = None,
    policy: MaybePolicy = None,
    write: WriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key. It is shown once."""
    key, digest = new_key()
    line = _line(id, digest, role, tenant, _moment(expires))
    if write:
        path = _needed(policy)
        _edit(path, lambda text: policy_edit.add_key(text, line))
    _show_new(key, line, written=write, as_json=as_json)


@app.command(name="list")
def list_keys(policy: PolicyOption, as_json: JsonOption = False) -> None:
    """Show the keys of a policy: who, not what."""
    keys = _load(policy).keys
    now = dt.datetime.now(dt.UTC)
    rows = [
        {
            "id": key.id,
            "role": key.role,
            "tenant": key.tenant,
            "expires": None if key.expires is None else key.expires.isoformat(),
            "state": "expired" if key.expires is not None and key.expires <= now else "live",
            "digest": key.hash[:19] + "…",
        }
        for key in keys
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("id", "role", "tenant", "expires", "state", "digest")
    for row in rows:
        table.add_row(*(str(row[name]) if row[name] is not None else "" for name in row))
    Console().print(table)


@app.command()
def revoke(id: str, policy: PolicyOption, as_json: JsonOption = False) -> None:
    """Take a key out of the policy file; a running gateway refuses it from its next look at the file."""
    _edit(policy, lambda text: policy_edit.remove_key(text, id))
    typer.echo(json.dumps({"revoked": id}) if as_json else f"{id} is revoked in {policy}.")


@app.command()
def rotate(
    id: str,
    policy: PolicyOption,
    overlap: Annotated[str, typer.Option(help="How long the old key still works: 24h, 7d.")] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Make a successor of a key and let the old one run out."""
    old = next((key for key in _load(policy).keys if key.id == id), None)
    if old is None:
        raise _no(f"there is no key with the id {id!r}")
    key, digest = new_key()
    end = _moment(overlap)
    if end is None or (old.expires is not None and old.expires < dt.datetime.fromisoformat(end)):
        end = None if old.expires is None else _text(old.expires)
    fresh = _successor(id, {k.id for k in _load(policy).keys})
    line = _line(fresh, digest, old.role, old.tenant, None)
    _edit(policy, lambda text: policy_edit.add_key(text if end is None else policy_edit.expire_key(text, id, end), line))
    _show_new(key, line, written=True, as_json=as_json, note=f"{id} works until {end}.")


def _successor(id: str, taken: set[str]) -> str:
    """acme-1 to acme-2, ops to ops-2: the next name that is free."""
    found = re.fullmatch(r"(.*)-(\d+)", id)
    stem, number = (found[1], int(found[2])) if found else (id, 1)
    while True:
        number += 1
        if f"{stem}-{number}" not in taken:
            return f"{stem}-{number}"


def _line(id: str, digest: str, role: str, tenant: str | None, expires: str | None) -> str:
    raw: dict[str, Any] = {"id": id, "hash": digest, "role": role, "tenant": tenant, "expires": expires}
    try:
        Key.model_validate(raw)
    except ValidationError as error:
        raise _usage("; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())) from error
    return policy_edit.key_line(id, digest, role, tenant, expires)


def _moment(text: str | None) -> str | None:
    """A date, or a time from now, as a date with a time zone."""
    if text is None:
        return None
    relative = re.fullmatch(r"(\d{1,6})([hd])", text)
    if relative:
        seconds = int(relative[1]) * (3600 if relative[2] == "h" else 86_400)
        return _text(dt.datetime.fromtimestamp(int(time.time()) + seconds, dt.UTC))
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise _usage(f"{text!r} is neither a date with a time zone nor a time such as 90d or 12h") from error
    if moment.tzinfo is None:
        raise _usage(f"{text!r} needs a time zone, for example {text}Z")
    return _text(moment)


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")


def _edit(path: Path, change: Any) -> None:
    try:
        old = path.read_text(encoding="utf-8")
        policy_edit.replace(path, old, change(old))
    except (PolicyError, OSError, UnicodeDecodeError) as error:
        raise _no(str(error)) from error


def _load(path: Path) -> Policy:
    try:
        return policy_edit.check(path.read_text(encoding="utf-8"), path)
    except (PolicyError, OSError, UnicodeDecodeError) as error:
        raise _no(str(error)) from error


def _needed(path: Path | None) -> Path:
    if path is None:
        raise _usage("--write needs --policy")
    return path


def _show_new(key: str, line: str, *, written: bool, as_json: bool, note: str | None = None) -> None:
    if as_json:
        typer.echo(json.dumps({"key": key, "hash": digest_of(key), "line": line, "written": written, "note": note}))
        return
    typer.echo(key)
    typer.echo("Keep it: it is shown this once." + (f" {note}" if note else ""), err=True)
    typer.echo(f"{'Written to the policy' if written else 'Add under keys: in the policy'}:\n  {line}", err=True)


def _no(message: str) -> typer.Exit:
    typer.echo(f"plimsoll keys: {message}", err=True)
    return typer.Exit(1)


def _usage(message: str) -> typer.Exit:
    typer.echo(f"plimsoll keys: {message}", err=True)
    return typer.Exit(2)
