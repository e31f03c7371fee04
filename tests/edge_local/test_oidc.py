"""Signed tokens: what is good is taken once and remembered; everything else is nobody."""

from __future__ import annotations

import asyncio
import hashlib
import time

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import policy as policies
from gateway.edge import oidc
from gateway.edge.jwks import KeySet, KeySetError
from gateway.edge.keys import KeyRing, Principal
from gateway.edge.oidc import Tokens, header_of, verify
from gateway.policy_oidc import Oidc

from .issuer import AUDIENCE, ISSUER, NOW, KeyServer, by_hand, claims, key_set, part, private, public_jwk, public_pem, token

KEYS = KeySet.parse(key_set(public_jwk("RS256", "k1"), public_jwk("ES256", "k2"), public_jwk("EdDSA", "k3")))


def config(**changes) -> Oidc:
    return Oidc.model_validate({"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://login.test/jwks", **changes})


def who(raw: bytes, now: float = NOW, keys: KeySet = KEYS, **changes) -> Principal | None:
    return verify(raw, keys, config(**changes), now)


@pytest.mark.parametrize(("algorithm", "kid"), [("RS256", "k1"), ("ES256", "k2"), ("EdDSA", "k3")])
def test_a_good_token_of_each_kind(algorithm, kid):
    assert who(token(algorithm, kid)) == Principal("oidc:alice", "client", "acme", NOW + 600 + 30)


def test_times_are_held_within_the_leeway():
    short = token(exp=int(NOW) + 10, nbf=int(NOW))
    assert who(short, NOW + 39.9) and not who(short, NOW + 40)
    assert who(short, NOW - 30) and not who(short, NOW - 30.1)
    assert not who(short, NOW + 10, leeway_s=0)


BAD = {
    "another audience": token(aud="someone else"),
    "another issuer": token(iss="https://login.test/"),
    "no audience": token(aud=None),
    "no issuer": token(iss=None),
    "no end": token(exp=None),
    "no subject": token(sub=None),
    "no tenant": token(tenant=None),
    "a tenant that is no text": token(tenant=["acme"]),
    "an empty subject": token(sub=""),
    "a subject of two lines": token(sub="a\nb"),
    "a long subject": token(sub="a" * 256),
    "an algorithm not named": token("RS512"),
    "a key it does not have": token(number=1),
    "an unknown key": token(kid="k9"),
    "an id of another kind of key": token(kid="k2"),
    "an end that is true": token(exp=True),
    "an end at no time": by_hand({"alg": "RS256", "kid": "k1"}, b'{"exp": 1e999}'),
    "an extension": token(headers={"crit": ["x"], "x": 1}),
    "a payload apart": token(headers={"b64": False}),
    "a nested header": token(headers={"jwk": public_jwk("RS256", "k1", 1)}),
    "none": by_hand({"alg": "none", "kid": "k1"}, claims()),
    "None": by_hand({"alg": "None", "kid": "k1"}, claims()),
    "no algorithm": by_hand({"kid": "k1"}, claims()),
    "an algorithm that is no text": by_hand({"alg": ["RS256"], "kid": "k1"}, claims()),
    "a key id that is no text": by_hand({"alg": "RS256", "kid": 1}, claims()),
    "an hmac under the public key": by_hand({"alg": "HS256", "kid": "k1"}, claims(), public_pem("RS256")),
    "an hmac called RS256": by_hand({"alg": "RS256", "kid": "k1"}, claims(), public_pem("RS256")),
    "a deep header": part(b'{"alg":"RS256","x":' + b"[" * 2000 + b"]" * 2000 + b"}") + b".e30.AA",
    "a header with a key twice": part(b'{"alg":"RS256","alg":"none","kid":"k1"}') + b"." + part(claims()) + b".AA",
    "no signature": token().rpartition(b".")[0] + b".",
    "another payload": token().split(b".")[0] + b"." + part(claims(sub="eve")) + b"." + token().split(b".")[2],
    "four parts": token() + b".AA",
    "five parts": b"a.b.c.d.e",
    "no parts": b"..",
    "bytes": b"\xff.\xff.\xff",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_good_is_nobody(name):
    assert who(token()) is not None
    assert who(BAD[name]) is None


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=100))
def test_garbage_is_nobody_and_never_raises(header, payload, signature):
    for raw in (b".".join(map(part, (header, payload, signature))), b".".join((header, payload, signature))):
        assert who(raw) is None


@given(st.integers(0, 2000), st.binary(min_size=1, max_size=3))
def test_a_damaged_token_is_nobody(place, patch):
    good = token("EdDSA", "k3")
    place %= len(good)
    damaged = good[:place] + patch + good[place + len(patch) :]
    found = who(damaged)
    # The last character of a signature has bits that decode to nothing: those alone may differ.
    assert found is None or part_values(damaged) == part_values(good)


def part_values(raw: bytes) -> list[bytes]:
    return [jwt.utils.base64url_decode(piece) for piece in raw.split(b".")]


def test_claims_to_roles():
    roles = {"role_claim": "realm_access.roles", "roles": {"admins": "operator", "users": "client"}}
    assert who(token(realm_access={"roles": ["users", "admins"]}), **roles) == Principal(
        "oidc:alice", "operator", None, NOW + 630
    )
    assert who(token(realm_access={"roles": ["users"]}), **roles).tenant == "acme"
    assert who(token(realm_access={"roles": "users"}), **roles).role == "client"
    for other in ({"roles": ["operator"]}, {"roles": {"admins": 1}}, "admins", None):
        assert who(token(realm_access=other), **roles) is None
    assert who(token(**{"https://x.test/t": "acme", "tenant": None}), tenant_claim="https://x.test/t").tenant == "acme"


def test_which_keys_of_a_set_are_used():
    def usable(entry: dict, algorithm: str = "RS256", **how) -> bool:
        return who(token(algorithm, entry.get("kid"), **how), keys=KeySet.parse(key_set(entry))) is not None

    good = public_jwk("RS256", "k1")
    assert usable(good) and usable({**good, "alg": "RS256"}) and usable({**good, "key_ops": ["verify"]})
    assert usable(public_jwk("RS256", None)), "one key and no id"
    for change in (
        {"use": "enc"},
        {"key_ops": ["encrypt"]},
        {"alg": "RS512"},
        {"kty": "oct", "k": "AAAA"},
        {"n": "?"},
    ):
        assert not usable({**good, **change}), change
    assert KeySet.parse(key_set({**good, "kid": 7})).names() == frozenset()
    assert KeySet.parse(key_set(public_jwk("RSA1024", "k1"))).names() == frozenset()
    assert KeySet.parse(key_set({"kty": "oct", "k": part(b"s" * 32).decode(), "kid": "k1"}, 5, None)).names() == frozenset()
    two = KeySet.parse(key_set(public_jwk("RS256", "k1"), public_jwk("RS256", "k2", 1)))
    assert who(token(kid=None), keys=two) is None, "without an id there is no guessing"
    for raw in (b"", b"[]", b"{}", b'{"keys": {}}', b"<html>", b"[" * 5000):
        with pytest.raises(KeySetError):
            KeySet.parse(raw)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def find(tokens: Tokens, raw: bytes) -> Principal | None:
    return tokens.find(hashlib.sha256(raw).digest(), raw)


def made(server: KeyServer, clock: Clock | None = None, **changes) -> Tokens:
    clock = clock or Clock()
    return Tokens(config(jwks_url=server.url, **changes), clock=clock, wall=lambda: NOW + clock.now)


async def test_a_known_token_is_not_verified_again_and_ends_with_its_time(monkeypatch):
    clock = Clock()
    async with KeyServer(key_set(public_jwk("RS256", "k1"))).running() as server:
        tokens = made(server, clock, max_age_s=86_400)
        await tokens.refresh()
    good = token()
    assert find(tokens, good)
    monkeypatch.setattr(oidc, "verify", None)  # would raise
    assert find(tokens, good)
    clock.now = 629.9
    assert find(tokens, good)
    clock.now = 630.1
    assert find(tokens, good) is None


async def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(oidc, "MAX_REMEMBERED", 5)
    async with KeyServer(key_set(public_jwk("EdDSA", "k1"))).running() as server:
        tokens = made(server)
        await tokens.refresh()
    for number in range(20):
        assert find(tokens, token("EdDSA", sub=f"user-{number}"))
    assert len(tokens._known) == 5


async def test_no_keys_no_tokens_and_an_old_set_runs_out():
    clock, server = Clock(), KeyServer(key_set(public_jwk("RS256", "k1")))
    async with server.running():
        pass
    tokens = made(server, clock, refresh_s=10, max_age_s=100)
    await tokens.refresh()
    assert find(tokens, token()) is None, "nobody answers: no token is good"
    async with server.running():
        await tokens.refresh()
    assert find(tokens, token())
    await tokens.refresh()
    clock.now = 99
    assert find(tokens, token()), "the last keys stay for a while"
    clock.now = 101
    assert find(tokens, token()) is None


@pytest.mark.parametrize("answer", ["500", "redirect", "huge", "html", "list"])
async def test_a_bad_answer_leaves_the_keys_as_they_are(answer):
    async with KeyServer(key_set(public_jwk("RS256", "k1"))).running() as server:
        tokens = made(server)
        await tokens.refresh()
        other = key_set(public_jwk("RS256", "k2", 1))
        server.status = {"500": b"500 Oops", "redirect": b"302 Found"}.get(answer, b"200 OK")
        server.lines = [b"location: " + server.url.encode()] if answer == "redirect" else []
        server.body = {"huge": other + b" " * 2**20, "html": b"<html>", "list": b"[]"}.get(answer, other)
        await tokens.refresh()
        assert find(tokens, token()) and find(tokens, token(kid="k2", number=1)) is None


async def test_a_withdrawn_key_takes_its_tokens_along():
    async with KeyServer(key_set(public_jwk("RS256", "k1"))).running() as server:
        tokens = made(server)
        await tokens.refresh()
        assert find(tokens, token())
        server.body = key_set(public_jwk("RS256", "k2", 1))
        await tokens.refresh()
        assert find(tokens, token()) is None
        assert find(tokens, token(kid="k2", number=1))


@pytest.mark.looptime
async def test_an_unknown_key_is_fetched_at_once_but_not_more_often_than_that():
    asked: list[float] = []
    sets = [key_set(public_jwk("RS256", "k1")), key_set(public_jwk("RS256", "k2", 1))]
    loop = asyncio.get_running_loop()

    async def fetch(_: Oidc) -> bytes:
        asked.append(loop.time())
        return sets[min(len(asked), 2) - 1]

    tokens = Tokens(config(refetch_s=10, refresh_s=300), fetch=fetch, clock=loop.time, wall=lambda: NOW)
    await tokens.refresh()
    running = asyncio.create_task(tokens.run())
    await asyncio.sleep(60)
    fresh = token(kid="k2", number=1)
    assert find(tokens, fresh) is None and len(asked) == 1
    await asyncio.sleep(0.01)
    assert find(tokens, fresh), "rotated"
    for _ in range(200):
        assert find(tokens, token(kid="nobody's")) is None
        await asyncio.sleep(0.1)
    assert 3 <= len(asked) <= 5, asked
    await asyncio.sleep(300)
    assert len(asked) <= 6, "garbage asks for nothing"
    running.cancel()


@pytest.mark.looptime
async def test_garbage_asks_for_no_fetch():
    asked: list[int] = []

    async def fetch(_: Oidc) -> bytes:
        asked.append(1)
        return key_set(public_jwk("RS256", "k1"))

    loop = asyncio.get_running_loop()
    tokens = Tokens(config(), fetch=fetch, clock=loop.time, wall=lambda: NOW)
    await tokens.refresh()
    running = asyncio.create_task(tokens.run())
    unknown = ("none", "a key it does not have", "another audience", "an algorithm not named")
    for raw in (b"plim_x", b"a.b.c", *(BAD[name] for name in unknown)):
        assert find(tokens, raw) is None
    await asyncio.sleep(100)
    assert len(asked) == 1
    running.cancel()


async def test_another_policy_forgets_what_the_old_one_allowed():
    async with KeyServer(key_set(public_jwk("RS256", "k1"))).running() as server:
        tokens = made(server)
        await tokens.refresh()
        assert find(tokens, token())
        tokens.configure(config(jwks_url=server.url, audience="another"))
        assert find(tokens, token()) is None and find(tokens, token(aud="another"))
        tokens.configure(None)
        assert find(tokens, token(aud="another")) is None
        tokens.configure(config(jwks_url=server.url + "2"))
        assert find(tokens, token()) is None, "keys of another source are fetched first"


POLICY = """
backends: {a: {url: "http://127.0.0.1:8000"}}
models: {tiny: {backends: [a]}}
tenants: {acme: {}}
oidc: {issuer: "https://login.test", audience: plimsoll, jwks_file: keys.json}
"""


async def test_the_ring_takes_tokens_of_its_own_tenants_alone(tmp_path):
    (tmp_path / "keys.json").write_bytes(key_set(public_jwk("RS256", "k1")))
    policy = policies.parse(POLICY, base=tmp_path)
    tokens = Tokens(policy.oidc, wall=lambda: NOW)
    await tokens.refresh()
    ring = KeyRing.from_policy(policy, wall=lambda: NOW, tokens=tokens.find)
    bearer = [(b"authorization", b"Bearer " + token())]
    assert ring.identify(bearer) == Principal("oidc:alice", "client", "acme", NOW + 630)
    assert ring.find(token(tenant="globex")) is None
    assert KeyRing.from_policy(policy.model_copy(update={"oidc": None}), tokens=tokens.find).identify(bearer) is None
    assert KeyRing.from_policy(policy.model_copy(update={"tenants": {}}), tokens=tokens.find).identify(bearer) is None


@pytest.mark.parametrize(
    "section",
    [
        {"jwks_url": "http://login.test/jwks"}, {"jwks_url": "ftp://login.test/jwks"}, {"jwks_url": "https://u:p@login.test/"},
        {"jwks_url": None}, {"jwks_file": "x.json"}, {"algorithms": ["none"]}, {"algorithms": ["HS256"]}, {"algorithms": []},
        {"role_claim": "roles"}, {"roles": {"a": "client"}}, {"role_claim": "r", "roles": {"a": "root"}}, {"leeway_s": 3000},
        {"max_age_s": 5}, {"colour": "blue"},
    ],
)  # fmt: skip
def test_sections_that_are_refused(section):
    with pytest.raises(ValueError):
        config(**section)


def test_a_remembered_token_costs_little_more_than_a_key():
    """By the clock of the processor, and with a wide margin: one look-up against one verification."""
    tokens = Tokens(config(), wall=lambda: NOW)
    tokens._keys, tokens._fetched_at = KEYS, time.monotonic()
    good = token()
    digest = hashlib.sha256(good).digest()
    assert tokens.find(digest, good)

    def cost(work) -> float:
        start = time.process_time()
        for _ in range(300):
            work()
        return time.process_time() - start

    assert cost(lambda: tokens.find(digest, good)) * 5 < cost(lambda: verify(good, KEYS, config(), NOW))


def test_headers_are_flat():
    assert header_of(token(headers={"x5c": ["a", "b"]})) is not None
    assert header_of(token(headers={"x": {"a": 1}})) is None
    assert private("RS256", 0) is not private("RS256", 1)
