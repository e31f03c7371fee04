"""Exchanges for tests."""

from __future__ import annotations

from typing import Any

from gateway.flow.shape import Shape
from gateway.observe.exchange import Exchange


def exchange(**fields: Any) -> Exchange:
    """A stream of 20 tokens: received at 10, admitted 0.5 s later, first token 0.1 s after dispatch, over at 11.2."""
    x = Exchange("req-1", "chat", 10.0)
    x.model, x.priority_class, x.tenant, x.backend, x.key_id = "tiny", "interactive", "acme", "a", "acme-1"
    x.shape = Shape("generate", frozenset(), 100, 50, 1)
    x.stream, x.status = True, 200
    x.queue_s, x.admitted_at, x.dispatched_at = 0.5, 10.501, 10.502
    x.first_at, x.last_at, x.ended_at = 10.602, 11.192, 11.2
    x.input_tokens, x.output_tokens = 90, 20
    for name, value in fields.items():
        setattr(x, name, value)
    return x
