"""Small parts on their own: scripts, settings as text, merging of news, odd bodies."""

from typing import Any

import httpx
import orjson
import pytest

from gateway.simulator.audio import duration_s, parse_multipart
from gateway.simulator.config import ConfigError, SimulatorConfig, typed_changes
from gateway.simulator.driver import ClientGoneError, Collector, Delta
from gateway.simulator.errors import ApiError
from gateway.simulator.script import chosen_tool, instance_of, structured_text


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"const": 3}, 3),
        ({"enum": ["b", "a"]}, "b"),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
        ({"type": ["boolean", "null"]}, True),
        ({"type": "array", "items": {"type": "integer", "minimum": 4}, "minItems": 2}, [4, 4]),
        ({"$defs": {"x": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, {"a": "ship"}),
    ],
)
def test_the_smallest_value_of_a_schema(schema: dict[str, Any], value: object) -> None:
    assert instance_of(schema) == value


def test_a_huge_minimum_is_bounded_and_recursion_is_a_500() -> None:
    assert len(instance_of({"type": "array", "items": {"const": 1}, "minItems": 10**9})) == 64
    with pytest.raises(ApiError) as caught:
        structured_text(None, {"grammar": "root ::= root"})
    assert caught.value.status == 500


def test_constraints_of_every_kind() -> None:
    assert structured_text(None, None) is None
    assert structured_text({"type": "text"}, {}) is None
    assert structured_text(None, {"choice": ["yes", "no"]}) == "yes"
    assert orjson.loads(structured_text(None, {"json": '{"type": "boolean"}'}) or "") is True
    assert structured_text(None, {"grammar": 'root ::= "x"'}) == "ship"


def test_a_tool_is_chosen_by_name_or_refused() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    assert chosen_tool(tools, "auto") is None
    assert chosen_tool(tools, "required") == ("a", "{}")
    assert chosen_tool(tools, {"type": "function", "function": {"name": "b"}}) == ("b", "{}")
    with pytest.raises(ApiError):
        chosen_tool(tools, {"type": "function", "function": {"name": "c"}})


def test_settings_of_a_restart_are_read_by_their_type() -> None:
    config = SimulatorConfig()
    text = {"max_num_seqs": "3", "speed": "2", "enable_prefix_caching": "false", "dtype": "float16"}
    assert typed_changes(config, text) == {"max_num_seqs": 3, "speed": 2.0, "enable_prefix_caching": False, "dtype": "float16"}
    free = {"max_num_queued_reqs": "5", "sse_keep_alive_s": "0.5", "quantization": "fp8"}
    assert typed_changes(config, free) == {"max_num_queued_reqs": 5, "sse_keep_alive_s": 0.5, "quantization": "fp8"}
    for bad in ({"api_keys": "x"}, {"no_such": "1"}, {"max_num_seqs": "many"}):
        with pytest.raises(ConfigError):
            typed_changes(config, bad)


async def test_news_that_piles_up_is_merged_and_a_failure_comes_first() -> None:
    collector = Collector()
    collector.put(0, [1], None)
    collector.put(1, [7], None)
    collector.put(0, [2], "stop")
    assert await collector.take() == [Delta(0, [1, 2], "stop"), Delta(1, [7], None)]
    collector.put(1, [8], None)
    collector.fail(ClientGoneError())
    with pytest.raises(ClientGoneError):
        await collector.take()


def test_multipart_keeps_binary_parts_whole() -> None:
    audio = b"\r\n--not the boundary\r\n\x00"
    parts = (b'name="file"; filename="a"\r\nContent-Type: audio/wav', audio), (b'name="model"', b"tiny")
    body = b"".join(
        b"--B\r\nContent-Disposition: form-data; " + head + b"\r\n\r\n" + content + b"\r\n" for head, content in parts
    )
    assert parse_multipart('multipart/form-data; boundary="B"', body + b"--B--\r\n") == {"file": audio, "model": b"tiny"}
    with pytest.raises(ApiError):
        parse_multipart("application/json", body)
    assert duration_s(b"x" * 64_000) == 2.0


async def test_tokenizing_routes(client: httpx.AsyncClient) -> None:
    counted = (await client.post("/tokenize", json={"prompt": "the ship", "return_token_strs": True})).json()
    assert "".join(counted["token_strs"]) == "the ship"
    back = await client.post("/detokenize", json={"tokens": counted["tokens"]})
    assert back.json() == {"prompt": "the ship"}
    assert (await client.post("/detokenize", json={"tokens": [10**6]})).status_code == 400
    assert (await client.post("/tokenize", json={})).status_code == 400


async def test_anthropic_blocks_and_stop_sequences(client: httpx.AsyncClient) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "load her"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "load", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]},
    ]
    body = {"model": "tiny", "messages": turns, "max_tokens": 200}
    full = (await client.post("/v1/messages", json=body)).json()
    stop = full["content"][0]["text"][:4]
    cut = (await client.post("/v1/messages", json={**body, "stop_sequences": [stop]})).json()
    assert (cut["stop_reason"], cut["stop_sequence"], cut["content"][0]["text"]) == ("stop_sequence", stop, "")


@pytest.mark.parametrize("prompt", ["", [], [[]], [10**6], ["a"] * 1025])
async def test_prompts_that_cannot_be(client: httpx.AsyncClient, prompt: object) -> None:
    assert (await client.post("/v1/completions", json={"prompt": prompt})).status_code == 400
