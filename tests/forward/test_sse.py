"""The scanner sees the same stream in every segmentation."""

from __future__ import annotations

import itertools

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.forward.sse import MAX_PENDING, Scanner


def event(document: object, newline: bytes = b"\n", prefix: bytes = b"data: ") -> bytes:
    return prefix + (document if isinstance(document, bytes) else orjson.dumps(document)) + newline * 2


def delta(text: str, finish: str | None = None, index: int = 0) -> dict:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def chat(newline: bytes = b"\n", prefix: bytes = b"data: ") -> bytes:
    documents = [ROLE, delta("日本🚢"), delta('"usage": {"error":'), delta("x", "stop"), USAGE, b"[DONE]"]
    return b": keep-alive" + newline * 2 + b"".join(event(d, newline, prefix) for d in documents)


def scan(*segments: bytes, dialect="openai", choices=1) -> Scanner:
    scanner = Scanner(dialect, choices)
    for segment in segments:
        scanner.feed(segment)
    scanner.close()
    return scanner


def facts(scanner: Scanner) -> tuple:
    names = ("events", "content_events", "input_tokens", "output_tokens", "error", "done", "whole")
    return tuple(getattr(scanner, name) for name in names)


WHOLE = (6, 3, 7, 3, False, True, True)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("prefix", [b"data: ", b"data:"])
def test_line_endings_and_the_space(newline, prefix):
    stream = chat(newline, prefix)
    assert facts(scan(stream)) == WHOLE
    assert facts(scan(*[stream[i : i + 1] for i in range(len(stream))])) == WHOLE


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(chat(b"\r\n"))), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_cut_gives_the_same_facts(cuts, newline):
    stream = chat(newline)
    at = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    assert facts(scan(*[stream[a:b] for a, b in itertools.pairwise(at)])) == WHOLE


def test_bom_fields_and_a_missing_last_newline():
    stream = b"\xef\xbb\xbf" + event(delta("a")) + b"id: 1\nevent: x\nretry: 3\n" + event(delta("b", "stop")) + b"data: [DONE]"
    scanner = scan(stream)
    assert (scanner.events, scanner.whole, scanner.done) == (3, True, True)


def test_two_data_lines_are_one_event():
    scanner = scan(b'data: {"choices": [],\ndata: "usage": {"prompt_tokens": 2, "completion_tokens": 1}}\n\n')
    assert (scanner.input_tokens, scanner.output_tokens) == (2, 1)


def test_the_last_usage_wins_and_null_is_no_usage():
    running = [{**delta("a"), "usage": {"prompt_tokens": 7, "completion_tokens": n}} for n in (1, 2)]
    scanner = scan(*[event(d) for d in running], event({**delta("b", "stop"), "usage": None}))
    assert (scanner.input_tokens, scanner.output_tokens) == (7, 2)


def test_every_choice_needs_its_finish():
    first = event(delta("a", "stop", 0))
    assert not scan(first, choices=2).whole
    assert not scan(first, first, choices=2).whole
    assert scan(first, event(delta("b", "length", 1)), choices=2).whole


def test_a_role_or_a_comment_is_no_content():
    assert scan(b": ping\n\n" * 5, event(ROLE)).content_events == 0
    assert scan(b": ping\n\n" * 5).events == 0


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "tool_calls"])
def test_other_content(field):
    assert scan(event({"choices": [{"index": 0, "delta": {field: ["x"]}}]})).content_events == 1


def test_an_error_event_is_never_a_finish():
    scanner = scan(event(delta("a")), event({"error": {"message": "m", "code": 503}}), event(b"[DONE]"))
    assert (scanner.error, scanner.error_code, scanner.whole, scanner.done) == (True, 503, False, True)
    assert scan(event(delta("a", "stop")), b'event: error\ndata: {"error": "text"}\n\n').error


def test_content_that_looks_like_a_finish_is_content():
    scanner = scan(event(delta("a")), event(delta('"finish_reason":"stop" [DONE] {"error": {}}')))
    assert (scanner.whole, scanner.error, scanner.done, scanner.content_events) == (False, False, False, 2)


def test_a_token_named_error_among_logprobs():
    document = {"choices": [{"index": 0, "text": "x", "logprobs": {"top_logprobs": [{"error": -0.1, "usage": -0.2}]}}]}
    assert not scan(event(document), event(document)).error


def test_end_inside_an_event_is_known():
    scanner = Scanner("openai")
    scanner.feed(event(delta("a")) + b'data: {"choi')
    scanner.close()
    assert not scanner.whole


def test_memory_is_bounded_and_a_long_event_still_counts():
    scanner = Scanner("openai")
    scanner.feed(event(delta("a")))
    piece = b"x" * 50_000
    scanner.feed(b'data: {"choices": [], "padding": "')
    for _ in range(100):
        scanner.feed(piece)
        assert len(scanner._pending) <= MAX_PENDING + len(piece)
    scanner.feed(b'"}\n\n' + event(delta("b", "stop")))
    assert (scanner.events, scanner.whole) == (3, True)


def test_anthropic():
    stream = (
        b"event: message_start\n"
        + event({"type": "message_start", "message": {"usage": {"input_tokens": 9, "output_tokens": 0}}})
        + b"event: content_block_delta\n" + event({"type": "content_block_delta", "delta": {"text": "a"}})
        + b"event: message_delta\n" + event({"type": "message_delta", "usage": {"output_tokens": 4}})
    )  # fmt: skip
    assert not scan(stream, dialect="anthropic").whole
    scanner = scan(stream + b"event: message_stop\n" + event({"type": "message_stop"}), dialect="anthropic")
    assert (scanner.whole, scanner.input_tokens, scanner.output_tokens, scanner.content_events) == (True, 9, 4, 1)
    assert scan(event({"type": "error", "error": {"type": "overloaded_error"}}), dialect="anthropic").error


def test_responses():
    created = event({"type": "response.created", "response": {"error": None, "usage": None}})
    text = event({"type": "response.output_text.delta", "delta": "a"})
    done = event({"type": "response.completed", "response": {"usage": {"input_tokens": 5, "output_tokens": 2}, "error": None}})
    assert not scan(created, text, dialect="responses").whole
    scanner = scan(created, text, done, dialect="responses")
    assert (scanner.whole, scanner.input_tokens, scanner.output_tokens, scanner.content_events) == (True, 5, 2, 1)
    assert scan(created, event({"type": "response.failed", "response": {"error": {"code": "x"}}}), dialect="responses").error
