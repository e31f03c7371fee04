"""What a backend says about itself: believed only when it is consistent, bounded, and typed when it is not."""

import json
import socket

import httpx
import pytest

from gateway.evidence import identity_client, stock
from gateway.evidence.canonical import digest
from gateway.evidence.identity import FieldChange, IdentityError, diff, parse_attested, trigger_of
from gateway.policy import DeclaredIdentity
from tests.evidence.builders import CONFIG_A, edited

PAYLOAD = {
    "schema": "plimsoll-identity/v1",
    "server_configuration_hash": digest(CONFIG_A),
    "configuration": CONFIG_A,
    "capabilities": {"prefix_caching": True, "odd": "yes"},
    "runtime": {
        "engine_start_id": "abc",
        "kv_cache_size_tokens": 65536,
        "foreign_in_flight": 0,
        "gateway_in_flight": {"gw": 3, "bad": -1, "worse": "x"},
        "api_process_rank": -1,
        "served_model_name": ["tiny", "alias"],
    },
}


def attested(**changes):
    return parse_attested(json.dumps({**PAYLOAD, **changes}).encode())


def test_an_attested_identity():
    seen = attested()
    assert (seen.hash, seen.identity.model_revision, seen.identity.vllm_version) == (digest(CONFIG_A), "3f1c9a7e", "0.32.0")
    assert (seen.kv_cache_tokens, seen.block_size, seen.foreign_in_flight, seen.gateway_in_flight) == (65536, 16, 0, {"gw": 3})
    assert (seen.api_process_rank, seen.served_models, seen.capabilities) == (None, ("tiny", "alias"), {"prefix_caching": True})


def test_unknown_in_the_document_is_not_known_in_the_identity():
    document = edited(CONFIG_A, "model.revision", "unknown")
    seen = attested(configuration=document, server_configuration_hash=digest(document))
    assert seen.identity.model_revision is None
    assert seen.identity.missing == ("model_revision",)
    assert seen.unknown == ("model.revision",)


@pytest.mark.parametrize(
    "changes",
    [
        {"server_configuration_hash": "sha256:" + "0" * 64},
        {"configuration": edited(CONFIG_A, "scheduler.max_num_seqs", 9)},
        {"configuration": edited(CONFIG_A, "scheduler.max_num_seqs", 8.5)},
        {"configuration": [1]},
        {"runtime": "none"},
        {"schema": "plimsoll-identity/v2"},
    ],
)
def test_an_inconsistent_payload_is_not_believed(changes):
    with pytest.raises(IdentityError):
        attested(**changes)


@pytest.mark.parametrize("raw", [b"", b"null", b"[]", b"\xff\xfe", b"{}", b"[" * 100_000, b'{"a":' * 5000, b"x" * 2_000_000])
def test_garbage_is_a_typed_error(raw):
    with pytest.raises(IdentityError):
        parse_attested(raw)


def test_diff_names_what_changed_came_and_went():
    new = edited(edited(CONFIG_A, "scheduler", {"max_num_seqs": 16, "policy": "fcfs", "extra": True}), "model.dtype", "float16")
    assert diff(CONFIG_A, new) == (
        FieldChange("model.dtype", "bfloat16", "float16"),
        FieldChange("scheduler.enable_chunked_prefill", True, None),
        FieldChange("scheduler.extra", None, True),
        FieldChange("scheduler.max_num_batched_tokens", 8192, None),
        FieldChange("scheduler.max_num_seqs", 8, 16),
    )
    assert diff(CONFIG_A, CONFIG_A) == ()


def test_true_and_one_are_different_values():
    assert diff({"a": 1}, {"a": True}) == (FieldChange("a", 1, True),)


@pytest.mark.parametrize(
    ("field", "trigger"),
    [
        ("model.revision", "model_revision"),
        ("model.files.config.json", "model_revision"),
        ("model.max_model_len", "max_model_len"),
        ("model.dtype", "server_configuration_hash"),
        ("versions.vllm", "vllm_version"),
        ("versions.torch", "server_configuration_hash"),
        ("hardware.device", "hardware_profile"),
        ("parallelism.tensor_parallel_size", "parallelism"),
        ("scheduler.max_num_seqs", "batching_limits"),
        ("scheduler.policy", "server_configuration_hash"),
        ("cache.block_size", "server_configuration_hash"),
    ],
)
def test_a_changed_field_pulls_its_trigger(field, trigger):
    assert trigger_of(field) == trigger


VERSION = b'{"version": "0.32.0"}'
MODELS = json.dumps(
    {
        "object": "list",
        "data": [{"id": "lora", "parent": "tiny"}, {"id": "tiny", "root": "/m", "parent": None, "max_model_len": 8192}],
    }
).encode()
METRICS = (
    b"# HELP x y\nvllm:num_requests_running 1.0\n"
    b'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
    b'gpu_memory_utilization="0.9",kv_cache_memory_bytes="None",kv_cache_size_tokens="65536",num_gpu_blocks="4096"} 1.0\n'
)


def test_stock_endpoints_show_little_and_the_rest_is_named_as_unknown():
    seen = stock.probed(VERSION, MODELS, METRICS)
    assert seen.identity.vllm_version == "0.32.0"
    assert seen.identity.missing == ("model_revision", "server_configuration_hash", "hardware_profile")
    assert seen.document["model"] == {"id": "/m", "max_model_len": 8192}
    assert (seen.kv_cache_tokens, seen.block_size, seen.served_models) == (65536, 16, ("tiny",))
    assert {"model.dtype", "scheduler.max_num_seqs", "hardware.profile", "server_configuration_hash"} <= set(seen.unknown)


def test_endpoints_that_do_not_answer_leave_their_fields_unknown():
    seen = stock.probed(None, None, None)
    assert seen.identity.missing == ("model_revision", "vllm_version", "server_configuration_hash", "hardware_profile")
    assert {"versions.vllm", "model.id", "cache.block_size"} <= set(seen.unknown)


@pytest.mark.parametrize("bodies", [(b"[]", None, None), (b"<html>", None, None), (None, b"7", None)])
def test_stock_answers_of_another_kind_are_a_typed_error(bodies):
    with pytest.raises(IdentityError):
        stock.probed(*bodies)


def declare(**changes):
    stated = {
        "model_revision": "3f1c9a7e",
        "vllm_version": "0.32.0",
        "server_configuration_hash": digest(CONFIG_A),
        "hardware_profile": "1 x Example Accelerator (80 GiB)",
        "configuration": edited(CONFIG_A, "model.id", "/m"),
    }
    return DeclaredIdentity.model_validate({**stated, **changes})


def test_a_declaration_that_agrees_with_what_is_shown():
    seen = stock.declared(declare(), stock.probed(VERSION, MODELS, METRICS))
    assert (seen.source, seen.contradictions, seen.hash) == ("declared", (), digest(CONFIG_A))
    assert seen.kv_cache_tokens == 65536


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vllm_version": "0.31.0"}, "vllm_version"),
        ({"configuration": edited(CONFIG_A, "model", {"max_model_len": 4096})}, "model.max_model_len"),
        ({"configuration": edited(CONFIG_A, "cache", {"enable_prefix_caching": False})}, "cache.enable_prefix_caching"),
        ({"configuration": edited(CONFIG_A, "cache", {"gpu_memory_utilization": "0.8"})}, "cache.gpu_memory_utilization"),
    ],
)
def test_a_declaration_that_stock_endpoints_contradict_is_told(changes, field):
    seen = stock.declared(declare(**changes), stock.probed(VERSION, MODELS, METRICS))
    assert field in [change.field for change in seen.contradictions]


def _client(answers):
    """A client of a server that answers a path with (status, body); 404 for every other."""

    async def app(scope, receive, send):
        status, body = answers.get(scope["path"], (404, b""))
        seen.append((scope["path"], dict(scope["headers"]).get(b"authorization")))
        headers = [(b"location", b"http://elsewhere/")] if status == 302 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    seen = []
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return client, seen


async def test_fetching_sends_the_key_and_reads_the_identity():
    client, seen = _client({"/plimsoll/identity": (200, json.dumps(PAYLOAD).encode())})
    async with client:
        assert (await identity_client.fetch_attested(client, "http://b", "k")).hash == digest(CONFIG_A)
    assert seen == [("/plimsoll/identity", b"Bearer k")]


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "refuses this API key"), (404, "no identity endpoint"), (302, "answered 302"), (503, "answered 503")],
)
async def test_what_went_wrong_is_told_in_a_sentence_and_nobody_else_is_asked(status, words):
    client, seen = _client({"/plimsoll/identity": (status, b"")})
    async with client:
        with pytest.raises(IdentityError, match=words):
            await identity_client.fetch_attested(client, "http://b", "k")
    assert len(seen) == 1


async def test_an_answer_without_end_is_cut():
    client, _ = _client({"/plimsoll/identity": (200, b"x" * (2 * 1024 * 1024))})
    async with client:
        with pytest.raises(IdentityError, match="more than"):
            await identity_client.fetch_attested(client, "http://b", None)


async def test_nobody_there_is_a_typed_error():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        async with httpx.AsyncClient() as client:  # bound and not listening: refused
            with pytest.raises(IdentityError, match=r"127\.0\.0\.1"):
                await identity_client.fetch_probed(client, f"http://127.0.0.1:{free.getsockname()[1]}", None)


async def test_probing_takes_endpoints_that_are_closed_as_not_there():
    client, _ = _client({"/version": (200, VERSION), "/v1/models": (200, MODELS)})
    async with client:
        probed = await identity_client.fetch_probed(client, "http://b", None)
    assert probed.document["model"]["max_model_len"] == 8192
    assert "cache.block_size" in probed.unknown


async def test_the_tokenizer_is_fetched_as_bytes():
    client, _ = _client({"/plimsoll/tokenizer": (200, b"{}")})
    async with client:
        assert await identity_client.fetch_tokenizer(client, "http://b", "k") == b"{}"
        with pytest.raises(IdentityError, match="answered 404"):
            await identity_client.fetch_tokenizer(client, "http://b/elsewhere", "k")
