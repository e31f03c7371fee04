"""Every route through the official clients, unchanged."""

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.simulator.server import SimulatorServer

HELLO: list[Any] = [{"role": "user", "content": "how deep may the ship be loaded"}]
SCHEMA = {"type": "object", "properties": {"port": {"type": "string"}, "tons": {"type": "integer"}}, "required": ["port", "tons"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "load", "description": "load cargo", "parameters": SCHEMA}}]


@pytest.fixture
async def oai(sim: SimulatorServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=sim.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.fixture
async def ant(sim: SimulatorServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=sim.url, api_key="x", max_retries=0) as client:
        yield client


async def test_chat_whole_and_streamed_say_the_same(oai: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    whole = await oai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9, extra_body={"ignore_eos": True})
    stream = await oai.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    counted = await client.post("/tokenize", json={"model": "tiny", "messages": HELLO})
    assert whole.usage is not None
    assert whole.system_fingerprint == chunks[-1].system_fingerprint
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (counted.json()["count"], 9)
    said = await client.post("/tokenize", json={"prompt": whole.choices[0].message.content})
    assert said.json()["count"] == 9, "what it says tokenizes back to what it counted"


async def test_n_choices_differ_and_repeat(oai: openai.AsyncOpenAI) -> None:
    async def ask() -> list[str | None]:
        answer = await oai.chat.completions.create(model="tiny", messages=HELLO, n=3, max_completion_tokens=8)
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 24
        return [choice.message.content for choice in sorted(answer.choices, key=lambda c: c.index)]

    first = await ask()
    assert len(set(first)) == 3
    assert await ask() == first


async def test_without_a_limit_chat_ends_by_itself_and_min_tokens_holds(oai: openai.AsyncOpenAI) -> None:
    answer = await oai.chat.completions.create(model="tiny", messages=HELLO, extra_body={"min_tokens": 200})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "load"}}])
async def test_tool_calls(oai: openai.AsyncOpenAI, choice: Any) -> None:
    whole = await oai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=100)
    call = (whole.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    assert call.function.name == "load"
    assert set(json.loads(call.function.arguments)) == {"port", "tons"}
    assert whole.choices[0].finish_reason == "tool_calls"
    stream = await oai.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice, stream=True)
    deltas = [c.choices[0].delta.tool_calls[0] async for c in stream if c.choices[0].delta.tool_calls]
    assert deltas[0].function is not None
    assert deltas[0].function.name == "load"
    arguments = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert arguments == call.function.arguments
    assert len(deltas) > 2, "arguments come in pieces"


async def test_structured_output_is_valid_and_recursion_is_a_500_of_a_healthy_engine(oai: openai.AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "load", "schema": SCHEMA}}
    answer = await oai.chat.completions.create(model="tiny", messages=HELLO, response_format=form)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"port", "tons"}
    free = await oai.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "json_object"})
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)
    node = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    form["json_schema"]["schema"] = node
    with pytest.raises(openai.InternalServerError):
        await oai.chat.completions.create(model="tiny", messages=HELLO, response_format=form)
    await oai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)


async def test_logprobs(oai: openai.AsyncOpenAI) -> None:
    answer = await oai.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=4)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    text = await oai.completions.create(model="tiny", prompt="ship", logprobs=2, max_tokens=4)
    assert text.choices[0].logprobs is not None
    assert "".join(text.choices[0].logprobs.tokens or []) == text.choices[0].text


async def test_completions_take_every_form_of_prompt(oai: openai.AsyncOpenAI, sim: SimulatorServer) -> None:
    text = await oai.completions.create(model="tiny", prompt="the ship", extra_body={"ignore_eos": True})
    assert text.usage is not None
    assert text.usage.completion_tokens == 16, "vLLM's default for completions"
    ids = list(sim.simulation.model.encode("the ship"))
    same = await oai.completions.create(model="tiny", prompt=ids, extra_body={"ignore_eos": True})
    assert same.choices[0].text == text.choices[0].text
    many = await oai.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    listed = await oai.completions.create(model="tiny", prompt=[ids, ids], max_tokens=3, echo=True)
    assert all(choice.text.startswith("the ship") for choice in listed.choices)
    assert sim.peak_in_flight == 4


async def test_stop_strings_end_the_text_before_them(oai: openai.AsyncOpenAI, sim: SimulatorServer) -> None:
    full = await oai.completions.create(model="tiny", prompt="ship", max_tokens=20, extra_body={"ignore_eos": True})
    words = full.choices[0].text.split()
    stop = f"{words[4]} {words[5]}"
    for stream in (False, True):
        answer: Any = await oai.completions.create(
            model="tiny", prompt="ship", max_tokens=20, stop=stop, stream=stream, extra_body={"ignore_eos": True}
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == full.choices[0].text.split(stop)[0]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert sim.stats.aborted == 0
    assert sim.stats.in_flight == 0


async def test_responses(oai: openai.AsyncOpenAI) -> None:
    whole = await oai.responses.create(model="tiny", input="how deep", instructions="be brief", max_output_tokens=6)
    events = [e async for e in await oai.responses.create(model="tiny", input="how deep", max_output_tokens=300, stream=True)]
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 6
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    last: Any = events[-1]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_responses_tools_and_turns(oai: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "name": "load", "parameters": SCHEMA, "strict": False}]
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "load her"}]},
        {"type": "function_call", "call_id": "c", "name": "load", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    answer = await oai.responses.create(model="tiny", input=turns, tools=tools, tool_choice="required")
    call: Any = answer.output[0]
    assert (call.type, call.name) == ("function_call", "load")
    stream = await oai.responses.create(model="tiny", input=turns, tools=tools, tool_choice="required", stream=True)
    parts = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == call.arguments


async def test_messages(ant: anthropic.AsyncAnthropic) -> None:
    whole = await ant.messages.create(model="tiny", system="brief", messages=HELLO, max_tokens=5)
    async with ant.messages.stream(model="tiny", system="brief", messages=HELLO, max_tokens=5) as stream:
        final = await stream.get_final_message()
    block: Any = whole.content[0]
    streamed: Any = final.content[0]
    assert block.text == streamed.text
    assert (whole.stop_reason, whole.usage.output_tokens) == (final.stop_reason, final.usage.output_tokens)
    counted = await ant.messages.count_tokens(model="tiny", system="brief", messages=HELLO)
    assert counted.input_tokens == whole.usage.input_tokens


async def test_messages_tools_and_errors(ant: anthropic.AsyncAnthropic) -> None:
    tools: Any = [{"name": "load", "input_schema": SCHEMA}]
    async with ant.messages.stream(
        model="tiny", messages=HELLO, max_tokens=100, tools=tools, tool_choice={"type": "any"}
    ) as stream:
        final = await stream.get_final_message()
    block: Any = final.content[0]
    assert (block.name, set(block.input), final.stop_reason) == ("load", {"port", "tons"}, "tool_use")
    with pytest.raises(anthropic.NotFoundError):
        await ant.messages.create(model="other", messages=HELLO, max_tokens=5)


async def test_embeddings_score_and_rerank(oai: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    packed = await oai.embeddings.create(model="tiny", input=["ship", "port"])
    plain = await oai.embeddings.create(model="tiny", input="ship", encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert packed.data[0].embedding != packed.data[1].embedding
    scores = (await client.post("/v1/score", json={"text_1": "q", "text_2": ["a", "b"]})).json()
    assert [entry["index"] for entry in scores["data"]] == [0, 1]
    ranked = (await client.post("/v1/rerank", json={"query": "q", "documents": ["a", "b", "c"], "top_n": 2})).json()
    values = [result["relevance_score"] for result in ranked["results"]]
    assert values == sorted(values, reverse=True)
    assert len(values) == 2


def wav(seconds: float) -> bytes:
    raw = io.BytesIO()
    with wave.open(raw, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(b"\r\n\x00\x01" * int(seconds * 8_000))
    return raw.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the client marks translations so
async def test_audio(oai: openai.AsyncOpenAI, client: httpx.AsyncClient, sim: SimulatorServer) -> None:
    audio = ("a.wav", wav(4.0))
    answer = await oai.audio.transcriptions.create(model="tiny", file=audio)
    assert len(answer.text.split()) == 12, "three tokens a second"
    assert sim.stats.prompt_tokens == 200, "fifty tokens a second"
    assert (await oai.audio.translations.create(model="tiny", file=audio)).text
    for kind, start in (("text", answer.text), ("srt", "1\n00:00:00,000 --> 00:00:04,000\n"), ("vtt", "WEBVTT\n\n00:00:00.000")):
        form = {"model": "tiny", "response_format": kind}
        reply = await client.post("/v1/audio/transcriptions", data=form, files={"file": audio})
        assert reply.text.startswith(start)
    streamed = await client.post("/v1/audio/transcriptions", data={"model": "tiny", "stream": "true"}, files={"file": audio})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert '"object":"transcription.chunk"' in streamed.text
    assert (await client.post("/v1/audio/transcriptions", data={"model": "tiny"})).status_code == 400


async def test_errors_are_the_clients_own_exceptions(oai: openai.AsyncOpenAI, sim: SimulatorServer) -> None:
    with pytest.raises(openai.NotFoundError):
        await oai.chat.completions.create(model="other", messages=HELLO)
    limit = sim.config.max_model_len
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        await oai.chat.completions.create(model="tiny", messages=HELLO, max_tokens=limit + 1)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await oai.completions.create(model="tiny", prompt=[5] * limit)
    clamped = await oai.completions.create(model="tiny", prompt=[5] * (limit - 3), max_tokens=50, extra_body={"ignore_eos": True})
    assert clamped.usage is not None
    assert clamped.usage.completion_tokens == 3, "prompt and output together are clamped, not refused"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"model":"tiny"}',
        b'{"messages":[]}',
        b'{"messages":[{}]}',
        b'{"messages":[{"role":"user","content":"x"}],"n":0}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":0}',
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1e400}',
        b'{"messages":[{"role":"user","content":"x"}],"top_logprobs":2}',
        b'{"messages":[{"role":"user","content":"x"}],"stream_options":{"include_usage":true}}',
        b'{"messages":[{"role":"user","content":"x"}],"tool_choice":"required"}',
        b'{"messages":[{"role":"user","content":5}]}',
    ],
)
async def test_validation_errors_are_400_in_the_envelope(client: httpx.AsyncClient, body: bytes) -> None:
    reply = await client.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == 400


async def test_many_streams_share_the_engine_and_all_end(oai: openai.AsyncOpenAI, sim: SimulatorServer) -> None:
    async def one(number: int) -> int:
        stream = await oai.completions.create(
            model="tiny", prompt=f"ship {number}", max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        return len([chunk async for chunk in stream])

    counts = await asyncio.gather(*(one(number) for number in range(40)))
    assert all(1 <= count <= 12 for count in counts)
    assert sim.stats.generation_tokens == 480
    assert sim.stats.peak_running == 16
    assert sim.stats.finished == 40
