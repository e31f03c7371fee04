"""A policy as the request path reads it: looked up, computed and encoded once per load, never per request.

Owns no state. Pure. Talks to: `keys`, `body` (model rules), `responses` (CORS).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from gateway import policy as policies
from gateway.edge.body import Lookup, ModelRules
from gateway.edge.keys import KeyRing
from gateway.edge.responses import Cors
from gateway.flow.demand import Limits

DEFAULT_QUEUE_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelPath:
    """One model: its body rules, where it may go, and how long it may wait (seconds)."""

    rules: ModelRules
    backends: tuple[str, ...]
    queue_s: float


@dataclass(frozen=True, slots=True)
class TenantPath:
    """One tenant: its share and quotas, the models it may use, and the salt that keeps its prefix cache its own."""

    name: str
    weight: float
    priority_class: str
    priority: int
    limits: Limits | None
    lookup: Lookup
    cache_salt: str


@dataclass(frozen=True, slots=True)
class PathRules:
    """Everything the data path takes from a policy. Immutable: a reload makes another."""

    keys: KeyRing
    cors: Cors
    has_cors: bool
    models: Mapping[str, ModelPath]
    tenants: Mapping[str, TenantPath]
    timeouts: policies.Timeouts
    max_body_bytes: int
    observe: bool
    user_key: bytes

    @classmethod
    def from_policy(
        cls,
        policy: policies.Policy,
        *,
        secret: bytes,
        queue_s: Mapping[str, float] | None = None,
        adapters: frozenset[str] = frozenset(),
        keys: KeyRing | None = None,
    ) -> Self:
        """`secret` keys the hashes of tenants and users; `queue_s` the wait per model; `adapters` are LoRA models."""
        waits = queue_s or {}
        models = {
            name: ModelPath(
                ModelRules.from_policy(name, model, lora=name in adapters),
                model.backends,
                waits.get(name, policy.timeouts.queue_s or DEFAULT_QUEUE_S),
            )
            for name, model in policy.models.items()
        }
        return cls(
            keys=keys or KeyRing.from_policy(policy),
            cors=Cors(policy.server.cors_origins),
            has_cors=bool(policy.server.cors_origins),
            models=models,
            tenants={name: _tenant(name, tenant, policy, models, secret) for name, tenant in policy.tenants.items()},
            timeouts=policy.timeouts,
            max_body_bytes=policy.server.max_body_bytes,
            observe=policy.enforcement == "observe",
            user_key=secret,
        )


def _tenant(
    name: str, tenant: policies.Tenant, policy: policies.Policy, models: Mapping[str, ModelPath], secret: bytes
) -> TenantPath:
    limits = Limits(tenant.requests_per_minute, tenant.tokens_per_minute, tenant.max_in_flight)
    usable = {model: path.rules for model, path in models.items() if tenant.may_use(model)}
    return TenantPath(
        name=name,
        weight=tenant.weight,
        priority_class=tenant.class_,
        priority=policy.queue.classes[tenant.class_].priority,
        limits=limits if any(limit is not None for limit in limits) else None,
        lookup=usable.get,
        cache_salt=hashlib.blake2b(name.encode(), key=secret[:64], digest_size=16).hexdigest(),
    )
