"""The identity that a real vLLM tells: the same for the same flags, another for each flag that shapes capacity.

A start is dear, so most flags are tested several at a time: the documents must differ in exactly the fields that the
flags name, and the hash must be the digest of the document. Together that means that each flag alone gives another hash.
`test_each_flag_alone_gives_another_hash` shows it flag by flag; it is slow.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
import rfc8785

from tests.live.conftest import Start
from tests.live.counting import differences
from tests.live.harness import MODELS, VllmServer

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "How deep may she be loaded?"}], "max_tokens": 4}


def flat(document: Any, prefix: str = "") -> dict[str, Any]:
    """{"cache.block_size": 128, ...}: every leaf of the document under its dotted name."""
    if not isinstance(document, dict):
        return {prefix: document}
    return {name: leaf for key, value in document.items() for name, leaf in flat(value, f"{prefix}.{key}".strip(".")).items()}


def changed(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """Dotted names of the fields in which two configuration documents differ."""
    left, right = flat(old["configuration"]), flat(new["configuration"])
    return {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}


@pytest.fixture(scope="module")
def second(vllm_factory: Start, vllm_server: VllmServer) -> VllmServer:
    """A server with the shared one's flags on another host name and port; tests restart it with others."""
    return vllm_factory(*vllm_server.flags, host="127.0.0.2")


def test_the_hash_is_the_digest_of_the_canonical_document(vllm_server: VllmServer) -> None:
    identity = vllm_server.identity()
    digest = "sha256:" + hashlib.sha256(rfc8785.dumps(identity["configuration"])).hexdigest()
    assert identity["server_configuration_hash"] == digest


def test_the_document_tells_what_runs(vllm_server: VllmServer) -> None:
    document = vllm_server.identity()["configuration"]
    told = flat(document)
    assert told["model.max_model_len"] == 2048
    assert told["model.dtype"] == "bfloat16"
    assert told["scheduler.max_num_seqs"] == 16
    assert told["scheduler.enable_chunked_prefill"] is True
    assert told["parallelism.tensor_parallel_size"] == 1
    assert told["cache.enable_prefix_caching"] is True
    assert told["cache.gpu_memory_utilization"] == "0.92"
    assert told["versions.vllm"] == "0.32.0+cpu"
    tokenizer = hashlib.sha256((MODELS / "none" / "tokenizer.json").read_bytes()).hexdigest()
    assert told["model.tokenizer_files.tokenizer.json"] == f"sha256:{tokenizer}"


def test_no_field_of_a_known_vllm_is_unknown(vllm_server: VllmServer) -> None:
    told = flat(vllm_server.identity()["configuration"])
    unknown = {name for name, value in told.items() if value == "unknown"}
    assert unknown <= {"hardware.device_memory_gib", "versions.flashinfer-python", "versions.triton"}


def test_the_runtime_part_tells_the_cache_size_that_vllm_measured(vllm_server: VllmServer) -> None:
    runtime = vllm_server.identity()["runtime"]
    labels = next(line for line in vllm_server.get("/metrics").text.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert f'kv_cache_size_tokens="{runtime["kv_cache_size_tokens"]}"' in labels
    assert runtime["kv_cache_size_tokens"] == 2_097_152


@pytest.mark.parametrize("path", ["/plimsoll/identity", "/plimsoll/tokenizer"])
def test_the_identity_is_under_the_servers_own_key(vllm_server: VllmServer, path: str) -> None:
    assert vllm_server.get(path).status_code == 200
    assert vllm_server.get(path, key=False).status_code == 401
    wrong = httpx.get(vllm_server.url + path, headers={"authorization": "Bearer sk-other"})
    assert wrong.status_code == 401
    assert vllm_server.api_key not in vllm_server.get(path).text


def test_every_response_carries_the_hash(vllm_server: VllmServer) -> None:
    expected = vllm_server.identity()["server_configuration_hash"]
    answers = {
        200: vllm_server.post(CHAT, BODY),
        401: vllm_server.post(CHAT, BODY, key=False),
        404: vllm_server.post(CHAT, {**BODY, "model": "other"}),
        400: vllm_server.post(CHAT, {**BODY, "max_tokens": -1}),
        405: vllm_server.get(CHAT),
    }
    assert {status: answer.status_code for status, answer in answers.items()} == {status: status for status in answers}
    assert {answer.headers["x-plimsoll-config"] for answer in answers.values()} == {expected}
    stream = vllm_server.post(CHAT, {**BODY, "stream": True})
    assert stream.text.rstrip().endswith("data: [DONE]")
    assert stream.headers["x-plimsoll-config"] == expected
    assert vllm_server.get("/health").headers["x-plimsoll-config"] == expected


def test_the_tokenizer_bundle_is_the_models_own(vllm_server: VllmServer) -> None:
    bundle = vllm_server.get("/plimsoll/tokenizer").json()
    config = json.loads((MODELS / "none" / "tokenizer_config.json").read_text())
    assert bundle["tokenizer"] == (MODELS / "none" / "tokenizer.json").read_text()
    assert bundle["chat_template"] == config["chat_template"]
    assert bundle["special_tokens"]["bos_token"] == config["bos_token"]


async def test_requests_in_flight_are_told_apart_by_their_mark(vllm_server: VllmServer) -> None:
    """Streams with the gateway's mark count for it, others are foreign, and both counts fall back to none."""
    mark = {"x-plimsoll-gateway": f"gw-{uuid.uuid4().hex[:8]}"}
    body = {**BODY, "stream": True, "max_tokens": 400, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=vllm_server.url, headers=vllm_server.headers, timeout=60) as client:

        async def in_flight() -> tuple[int, dict[str, int]]:
            runtime = (await client.get("/plimsoll/identity")).json()["runtime"]
            return runtime["foreign_in_flight"], runtime["gateway_in_flight"]

        async with client.stream("POST", CHAT, json=body, headers=mark) as ours, client.stream("POST", CHAT, json=body) as other:
            assert (ours.status_code, other.status_code) == (200, 200)
            assert await in_flight() == (1, {mark["x-plimsoll-gateway"]: 1})
        async with asyncio.timeout(10):
            while await in_flight() != (0, {}):
                await asyncio.sleep(0.05)


def test_the_same_flags_give_the_same_hash_on_another_host_and_port(vllm_server: VllmServer, second: VllmServer) -> None:
    """The second server is another start with the same flags: neither the start, the port nor the host is in the hash."""
    old, new = vllm_server.identity(), second.identity()
    assert changed(old, new) == set()
    assert new["server_configuration_hash"] == old["server_configuration_hash"]
    assert new["runtime"]["engine_start_id"] != old["runtime"]["engine_start_id"]


def test_sequences_cache_size_and_prefix_caching_are_in_the_hash(vllm_server: VllmServer, second: VllmServer) -> None:
    old = vllm_server.identity()
    flags = (*vllm_server.flags, "--max-num-seqs", "8", "--no-enable-prefix-caching")
    second.restart(*flags, environment={"VLLM_CPU_KVCACHE_SPACE": "2"})
    new = second.identity()
    named = {"scheduler.max_num_seqs", "cache.enable_prefix_caching", "cache.kv_cache_memory_bytes"}
    assert named <= changed(old, new) <= named | {"environment.VLLM_CPU_KVCACHE_SPACE"}
    assert new["server_configuration_hash"] != old["server_configuration_hash"]
    assert new["runtime"]["kv_cache_size_tokens"] == 2 * old["runtime"]["kv_cache_size_tokens"]


def test_length_dtype_memory_share_and_model_are_in_the_hash(vllm_server: VllmServer, second: VllmServer) -> None:
    old = vllm_server.identity()
    flags = (*vllm_server.flags, "--max-model-len", "1024", "--dtype", "float32", "--gpu-memory-utilization", "0.8")
    second.restart(*flags, environment={}, model=MODELS / "nfc")
    new = second.identity()
    files = {"model.tokenizer_files.tokenizer.json", "model.revision", "model.id", "model.tokenizer"}
    named = {"model.max_model_len", "model.dtype", "cache.gpu_memory_utilization"} | files
    assert changed(old, new) == named
    assert new["server_configuration_hash"] != old["server_configuration_hash"]
    assert new["identity"]["model_revision"] != old["identity"]["model_revision"]


async def test_counts_with_the_nfc_tokenizer_that_runs_now(second: VllmServer) -> None:
    """No start of its own: the test before has left the server with that model."""
    assert second.model == MODELS / "nfc"
    compared, found = await differences(second)
    assert compared > 500
    assert found == []


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((), {}, set()),
        (("--max-num-seqs", "8"), {}, {"scheduler.max_num_seqs"}),
        (("--max-model-len", "1024"), {}, {"model.max_model_len"}),
        (("--gpu-memory-utilization", "0.8"), {}, {"cache.gpu_memory_utilization"}),
        (("--no-enable-prefix-caching",), {}, {"cache.enable_prefix_caching"}),
        (("--dtype", "float32"), {}, {"model.dtype"}),
        (("--max-num-batched-tokens", "1024"), {}, {"scheduler.max_num_batched_tokens"}),
        (("--scheduling-policy", "priority"), {}, {"scheduler.policy"}),
        ((), {"VLLM_CPU_KVCACHE_SPACE": "2"}, {"cache.kv_cache_memory_bytes", "environment.VLLM_CPU_KVCACHE_SPACE"}),
    ],
)
def test_each_flag_alone_gives_another_hash(
    vllm_server: VllmServer, second: VllmServer, flags: tuple[str, ...], environment: dict[str, str], expected: set[str]
) -> None:
    old = vllm_server.identity()
    second.restart(*vllm_server.flags, *flags, environment=environment, model=MODELS / "none")
    new = second.identity()
    assert changed(old, new) == expected
    assert (new["server_configuration_hash"] == old["server_configuration_hash"]) == (not expected)


@pytest.mark.slow
def test_the_same_files_in_another_directory_differ_by_name_alone(
    vllm_server: VllmServer, second: VllmServer, tmp_path: Path
) -> None:
    second.restart(*vllm_server.flags, environment={}, model=_copy(MODELS / "none", tmp_path / "copy"))
    assert changed(vllm_server.identity(), second.identity()) == {"model.id", "model.tokenizer"}
