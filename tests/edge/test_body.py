import json
from typing import Any

import pytest

from gateway.edge import body, fields, routes
from gateway.edge.content import Content
from gateway.errors import Reason

from .building import accepted, chat, counter, parse, refused, rules

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"


def completion(prompt: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **more}


def sent(parsed: body.Parsed, **how: Any) -> dict[str, Any]:
    return json.loads(parsed.forward(**how))


@pytest.mark.parametrize("value", [0, -1, -100_000, 1.5, "5", True, [], 2**63, 1e30, 2**31])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_caps_that_are_no_caps(name: str, value: object) -> None:
    found = refused(CHAT, chat(**{name: value}))
    assert (found.reason, found.param) == (Reason.INVALID_BODY, name)


def test_the_larger_cap_counts() -> None:
    assert accepted(CHAT, chat(max_tokens=1, max_completion_tokens=100_000)).output_tokens == 100_000
    assert accepted(CHAT, chat(max_tokens=7, max_completion_tokens=None)).output_tokens == 7
    assert accepted(CHAT, chat(max_tokens=None)).output_tokens is None
    assert accepted(COMPLETIONS, completion(max_tokens=0, echo=True)).output_tokens == 1
    assert accepted(RESPONSES, {"model": "tiny", "input": "x", "max_output_tokens": 9}).output_tokens == 9
    assert accepted(EMBEDDINGS, {"model": "tiny", "input": "x"}).output_tokens == 0
    assert refused(MESSAGES, chat()).param == "max_tokens"


@pytest.mark.parametrize("n", [0, -1, 129, 1_000_000, "2", True, 1.0])
def test_n_is_bounded(n: object) -> None:
    assert refused(CHAT, chat(n=n)).param == "n"


def test_sequences_are_prompts_times_n() -> None:
    assert accepted(CHAT, chat(n=3)).sequences == 3
    assert accepted(CHAT, chat(n=None)).sequences == 1
    assert accepted(COMPLETIONS, completion(["a", "b"], n=4)).sequences == 8
    assert accepted(COMPLETIONS, completion([[1, 2, 3], [4]], n=2)).sequences == 4
    assert accepted(COMPLETIONS, completion([1, 2, 3])).sequences == 1
    assert accepted(COMPLETIONS, completion("x", best_of=5)).sequences == 1
    assert refused(COMPLETIONS, completion(["x"] * 5000)).param == "prompt"
    pairs = {"model": "tiny", "query": "q", "documents": ["a", "bb", "c"]}
    assert accepted("/v1/rerank", pairs).sequences == 3
    assert accepted("/v1/score", {"model": "tiny", "text_1": ["a", "b"], "text_2": ["c", "d"]}).sequences == 2
    assert accepted("/v1/score", {"model": "tiny", "queries": "a", "documents": ["c", "d"]}).sequences == 2


def test_ids_are_counted_by_element() -> None:
    assert accepted(COMPLETIONS, completion([1, 2, 3])).content.tokens == 3
    assert accepted(COMPLETIONS, completion([[1, 2, 3], [4]])).content.tokens == 3
    assert accepted(EMBEDDINGS, {"model": "tiny", "input": [[5] * 10]}).content.tokens == 10


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, "a"], ["a", 1], [1, True], [1, -1], [1.5], [[1], "a"], [None], {}, 5, [[[1]]], None]
)
def test_prompt_forms_that_are_none(prompt: object) -> None:
    assert refused(COMPLETIONS, completion(prompt)).param.startswith("prompt")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "document",
    [
        {"text_1": "a"}, {"text_1": "a", "text_2": []}, {"text_1": ["a", "b"], "text_2": ["c"]}, {"text_1": "a", "text_2": [1]},
        {"text_1": "a", "text_2": "b", "queries": "c"}, {"queries": "a", "documents": "b", "items": "c"},
    ],
)  # fmt: skip
def test_pairs_that_are_none(document: dict[str, Any]) -> None:
    assert refused("/v1/score", {"model": "tiny", **document}).reason is Reason.INVALID_BODY


@pytest.mark.parametrize(
    "name",
    [
        "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority", "request_id", "session_id", "cache_salt",
        "chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds", "truncate_prompt_tokens",
        "use_beam_search", "guided_json", "functions", "no_such_field", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, "/v1/rerank", "/v1/score"])
def test_fields_beyond_the_table_are_refused_and_the_policy_opens_them(path: str, name: str) -> None:
    documents = {
        CHAT: chat(), COMPLETIONS: completion(), RESPONSES: {"model": "tiny", "input": "x"}, MESSAGES: chat(max_tokens=1),
        EMBEDDINGS: {"model": "tiny", "input": "x"}, "/v1/score": {"model": "tiny", "text_1": "a", "text_2": "b"},
        "/v1/rerank": {"model": "tiny", "query": "q", "documents": ["d"]},
    }  # fmt: skip
    if name == "documents" and path in ("/v1/rerank", "/v1/score"):
        return
    document = {**documents[path], name: {"a": 1}}
    found = refused(path, document)
    assert (found.reason, found.param) == (Reason.FIELD_NOT_ALLOWED, name)
    assert name not in sent(accepted(path, {**document, name: None}))
    if name:
        assert sent(accepted(path, document, allow_fields=(name,)))[name] == {"a": 1}


def test_dotted_names_open_one_field_inside_an_object() -> None:
    document = chat(chat_template_kwargs={"mood": "calm", "thinking": True})
    assert refused(CHAT, document).reason is Reason.FIELD_NOT_ALLOWED
    opened = sent(accepted(CHAT, document, allow_fields=("chat_template_kwargs.mood",)))
    assert opened["chat_template_kwargs"] == document["chat_template_kwargs"]
    other = chat(chat_template_kwargs={"other": 1})
    assert refused(CHAT, other, allow_fields=("chat_template_kwargs.mood",)).reason is Reason.FIELD_NOT_ALLOWED


@pytest.mark.parametrize("value", ["true", "false", 1, 0, [], {}, "x"])
def test_stream_is_a_bool(value: object) -> None:
    assert refused(CHAT, chat(stream=value)).param == "stream"


def test_stream_null_is_absent_and_options_go_as_they_came() -> None:
    assert accepted(CHAT, chat(stream=None)).stream is False
    parsed = accepted(CHAT, chat(stream=True, stream_options={"include_usage": True}))
    assert parsed.stream
    assert sent(parsed)["stream_options"] == {"include_usage": True}
    assert "stream_options" not in sent(accepted(CHAT, chat(stream=True)))


@pytest.mark.parametrize(
    ("fields_", "features"),
    [
        ({}, set()),
        ({"logprobs": True}, {"logprobs"}),
        ({"logprobs": False}, set()),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs"}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs"}),
        ({"response_format": {"type": "text"}}, set()),
        ({"response_format": {"type": "json_object"}}, {"structured_output"}),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_output"}),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, set()),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, {"structured_output"}),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, {"structured_output"}),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"structured_output"}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}, set()),
        ({"presence_penalty": 0.5}, {"penalties"}),
        ({"repetition_penalty": 1.1}, {"penalties"}),
        ({"logit_bias": {"5": 1}}, {"penalties"}),
        ({"logit_bias": {}}, set()),
        ({"bad_words": ["x"]}, {"penalties"}),
    ],
)
def test_features(fields_: dict[str, Any], features: set[str]) -> None:
    assert accepted(CHAT, chat(**fields_)).features == features
    assert accepted(CHAT, chat(**fields_), lora=True).features == features | {"lora"}


def test_features_of_the_other_endpoints() -> None:
    assert accepted(COMPLETIONS, completion(logprobs=0)).features == {"logprobs"}
    assert accepted(COMPLETIONS, completion(echo=True)).features == frozenset()
    assert accepted(COMPLETIONS, completion(echo=True, logprobs=1)).features == {"logprobs", "prompt_logprobs"}
    response = {"model": "tiny", "input": "x"}
    schema = {"type": "json_schema", "name": "a", "schema": {}}
    assert accepted(RESPONSES, {**response, "text": {"format": schema}}).features == {"structured_output"}
    assert accepted(RESPONSES, {**response, "include": ["message.output_text.logprobs"]}).features == {"logprobs"}
    assert accepted(MESSAGES, chat(max_tokens=1, tool_choice={"type": "any"})).features == {"structured_output"}
    assert accepted(MESSAGES, chat(max_tokens=1, tool_choice={"type": "auto"})).features == frozenset()


def test_forward_is_what_was_checked() -> None:
    parsed = accepted(CHAT, json.dumps(chat("hé"), indent=3).encode())
    assert parsed.forward() == parsed.compact
    assert sent(parsed, cache_salt="s", output_limit=5) == {**chat("hé"), "cache_salt": "s", "max_completion_tokens": 5}
    assert "max_completion_tokens" not in sent(accepted(CHAT, chat(max_tokens=3)), output_limit=5)
    assert sent(accepted(CHAT, chat(), upstream_model="org/real"))["model"] == "org/real"
    assert sent(accepted(COMPLETIONS, completion()), output_limit=5)["max_tokens"] == 5
    assert "max_tokens" not in sent(accepted(EMBEDDINGS, {"model": "tiny", "input": "x"}), output_limit=5)
    salted = accepted(CHAT, chat(cache_salt="mine"), allow_fields=("cache_salt",))
    assert sent(salted, cache_salt="tenant")["cache_salt"] == "tenant"
    assert salted.forward(cache_salt="tenant").count(b"cache_salt") == 1


def test_user_is_hashed_and_extras_are_dropped() -> None:
    parsed = accepted(CHAT, chat(user="ada@example.org", metadata={"a": "b"}, store=True, safety_identifier="x"))
    one, other = sent(parsed, user_key=b"k1"), sent(parsed, user_key=b"k2")
    assert b"ada" not in parsed.forward(user_key=b"k1")
    assert one["user"] != other["user"]
    assert one.keys() == {"model", "messages", "user"}
    assert sent(parsed, user_key=b"k1") == one


def test_responses_never_keep_state() -> None:
    document = {"model": "tiny", "input": "x"}
    assert sent(accepted(RESPONSES, {**document, "store": True}))["store"] is False
    assert sent(accepted(RESPONSES, document))["store"] is False
    assert refused(RESPONSES, {**document, "previous_response_id": "r"}).reason is Reason.FIELD_NOT_ALLOWED
    assert refused(RESPONSES, {**document, "background": True}).param == "background"
    assert accepted(RESPONSES, {**document, "background": False})
    assert refused(RESPONSES, {**document, "input": [{"type": "item_reference", "id": "x"}]}).reason is Reason.FIELD_NOT_ALLOWED


def test_unknown_and_forbidden_models_look_the_same() -> None:
    found = refused(CHAT, {**chat(), "model": "other"})
    assert found == body.model_not_found()
    assert "other" not in found.message
    for model in (None, "", 5, ["tiny"], {}):
        assert refused(CHAT, {**chat(), "model": model}).param == "model"


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"multipart/form-data; boundary=x", b"application/json; charset=utf-16", b"json"]
)
def test_other_content_types(kind: bytes) -> None:
    assert parse(CHAT, chat(), kind).reason is Reason.UNSUPPORTED_ENCODING  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "kind", [None, b"", b"Application/JSON", b"application/json;charset=UTF-8", b'application/json; charset="utf-8"']
)
def test_json_content_types(kind: bytes | None) -> None:
    raw = json.dumps(chat()).encode()
    assert isinstance(body.parse(routes.ROUTES[CHAT.encode()], kind, raw, {"tiny": rules()}.get), body.Parsed)


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "x", [None], ["x"], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "function", "content": "x"}],
        [{"role": "user", "content": 5}], [{"role": ["user"], "content": "x"}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"text": "x"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "tool_calls": [{}]}], [{"role": "assistant", "tool_calls": 5}],
        [{"role": "user", "content": "x", "name": 5}],
    ],
)  # fmt: skip
def test_messages_that_are_none(messages: object) -> None:
    found = refused(CHAT, {"model": "tiny", "messages": messages})
    assert found.reason is Reason.INVALID_BODY
    assert found.param.startswith("messages")  # type: ignore[union-attr]


def test_content_is_measured_and_only_plain_text_is_plain() -> None:
    def content(*messages: dict[str, Any]) -> Content:
        return accepted(CHAT, {"model": "tiny", "messages": list(messages)}).content

    plain = content({"role": "system", "content": "abc"}, {"role": "user", "content": "hé"})
    assert (plain.narrow, plain.wide, plain.messages, plain.plain) == (3, 3, 2, True)
    parts = content({"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "text", "text": "de"}]})
    assert (parts.narrow, parts.parts, parts.plain) == (5, 2, True)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in (
        {"role": "user", "content": "x", "name": "bob"},
        {"role": "developer", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ):
        assert not content(message).plain
    assert refused(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x", "tools": [1]}]})


def test_deep_schemas_are_refused() -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert refused(CHAT, chat(tools=[tool])).param == "tools"
    assert (
        refused(CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": deep}})).param == "response_format"
    )
    assert refused(CHAT, chat(structured_outputs={"grammar": "x" * 20_000})).param == "structured_outputs"
    assert refused(CHAT, chat(stop=["x"] * 65)).param == "stop"
    assert refused(CHAT, chat(top_logprobs=-1)).param == "top_logprobs"


def test_every_check_of_the_table_survives_every_kind_of_value() -> None:
    values: list[Any] = [True, False, 0, -1, 1.5, 1e308, 2**70, "", "x" * 5000, [], [[]], [None], {}, {"": None}, {"a": []}]
    for parser in fields.TABLE:
        table = fields.allowed(parser)
        for check in table.known.values():
            for value in values:
                assert check(value) is None or isinstance(check(value), str)


def test_a_field_that_is_opened_where_it_means_nothing_changes_no_size() -> None:
    """What is opened for one endpoint of a model is opened for all of them: its checks go with it, and it is not read there."""
    opened = ("n", "prompt", "chat_template_kwargs")
    for wrong in (-1, "0", [], 10**6):
        assert refused("/v1/embeddings", {"model": "tiny", "input": "x", "n": wrong}, allow_fields=opened).param == "n"
    parsed = accepted("/v1/embeddings", {"model": "tiny", "input": "x", "n": 5, "prompt": False}, allow_fields=opened)
    assert parsed.sequences == 1
    assert counter().count_now(parsed) == 1
    found = refused("/v1/responses", {"model": "tiny", "input": "x", "chat_template_kwargs": [1]}, allow_fields=opened)
    assert found.param == "chat_template_kwargs"
