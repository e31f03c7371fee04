"""A policy is taken whole or refused with the field named; nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy import Policy, PolicyError, load, parse, split_address

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = 'backends: {a: {url: "http://127.0.0.1:8000"}}\nmodels: {tiny: {backends: [a]}}\n'
HASH = "sha256:" + "0" * 64


def read(text: str, base: Path = Path("/etc/plimsoll")) -> Policy:
    return parse(text, base=base)


def test_the_example_spells_out_the_defaults():
    example, minimal = load(ROOT / "policies/example.yaml"), read(MINIMAL)
    given_there = {"backends", "models", "tenants", "records"}
    for name in set(Policy.model_fields) - given_there:
        assert getattr(example, name) == getattr(minimal, name), name


def test_relative_paths_are_relative_to_the_file():
    policy = read(
        MINIMAL + "records: ../evidence\njournal: {path: log/journal.jsonl}\naudit: {path: audit.jsonl}\n"
        "server: {tls: {certificate: tls/server.pem, key: /keys/server.key}}\n"
    )
    assert policy.records == Path("/etc/evidence")
    assert policy.journal.path == "/etc/plimsoll/log/journal.jsonl"
    assert policy.audit.path == Path("/etc/plimsoll/audit.jsonl")
    assert policy.server.tls is not None
    assert policy.server.tls.certificate == Path("/etc/plimsoll/tls/server.pem")
    assert policy.server.tls.key == Path("/keys/server.key")
    assert read(MINIMAL + 'journal: {path: "-"}\n').journal.path == "-"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mapping"),
        ("backends: [", "not YAML"),
        (MINIMAL + "colour: red\n", "colour"),
        (MINIMAL + "queue: {max_requests: -1}\n", "queue.max_requests"),
        (MINIMAL + "timeouts: {stall_s: 0}\n", "timeouts.stall_s"),
        (MINIMAL + "timeouts: {stall_s: .nan}\n", "timeouts.stall_s"),
        (MINIMAL + "server: {listen: nowhere}\n", "host:port"),
        (MINIMAL + "models: {tiny: {backends: [a]}}\n", "stands twice"),
        ('backends: {a: {url: "http://x:1"}}\nmodels: {tiny: {backends: [b]}}\n', "'b'"),
        ('backends: {a: {url: "http://x:1"}}\nmodels: {tiny: {backends: []}}\n', "models.tiny.backends"),
        ('backends: {a: {url: "ftp://x"}}\nmodels: {tiny: {backends: [a]}}\n', "backends.a.url"),
        ('backends: {a: {url: "http://key@x:1"}}\nmodels: {tiny: {backends: [a]}}\n', "credentials"),
        ('backends: {a: {url: "http://x:1"}, b: {url: "http://x:1/"}}\nmodels: {tiny: {backends: [a]}}\n', "counted as two"),
        (MINIMAL + "tenants: {acme: {class: urgent}}\n", "urgent"),
        (MINIMAL + f'keys: [{{id: k, hash: "{HASH}", role: client, tenant: acme}}]\n', "acme"),
        (MINIMAL + f'keys: [{{id: k, hash: "{HASH}", role: client}}]\n', "names its tenant"),
        (MINIMAL + f'keys: [{{id: k, hash: "{HASH}", role: operator, tenant: acme}}]\n', "other roles name none"),
        (MINIMAL + 'keys: [{id: k, hash: "plim_secret", role: operator}]\n', "keys.0.hash"),
        (MINIMAL + f'keys: [{{id: k, hash: "{HASH}", role: operator, expires: 2027-01-01T00:00:00}}]\n', "time zone"),
        (MINIMAL + f'keys: [{{id: k, hash: "{HASH}", role: operator}}, {{id: j, hash: "{HASH}", role: prober}}]\n', "repeats"),
        (MINIMAL + "state: {url: http://x}\n", "state.url"),
    ],
)
def test_a_fault_is_refused_with_its_field(text: str, said: str):
    with pytest.raises(PolicyError) as caught:
        read(text)
    assert said in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_one_clear_error(tmp_path: Path):
    with pytest.raises(PolicyError, match="cannot be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="cannot be read"):
        load(tmp_path / "binary.yaml")


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_a_policy_error(text: str):
    try:
        read(text)
    except PolicyError:
        pass


@pytest.mark.parametrize(
    ("value", "parts"),
    [("127.0.0.1:8080", ("127.0.0.1", 8080)), ("[::1]:80", ("::1", 80)), ("localhost:0", ("localhost", 0))],
)
def test_addresses(value: str, parts: tuple[str, int]):
    assert split_address(value) == parts


@pytest.mark.parametrize("value", ["8080", ":80", "a:b", "127.0.0.1:65536", "::1:80", "[zz]:80", "a:1:2"])
def test_what_is_no_address(value: str):
    with pytest.raises(ValueError):
        split_address(value)
