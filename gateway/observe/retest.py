"""The retest ledger: what was asked for outside the measured slices, and what changed beneath them.

Owns, per (model, configuration hash, axis), counts, first and last sight and the distribution of what was asked for;
the identity changes with the fields that differ; the live test of each backend. Promises bounded memory (groups, changes
and buckets are limited, the least recently seen goes first) and a document that a restart reads back. No I/O here:
`retest_file.py` keeps the document on disk.
"""

from __future__ import annotations

import secrets
from typing import Any

from gateway.flow.shape import Shape
from gateway.observe.demand import Change, Group
from gateway.observe.live import LiveTest

FORMAT = "plimsoll-retest-ledger/v1"
LIVE_SLO = "live_slo"
IDENTITY = "identity"
MAX_GROUPS = 500
MAX_CHANGES = 200


class LedgerError(ValueError):
    """A stored ledger that is not one."""


class Ledger:
    """All groups. Methods belong to one thread; `document` is a copy that another may write.

    `name`: its own, kept with it, so that a copy elsewhere is known as one of the same.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._groups: dict[tuple[str, str, str], Group] = {}
        self.changes: list[Change] = []
        self.live: dict[tuple[str, str, str], LiveTest] = {}
        self.version = 0  # grows with every change: a keeper writes when it moved

    def note(
        self,
        model: str,
        backend: str | None,
        hash: str | None,
        axis: str,
        shape: Shape | None,
        now_wall: float,
        wanted: int | None = None,
    ) -> None:
        """Count one request that left the slices by `axis`; `wanted`: sequences in flight and waiting, it included."""
        group = self.group((model, hash or "unknown", axis), now_wall)
        group.add(backend or "any", shape, wanted, now_wall)
        self.version += 1

    def changed(self, change: Change) -> None:
        """A backend's identity changed."""
        self.group((change.model, change.before or "unknown", IDENTITY), change.at).add(change.backend, None, None, change.at)
        self.changes.append(change)
        del self.changes[:-MAX_CHANGES]
        self.version += 1

    def served(self, model: str, backend: str, hash: str, over_bound: bool, now: float, now_wall: float) -> bool:
        """One request inside its slice was served, over the record's p95 bound or not (`now` monotonic). True: alarm."""
        key = (model, backend, hash)
        test = self.live.get(key)
        if test is None:
            if len(self.live) >= MAX_GROUPS:
                del self.live[next(iter(self.live))]
            test = self.live[key] = LiveTest(now)
        alarm = test.observe(over_bound, now)
        if alarm:
            self.note(model, backend, hash, LIVE_SLO, None, now_wall)
        return alarm

    def groups(self, model: str | None = None) -> list[tuple[str, str, str, Group]]:
        """(model, hash, axis, group), latest first."""
        rows = [(*key, group) for key, group in self._groups.items() if model in (None, key[0])]
        return sorted(rows, key=lambda row: row[3].last, reverse=True)

    def list(self) -> dict[str, Any]:
        """What `retest list` shows: groups with quantiles, and identity changes, latest first."""
        return {
            "groups": [_named(*row[:3], row[3].summary()) for row in self.groups()],
            "changes": [change.to_json() for change in reversed(self.changes)],
            "live": [
                {"model": m, "backend": b, "hash": h, "requests": test.total, "over_bound": test.over}
                for (m, b, h), test in self.live.items()
            ],
        }

    def document(self) -> dict[str, Any]:
        """Everything but the live tests, as plain JSON values."""
        return {
            "format": FORMAT,
            "name": self.name,
            "groups": [_named(*key, group.to_json()) for key, group in self._groups.items()],
            "changes": [change.to_json() for change in self.changes],
        }

    @classmethod
    def from_document(cls, raw: Any) -> Ledger:
        """The inverse of `document`. Raises LedgerError."""
        ledger = cls()
        try:
            if raw["format"] != FORMAT:
                raise LedgerError(f"the ledger's format is {raw['format']!r}, not {FORMAT!r}")
            if "name" in raw:
                ledger.name = str(raw["name"])[:64]
            else:  # of a version that gave none: to be kept from now on
                ledger.version = 1
            for item in raw["groups"][-MAX_GROUPS:]:
                ledger._groups[(str(item["model"]), str(item["hash"]), str(item["axis"]))] = Group.from_json(item)
            ledger.changes = [Change.from_json(item) for item in raw["changes"][-MAX_CHANGES:]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(f"not a retest ledger: {error}") from error
        return ledger

    @property
    def noted(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._groups or self.changes)

    def group(self, key: tuple[str, str, str], now_wall: float) -> Group:
        """A group, made on first use; the one seen longest ago makes room."""
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) >= MAX_GROUPS:
                del self._groups[min(self._groups, key=lambda k: self._groups[k].last)]
            found = self._groups[key] = Group(now_wall)
        return found


def _named(model: str, hash: str, axis: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "hash": hash, "axis": axis, **row}
