"""Any JSON-like document on any route: a parsed request that can be forwarded and measured, or a typed refusal."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.edge import body, fields, routes
from gateway.edge.routes import ROUTES
from gateway.errors import Refusal, Refused
from gateway.policy import MediaRules

from .building import counter, rules

PROXIED = sorted(path.decode() for path, route in ROUTES.items() if route.kind == "proxy")
NAMES = sorted(
    {name for table in fields.TABLE.values() for name in table} | {"metadata", "role", "type", "text", "image_url", "url"}
)
WORDS = st.sampled_from([
    "tiny", "user", "assistant", "system", "tool", "text", "image_url", "input_text", "function", "message", "function_call",
    "tool_use", "tool_result", "json_schema", "auto", "required", "hi", "é", "data:image/png;base64,A",
])  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=5) | WORDS
KEYS = st.sampled_from([*NAMES, "content", "arguments", "name", "input", "source", "tool_calls", "function", "output", "call_id"])
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=15)
MESSAGE = st.fixed_dictionaries(
    {"role": WORDS | TREES, "content": TREES | st.text(max_size=9)}, optional={"tool_calls": TREES, "name": TREES}
)
LOOKS = st.fixed_dictionaries(
    {"model": st.just("tiny")},
    optional={
        "messages": st.lists(MESSAGE, max_size=3),
        "input": TREES | st.lists(MESSAGE, max_size=3), "prompt": TREES, "system": TREES,
        "max_tokens": st.just(5) | TREES, "tools": TREES, "n": st.just(2) | TREES, "query": st.text(max_size=4),
        "documents": st.lists(st.text(max_size=4), max_size=3) | TREES, "text": TREES, "tool_choice": TREES,
    },
)  # fmt: skip
LOOKUP = {"tiny": rules(media=MediaRules(image_tokens=5, audio_tokens_per_s=5)), "": rules()}
OPEN = {"tiny": rules(allow_fields=tuple(NAMES), media=MediaRules(image_tokens=5))}
COUNTER = counter()


def check(path: str, raw: bytes, lookup: dict[str, Any]) -> None:
    found = body.parse(routes.ROUTES[path.encode()], b"application/json", raw, lookup.get)
    if isinstance(found, Refusal):
        assert found.message
        return
    assert found.sequences >= 1
    assert found.output_tokens is None or found.output_tokens >= 0
    low, high = COUNTER.bound(found)
    json.loads(found.forward(cache_salt="s", output_limit=3, user_key=b"k"))
    try:
        count = found.content.tokens or COUNTER.count_now(found)
    except Refused as refused:
        assert refused.refusal.message
        return
    assert high is None or count <= high
    assert low <= max(count, 1)


@given(st.sampled_from(PROXIED), LOOKS, st.dictionaries(KEYS, TREES, max_size=3))
@settings(max_examples=150, deadline=None)
def test_documents(path: str, document: dict[str, Any], more: dict[str, Any]) -> None:
    raw = json.dumps({**more, **document}).encode()
    check(path, raw, LOOKUP)
    check(path, raw, OPEN)


@given(st.sampled_from(PROXIED), st.binary(max_size=60))
def test_bytes(path: str, raw: bytes) -> None:
    check(path, raw, LOOKUP)


@given(st.sampled_from(PROXIED), st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_damaged_requests(path: str, place: int, patch: bytes) -> None:
    raw = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}).encode()
    check(path, raw[: place % len(raw)] + patch + raw[place % len(raw) + len(patch) :], LOOKUP)
