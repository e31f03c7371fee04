"""What a user of the official clients does, written once: it must work the same before a simulator and a real vLLM.

Each function takes the gateway's base URL (without /v1) and a key, and asserts what that user would notice. Lengths are kept
exact with `ignore_eos`, so that nothing depends on what a model happens to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
from langchain_openai import ChatOpenAI

MODEL = "tiny"
Conversation = Callable[[str, str], None]
HELLO: Any = [{"role": "user", "content": "How deep may she be loaded?"}]
TURNS: Any = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Is the sea calm?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "tomorrow?"}]},
]
SCHEMA: Any = {
    "type": "object",
    "properties": {"port": {"type": "string"}, "tons": {"type": "integer"}},
    "required": ["port", "tons"],
}
TOOLS: Any = [{"type": "function", "function": {"name": "load", "description": "Load cargo", "parameters": SCHEMA}}]
EXACT: Any = {"ignore_eos": True}
GREEDY: Any = {"temperature": 0}  # the client names no such argument any more
USAGE: Any = {"include_usage": True}


def sync_openai(url: str, key: str, **options: Any) -> openai.OpenAI:
    """The synchronous client, as a user would make it."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, **options)


def async_openai(url: str, key: str, **options: Any) -> openai.AsyncOpenAI:
    """The asynchronous client."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)


def sync_anthropic(url: str, key: str, **options: Any) -> anthropic.Anthropic:
    """Anthropic's synchronous client."""
    return anthropic.Anthropic(base_url=url, api_key=key, **options)


def chat(url: str, key: str) -> None:
    """Whole and streamed answers agree in text, length and end; the counted input is that of the server."""
    with sync_openai(url, key) as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=TURNS, max_completion_tokens=12, temperature=0, extra_body=EXACT
        )
        chunks = list(client.chat.completions.create(
            model=MODEL, messages=TURNS, max_tokens=12, temperature=0, stream=True, stream_options=USAGE, extra_body=EXACT
        ))  # fmt: skip
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]


def chat_raw_response(url: str, key: str) -> None:
    """The headers a caller is told: the record it was admitted on, its wait, the limit it was given, the request's id."""
    with sync_openai(url, key) as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, extra_headers={"x-request-id": "voyage-7"}
        )
        answer = raw.parse()
    assert raw.headers["x-request-id"] == "voyage-7" == raw.request_id
    assert len(raw.headers["x-plimsoll-record"]) == 16
    assert int(raw.headers["x-plimsoll-queue-ms"]) >= 0
    assert answer.usage is not None and answer.usage.completion_tokens <= int(raw.headers["x-plimsoll-max-tokens"])


async def chat_async(url: str, key: str) -> None:
    """The asynchronous client, whole and streamed, and a stream that is left early."""
    async with async_openai(url, key) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0, extra_body=EXACT)
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, temperature=0, stream=True, extra_body=EXACT
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content
        async with await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=24, stream=True, extra_body=EXACT
        ) as left:
            async for chunk in left:
                if chunk.choices[0].delta.content:
                    break


def several_choices(url: str, key: str) -> None:
    """n=2: two choices, both streams whole, one usage."""
    with sync_openai(url, key) as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, n=2, max_tokens=6, extra_body=EXACT)
        assert sorted(choice.index for choice in whole.choices) == [0, 1]
        assert whole.usage is not None and whole.usage.completion_tokens == 12
        ends: dict[int, str] = {}
        for chunk in client.chat.completions.create(
            model=MODEL, messages=HELLO, n=2, max_tokens=6, stream=True, extra_body=EXACT
        ):
            ends |= {c.index: c.finish_reason for c in chunk.choices if c.finish_reason}
    assert ends == {0: "length", 1: "length"}


def tools_offered(url: str, key: str) -> None:
    """Tools with `none` and `auto`, and a conversation in which one was called: the model may answer either way."""
    turns: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "load", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    with sync_openai(url, key) as client:
        none = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="none", max_tokens=8)
        assert none.choices[0].message.content and not none.choices[0].message.tool_calls
        plain = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
        assert none.usage is not None and plain.usage is not None
        for choice in ("auto", "none"):
            answer = client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS, tool_choice=choice, max_tokens=8)
            assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
        stream = client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="auto", max_tokens=8, stream=True
        )
        assert [c.choices[0].finish_reason for c in stream if c.choices][-1] in ("stop", "length", "tool_calls")


def tools_required(url: str, key: str) -> None:
    """A forced call comes with arguments of its schema, whole and in pieces."""
    with sync_openai(url, key) as client:
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=100)
        call: Any = (whole.choices[0].message.tool_calls or [])[0]
        assert call.function.name == "load" and set(json.loads(call.function.arguments)) == {"port", "tons"}
        pieces = client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=100, stream=True
        )
        deltas = [c.choices[0].delta.tool_calls[0] for c in pieces if c.choices and c.choices[0].delta.tool_calls]
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == call.function.arguments


def completions(url: str, key: str) -> None:
    """Text, ids and lists as prompts; 16 tokens where no limit was named, as vLLM would give."""
    with sync_openai(url, key) as client:
        raw = client.completions.with_raw_response.create(model=MODEL, prompt="the ship", temperature=0, extra_body=EXACT)
        text = raw.parse()
        assert text.usage is not None and text.usage.completion_tokens == 16
        assert raw.headers["x-plimsoll-max-tokens"] == "16"
        many = client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=3)
        assert sorted(choice.index for choice in many.choices) == [0, 1, 2, 3]
        ids = client.completions.create(model=MODEL, prompt=[300, 301, 302], max_tokens=4, extra_body=EXACT)
        assert ids.usage is not None and (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 4)
        streamed = client.completions.create(
            model=MODEL, prompt="the ship", max_tokens=16, temperature=0, stream=True, extra_body=EXACT
        )
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == text.choices[0].text


def responses(url: str, key: str) -> None:
    """The responses API, whole and as typed events."""
    with sync_openai(url, key) as client:
        whole = client.responses.create(model=MODEL, input="How deep?", instructions="Be brief.", max_output_tokens=16)
        assert whole.usage is not None and whole.usage.output_tokens <= 16
        events = list(client.responses.create(model=MODEL, input="How deep?", max_output_tokens=16, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def models(url: str, key: str) -> None:
    """The list and one model, with the largest sizes that were measured."""
    with sync_openai(url, key) as client:
        names = [model.id for model in client.models.list()]
        one = client.models.retrieve(MODEL)
    assert MODEL in names and one.id == MODEL
    extra: Any = one.model_extra
    assert extra["max_input_tokens"] > 0 and extra["max_output_tokens"] > 0


def embeddings(url: str, key: str) -> None:
    """Base64 (the client's default) and floats give the same vectors."""
    with sync_openai(url, key) as client:
        packed = client.embeddings.create(model=MODEL, input=["ship", "port"])
        plain = client.embeddings.create(model=MODEL, input="ship", encoding_format="float")
    assert len(packed.data) == 2
    pairs = zip(packed.data[0].embedding, plain.data[0].embedding, strict=True)
    assert all(abs(left - right) < 1e-5 for left, right in pairs)


def messages(url: str, key: str) -> None:
    """Anthropic's client: create, stream and count_tokens agree."""
    with sync_anthropic(url, key) as client:
        whole = client.messages.create(model=MODEL, system="Be brief.", messages=HELLO, max_tokens=6, extra_body=GREEDY)
        with client.messages.stream(model=MODEL, system="Be brief.", messages=HELLO, max_tokens=6, extra_body=GREEDY) as stream:
            final = stream.get_final_message()
        counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=HELLO)
    left: Any = whole.content[0]
    right: Any = final.content[0]
    assert left.text == right.text and whole.stop_reason == final.stop_reason
    assert counted.input_tokens == whole.usage.input_tokens


def langchain(url: str, key: str, *, force: bool) -> None:
    """LangChain: invoke, stream and bind_tools; with `force` the tool must be called."""
    model = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=MODEL, max_completion_tokens=24, temperature=0)  # type: ignore[arg-type]
    answer = model.invoke([("system", "Be brief."), ("human", "How deep may she be loaded?")])
    assert answer.text and answer.usage_metadata and answer.usage_metadata["output_tokens"] <= 24
    streamed = list(model.stream([("system", "Be brief."), ("human", "How deep may she be loaded?")]))
    assert "".join(chunk.text for chunk in streamed) == answer.text
    bound = model.bind_tools(TOOLS, tool_choice="any" if force else "none").invoke("Load her.")
    assert [call["name"] for call in bound.tool_calls] == (["load"] if force else [])
