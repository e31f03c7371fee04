"""What the server itself counts over a cell: time in its queue, preemptions, prefix-cache hits.

Owns: which of vLLM's counters are read, and their difference over a cell. Promises: what a server does not show is None; a
counter that fell (a restart) makes the difference None. Talks to: GET /metrics, before and after a cell and never during it.
"""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from gateway.evidence.identity import IdentityError
from gateway.evidence.identity_client import fetch
from gateway.forward.exposition import total

MAX_METRICS_BYTES = 8 * 1024 * 1024
_NAMES = {
    "queue_s": "vllm:request_queue_time_seconds_sum",
    "queued": "vllm:request_queue_time_seconds_count",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Seconds and counts since the server started, or between two readings. None: not shown."""

    queue_s: float | None = None
    queued: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None

    def since(self, earlier: Counters) -> Counters:
        """What was added since `earlier`."""
        return Counters(**{name: _difference(getattr(self, name), getattr(earlier, name)) for name in _NAMES})

    def plus(self, other: Counters) -> Counters:
        """Two differences together; unknown where either is."""
        return Counters(**{name: _sum(getattr(self, name), getattr(other, name)) for name in _NAMES})

    @property
    def queue_ms(self) -> float | None:
        """Mean milliseconds that a request waited in the server's own queue."""
        return self.queue_s / self.queued * 1000 if self.queue_s is not None and self.queued else None

    @property
    def hit_share(self) -> float | None:
        """Share of prompt tokens that the prefix cache served."""
        return self.prefix_hits / self.prefix_queries if self.prefix_hits is not None and self.prefix_queries else None


async def read(client: httpx.AsyncClient, base_url: str, api_key: str | None) -> Counters:
    """The counters now; all None where /metrics is not to be had."""
    try:
        status, body = await fetch(client, base_url + "/metrics", api_key, MAX_METRICS_BYTES)
    except IdentityError:
        return Counters()
    if status != 200:
        return Counters()
    return Counters(**{name: total(body, metric) for name, metric in _NAMES.items()})


def _difference(now: float | None, before: float | None) -> float | None:
    return now - before if now is not None and before is not None and now >= before else None


def _sum(one: float | None, other: float | None) -> float | None:
    return one + other if one is not None and other is not None else None
