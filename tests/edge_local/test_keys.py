from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import policy
from gateway.edge.keys import MAX_KEY_BYTES, Conflict, FailureLimiter, KeyRing, Principal, credentials, digest_of, new_key

KEY = b"plim_" + b"k" * 43


def ring(expires: float | None = None, now: float = 0.0) -> KeyRing:
    digest = bytes.fromhex(digest_of(KEY.decode()).removeprefix("sha256:"))
    return KeyRing([(digest, Principal("acme-1", "client", "acme", expires))], wall=lambda: now)


def auth(value: bytes, name: bytes = b"authorization") -> tuple[bytes, bytes]:
    return (name, value)


@pytest.mark.parametrize(
    "headers",
    [
        [auth(b"Bearer " + KEY)],
        [auth(b"bearer " + KEY)],
        [auth(b"BEARER   " + KEY)],
        [auth(b"Bearer " + KEY + b" \t")],
        [auth(KEY, b"x-api-key")],
        [auth(KEY, b"api-key")],
        [auth(b"Bearer " + KEY), auth(KEY, b"x-api-key")],
        [(b"host", b"x"), auth(b"Bearer " + KEY), (b"cookie", b"api-key=1")],
    ],
)
def test_a_good_key_in_every_legal_form(headers: list[tuple[bytes, bytes]]) -> None:
    found = ring().identify(headers)
    assert found is not None and (found.id, found.role, found.tenant) == ("acme-1", "client", "acme")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [auth(b"")],
        [auth(b"Bearer")],
        [auth(b"Bearer ")],
        [auth(b"Bearer \xe9")],
        [auth(b"Bearer \xe2\x80\x9c" + KEY + b"\xe2\x80\x9d")],
        [auth(b"Bearer " + KEY + b"\r")],
        [auth(b"Bearer " + KEY + b"\x00")],
        [auth(b"Bearer " + KEY + b" x")],
        [auth(b"Bearer" + KEY)],
        [auth(b"Bearer\t" + KEY)],
        [auth(b"Basic " + KEY)],
        [auth(b"Bearer " + b"k" * 100_000)],
        [auth(KEY)],
        [auth(b"Bearer " + KEY), auth(b"Bearer wrong")],
        [auth(b"Bearer wrong"), auth(b"Bearer " + KEY)],
        [auth(b"Bearer " + KEY), auth(b"Bearer " + KEY)],
        [auth(b"Bearer wrong"), auth(KEY, b"x-api-key")],
        [auth(KEY, b"x-api-key"), auth(b"wrong", b"api-key")],
        [auth(b"Basic eDp5"), auth(KEY, b"x-api-key")],
        [auth(b"", b"x-api-key"), auth(b"Bearer " + KEY)],
        [auth(b"Bearer " + KEY.upper())],
        [auth(b"Bearer " + KEY[:-1])],
        [(b"sec-websocket-protocol", b"openai-insecure-api-key." + KEY)],
    ],
)
def test_everything_else_is_nobody(headers: list[tuple[bytes, bytes]]) -> None:
    assert ring().identify(headers) is None


@given(
    st.lists(
        st.tuples(st.sampled_from([b"authorization", b"x-api-key", b"api-key", b"host"]), st.binary(max_size=60)), max_size=5
    )
)
def test_no_bytes_raise_and_no_bytes_open(headers: list[tuple[bytes, bytes]]) -> None:
    assert isinstance(credentials(headers), bytes | Conflict | None)
    assert ring().identify(headers) is None


def test_conflicts_are_told_apart_from_absence() -> None:
    assert credentials([(b"host", b"x")]) is None
    assert credentials([auth(b"Basic x")]) is Conflict.MALFORMED
    assert credentials([auth(b"Bearer a"), auth(b"b", b"x-api-key")]) is Conflict.CONFLICTING
    assert credentials([auth(b"Bearer " + b"k" * MAX_KEY_BYTES)]) is Conflict.MALFORMED


def test_an_expired_key_stops_at_its_second() -> None:
    assert ring(expires=100.0, now=99.9).find(KEY) is not None
    assert ring(expires=100.0, now=100.0).find(KEY) is None


def test_new_keys_are_long_random_and_stored_as_digests() -> None:
    made = {new_key() for _ in range(200)}
    assert len(made) == 200
    for key, digest in made:
        assert re.fullmatch(r"plim_[0-9A-Za-z]{43}", key)
        assert digest == digest_of(key) and key not in digest
    characters = {key[5] for key, _ in made}
    assert len(characters) > 3  # the first digit of 2^256 in base 62 is one of ten


def test_a_ring_is_made_from_a_policy() -> None:
    key, digest = new_key()
    text = f"""
backends: {{a: {{url: "http://127.0.0.1:1"}}}}
models: {{tiny: {{backends: [a]}}}}
tenants: {{acme: {{}}}}
keys:
  - {{id: acme-1, hash: "{digest}", role: client, tenant: acme, expires: "2027-01-01T00:00:00Z"}}
  - {{id: ops, hash: "sha256:{"0" * 64}", role: operator}}
"""
    parsed = policy.parse(text, base=Path("/"))
    before = dt.datetime(2026, 12, 31, tzinfo=dt.UTC).timestamp()
    found = KeyRing.from_policy(parsed, wall=lambda: before).find(key.encode())
    assert found == Principal("acme-1", "client", "acme", dt.datetime(2027, 1, 1, tzinfo=dt.UTC).timestamp())
    assert KeyRing.from_policy(parsed, wall=lambda: before + 2 * 86_400).find(key.encode()) is None
    assert len(KeyRing.from_policy(parsed)) == 2


def test_failures_are_limited_per_address_and_recover() -> None:
    limiter = FailureLimiter(rate_per_s=1.0, burst=3)
    assert [limiter.failed("10.0.0.1", 0.0) for _ in range(3)] == [None] * 3
    assert limiter.failed("10.0.0.1", 0.0) == pytest.approx(1.0)
    assert limiter.failed("10.0.0.2", 0.0) is None
    assert limiter.failed("10.0.0.1", 0.5) == pytest.approx(0.5)
    assert limiter.failed("10.0.0.1", 1.0) is None


def test_a_host_cannot_hide_in_its_own_ipv6_network() -> None:
    limiter = FailureLimiter(rate_per_s=1.0, burst=2)
    answers = [limiter.failed(f"2001:db8::{n:x}", 0.0) for n in range(4)]
    assert answers[:2] == [None, None] and None not in answers[2:]
    assert limiter.failed("2001:db8:0:1::1", 0.0) is None
    for odd in (None, "", "::1%lo", "not:an:address"):
        limiter.failed(odd, 0.0)


@given(st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=60))
def test_never_more_failures_pass_than_rate_and_burst_allow(times: list[float]) -> None:
    limiter = FailureLimiter(rate_per_s=2.0, burst=5)
    passed = sum(limiter.failed("10.0.0.1", now) is None for now in sorted(times))
    assert passed <= 5 + 2.0 * (max(times) - min(times)) + 1e-6


def test_the_table_of_addresses_is_bounded() -> None:
    limiter = FailureLimiter(burst=1, max_addresses=10)
    for n in range(100):
        limiter.failed(f"10.0.{n}.1", 0.0)
    assert limiter.failed("10.0.99.1", 0.0) is not None  # the latest are kept
    assert limiter.failed("10.0.0.1", 0.0) is None
