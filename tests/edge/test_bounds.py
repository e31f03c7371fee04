"""The bound is never below the count: a differential test against `tokenizers` itself."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.edge import bounds, corpus

from .building import KINDS, PARTS_TEMPLATE, TEMPLATE, accepted, counter, tokenizer_json

HARD = [
    *corpus.TEXTS,
    "",
    "\U0001d15e" * 9,
    "\ufdfa" * 9,
    "ﬃ㎏Ⅷ½" * 5,
    "é" * 30,
    "e\u0301" * 30,
    "<s>" * 20,
    "</s> <s>\n" * 9,
    "▁" * 9,
]
ODD = st.sampled_from(
    [
        "\ufdfa",
        "\U0001d15e",
        "\u0344",
        "\ufb03",
        "<s>",
        "</s>",
        "<0x41>",
        "▁",
        "  ",
        "\n",
        "👩‍👩‍👧‍👦",
        "\u1e9b\u0323",
        "Ġ",
        "<|end|>",
    ]
)
TEXT = st.lists(st.text(max_size=8) | ODD | st.text("ab \n", max_size=8), max_size=12).map("".join)
PLAIN = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=6)
COUNTERS = {kind: counter(kind) for kind in KINDS}


def every_block() -> list[str]:
    """Each Unicode block's characters, 256 at a time, surrogates and unassigned ones left out."""
    chars = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)) != "Cn"]
    kept = [char for place, char in enumerate(chars) if place < 12_000 or place % 23 == 0]
    return ["".join(kept[start : start + 256]) for start in range(0, len(kept), 256)]


def completion(text: str) -> Any:
    return accepted("/v1/completions", {"model": "tiny", "prompt": text})


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_and_hard_texts(kind: str) -> None:
    made = COUNTERS[kind]
    for text in [*every_block(), *HARD]:
        parsed = completion(text)
        low, high = made.bound(parsed)
        count = made.count_now(parsed)
        assert high is not None
        assert low <= max(count, 1)
        assert count <= high, (kind, text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
@settings(max_examples=80, deadline=None)
def test_any_text(kind: str, text: str) -> None:
    made = COUNTERS[kind]
    parsed = completion(text)
    low, high = made.bound(parsed)
    count = made.count_now(parsed)
    assert high is not None
    assert count <= high
    assert low <= max(count, 1)


@pytest.mark.parametrize("kind", KINDS)
@given(messages=PLAIN, listed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_conversation(kind: str, messages: list[tuple[str, str]], listed: bool) -> None:
    made = COUNTERS[kind]
    built = [
        {"role": role, "content": [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}] if listed else text}
        for role, text in messages
    ]
    parsed = accepted("/v1/chat/completions", {"model": "tiny", "messages": built})
    _, high = made.bound(parsed)
    assert high is not None
    assert made.count_now(parsed) <= high


def test_pairs_lists_and_the_other_dialects() -> None:
    for kind, made in COUNTERS.items():
        for text in HARD:
            documents: list[tuple[str, dict[str, Any]]] = [
                ("/v1/rerank", {"query": text, "documents": [text, "b", "👍" + text]}),
                ("/v1/completions", {"prompt": [text, "ascii", "wide é" + text]}),
                ("/v1/embeddings", {"input": [text, "x"]}),
                ("/v1/messages", {"system": text, "messages": [{"role": "user", "content": text}], "max_tokens": 1}),
                ("/v1/responses", {"instructions": text, "input": text}),
            ]
            for path, document in documents:
                parsed = accepted(path, {"model": "tiny", **document})
                _, high = made.bound(parsed)
                assert high is not None
                assert made.count_now(parsed) <= high, (kind, path, text)


def test_a_low_bound_settles_what_is_far_too_large() -> None:
    text = "the captain measured " * 20_000
    for made in (COUNTERS["none"], COUNTERS["metaspace"]):
        for path, document in (
            ("/v1/completions", {"prompt": text}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            parsed = accepted(path, {"model": "tiny", **document})
            low, high = made.bound(parsed)
            assert high is not None
            assert 10_000 < low <= made.count_now(parsed) <= high


def test_what_needs_an_exact_count_has_no_bound() -> None:
    made = COUNTERS["none"]
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert made.bound(accepted("/v1/chat/completions", plain))[1] is not None
    for more in ({"tools": [corpus.TOOL]}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"thinking": True}}):
        assert made.bound(accepted("/v1/chat/completions", {**plain, **more}))[1] is None
    tool = {"model": "tiny", "messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]}
    assert made.bound(accepted("/v1/chat/completions", tool))[1] is None
    listed = {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    assert made.bound(accepted("/v1/chat/completions", listed))[1] is not None
    assert counter("none", PARTS_TEMPLATE).bound(accepted("/v1/chat/completions", listed))[1] is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | urlencode }}{% endfor %}",
        "{% for m in messages %}{{ m.content | e }}{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson(indent=4) }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace(' ', '     ') }}{% endfor %}",
        "{{ raise_exception('no') }}",
        "",
    ],
)
def test_templates_that_change_content_have_no_bound(template: str) -> None:
    made = counter("none", template)
    assert (
        made.bound(accepted("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}))[1]
        is None
    )


def described(kind: str, **changes: Any) -> bounds.TextBound:
    return bounds.analyse({**json.loads(tokenizer_json(kind)), **changes})


def test_only_what_is_understood_has_a_factor() -> None:
    assert [described(kind).factor for kind in KINDS] == [1, 3, 11, 1, 1, 1]
    assert described("none", normalizer={"type": "NFD"}).factor is None
    assert described("none", normalizer={"type": "Lowercase"}).factor is None
    assert described("none", normalizer={"type": "Precompiled", "precompiled_charsmap": "AA"}).factor is None
    assert described("none", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}).factor is None
    assert described("none", normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}).factor is None
    assert described("none", model={"type": "Unigram", "vocab": []}).factor is None
    spaced = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert described("none", pre_tokenizer=spaced).prefix == 1
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
    assert described("none", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, spaced]}).factor is None
    assert described("none", normalizer={"type": "?"}).factor is None
    assert bounds.analyse({}).factor is None


def test_a_bound_that_was_seen_to_be_wrong_is_given_up() -> None:
    made = counter("none", TEMPLATE)
    parsed = completion("hello")
    high = made.bound(parsed)[1]
    assert made.saw(high, 3)
    assert made.saw(None, 10**6)
    assert not made.saw(high, 10**6)
    assert made.bound(parsed)[1] is None
