"""Rendering and counting equal Hugging Face's, which is what the server uses."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gateway.edge import corpus, templates
from gateway.edge.conversation import build
from gateway.edge.templates import ChatTemplate, TemplateRefused, TemplateUnusable

from .building import KINDS, PARTS_TEMPLATE, TEMPLATE, accepted, counter

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
GENERATION = (
    "{%- for message in messages %}\n    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}\n"
    "    {%- else %}{{ message.content }}{% endif %}{% if loop.index > 90 %}{% break %}{% endif %}\n{%- endfor %}"
    "{{ tools | tojson if tools }}{{ strftime_now('%Y') }}{{ eos_token }}{{ missing is defined }}"
)


def reference(kind: str, template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=counter(kind).tokenizer, chat_template=template, **SPECIAL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [TEMPLATE, PARTS_TEMPLATE, GENERATION])
def test_the_corpus_gives_the_same_ids(kind: str, template: str) -> None:
    made, theirs = counter(kind, template), reference(kind, template)
    assert made.template is not None
    for body in corpus.bodies(chat=True):
        if "prompt" in body:
            assert made.encode_ids(body["prompt"], True) == theirs(body["prompt"]).input_ids
            continue
        conversation = build("chat", body, made.template.content_format, made.template.knows_developer)
        expected = theirs.apply_chat_template(
            conversation.messages, tools=conversation.tools, add_generation_prompt=True, return_dict=False
        )
        assert made.chat_ids("chat", body) == expected


@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=4), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
)
@settings(max_examples=50, deadline=None)
def test_any_text_renders_the_same(texts: list[str], properties: dict[str, str]) -> None:
    template, theirs = ChatTemplate(TEMPLATE, SPECIAL), reference("none", TEMPLATE)
    messages = [{"role": "user", "content": text} for text in texts]
    tools = [{"type": "function", "function": {"name": "f", "description": None, "parameters": properties}}]
    expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert template.render(messages, tools) == expected


def test_the_content_format_follows_the_template() -> None:
    def found(source: str) -> str:
        return ChatTemplate(source, {}).content_format

    assert found(TEMPLATE) == found(GENERATION) == "string"
    assert found(PARTS_TEMPLATE) == "openai"
    assert (
        found("{% set chat = messages[1:] %}{% for m in chat %}{% for p in m.content | list %}{{ p }}{% endfor %}{% endfor %}")
        == "openai"
    )
    assert found("{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
                 "{% for m in messages %}{{ show(m['content']) }}{% endfor %}") == "openai"  # fmt: skip
    assert (
        found("{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p.text }}{% endfor %}{% endfor %}")
        == "openai"
    )
    assert found("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{{ m.content }}{% endfor %}") == "string"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% include 'a' %}{% endif %}", "{{ " + "(" * 5000, "x" * 1_000_001])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(TemplateUnusable):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}", "{{ messages[99].content.x }}", "{{ 1 / 0 }}", "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include 'x' %}", "{{ range(10 ** 9) | list }}",
        "{{ messages | tojson(indent='x', bad=1) }}", "{{ 'a' + 5 }}",
        "{{ cycler.__init__.__globals__ }}", "{{ messages.__class__ }}{{ 5 | nofilter }}",
    ],
)  # fmt: skip
def test_templates_that_fail_are_refusals(source: str) -> None:
    with pytest.raises((TemplateRefused, TemplateUnusable)):
        template = ChatTemplate(source, SPECIAL)
        text = template.render([{"role": "user", "content": "x"}])
        assert "globals" not in text
        assert "class" not in text
        raise TemplateRefused("rendered nothing of what it asked for")


def test_the_models_own_template_has_an_overhead() -> None:
    folder = Path(templates.__file__).parents[1] / "simulator" / "model"
    source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    overhead = ChatTemplate(source, SPECIAL).overhead
    assert overhead is not None
    assert overhead.per_message < 64


def conversation(path: str, document: dict[str, Any], content_format: Any = "string", developer: bool = False) -> Any:
    parsed = accepted(path, {"model": "tiny", **document})
    assert parsed.document is not None
    return build(parsed.route.parser, parsed.document, content_format, developer)


def test_messages_api_becomes_chat() -> None:
    made = conversation("/v1/messages", {
        "max_tokens": 1,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"},
                   {"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
        "messages": [
            {"role": "user", "content": "sea?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "look"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"at": "Å"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "calm"}]},
                {"type": "text", "text": "so?"}]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": {"properties": {}}}],
    })  # fmt: skip
    assert [(message["role"], message["content"]) for message in made.messages] == [
        ("system", "be kind"), ("user", "sea?"), ("assistant", "look"), ("tool", "calm"), ("user", "so?"),
    ]  # fmt: skip
    assert made.messages[2]["tool_calls"][0]["function"] == {"arguments": {"at": "Å"}, "name": "weather"}
    assert made.messages[2]["reasoning_content"] == "hm"
    assert made.tools[0]["function"]["parameters"] == {"properties": {}, "type": "object"}


def test_responses_api_becomes_chat() -> None:
    made = conversation("/v1/responses", {
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": "sea?"},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed",
             "content": [{"type": "output_text", "text": "look", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "not json"},
            {"type": "function_call_output", "call_id": "c", "output": "calm"},
        ],
    })  # fmt: skip
    assert [(message["role"], message["content"]) for message in made.messages] == [
        ("system", "be kind"), ("user", "sea?"), ("assistant", "look"), ("tool", "calm"),
    ]  # fmt: skip
    assert list(made.messages[2]["tool_calls"][0]["function"].items()) == [("name", "weather"), ("arguments", {})]


def test_developer_messages_fall_back_to_one_system_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "system", "content": "c"}]
    made = conversation("/v1/chat/completions", {"messages": messages})
    assert [(message["role"], message["content"]) for message in made.messages] == [("system", "b\n\nc"), ("user", "a")]
    kept = conversation("/v1/chat/completions", {"messages": messages}, developer=True)
    assert [message["role"] for message in kept.messages] == ["user", "developer", "system"]
