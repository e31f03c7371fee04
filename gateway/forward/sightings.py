"""Which configuration lives behind one URL, told from every sighting of a configuration hash. Pure; time is an argument.

A process is seen over an interval, from its first to its last sighting. Two processes with different
hashes whose intervals overlap were alive at once: the URL is not one process group, and no measurement
speaks for it. A restart shows as intervals that follow one another, which is drift and not a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MIXED_WINDOW_S = 60.0
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Process:
    """One engine process as seen from outside: configuration hash, start id (None: only headers seen), interval in seconds."""

    hash: str
    start_id: str | None
    first_seen: float
    last_seen: float


@dataclass(frozen=True, slots=True)
class Sightings:
    """What has been seen lately, newest last. Start with `Sightings()`; every `see` returns a new value."""

    processes: tuple[Process, ...] = ()

    def see(self, hash_: str, start_id: str | None, now: float) -> Sightings:
        """Something showed `hash_`. A sighting without start id extends the newest process of that hash."""
        kept = [p for p in self.processes if now - p.last_seen < MIXED_WINDOW_S]
        same = [p for p in kept if p.hash == hash_ and (start_id is None or p.start_id in (None, start_id))]
        if same:
            known = same[-1]
            kept.remove(known)
            kept.append(replace(known, start_id=known.start_id or start_id, last_seen=now))
        else:
            kept.append(Process(hash_, start_id, now, now))
        return Sightings(tuple(kept[-_KEPT:]))

    @property
    def current(self) -> Process | None:
        """The process seen last."""
        return self.processes[-1] if self.processes else None

    def mixed(self, now: float) -> tuple[str, ...]:
        """The different hashes that were alive at once within the window; empty when there is one or none."""
        live = [p for p in self.processes if now - p.last_seen < MIXED_WINDOW_S]
        clashing = {
            h
            for i, a in enumerate(live)
            for b in live[i + 1 :]
            if a.hash != b.hash and a.first_seen < b.last_seen and b.first_seen < a.last_seen
            for h in (a.hash, b.hash)
        }
        return tuple(sorted(clashing))
