"""Prompts that are not conversations: completions, embeddings, rerank, score.

Owns: the forms of `prompt` and `input` (a string, strings, ids, lists of ids) and of pairs.
Promises: token ids are counted by element; the sizes are those of the largest sequence; `sequences` is exact.
Talks to: `content` for its sizes.
"""

from __future__ import annotations

from typing import Any

from gateway.edge.content import Content, bad
from gateway.edge.fields import MAX_CAP, MAX_PROMPTS

MAX_IDS = 4_194_304
SCORE_NAMES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def sequences(value: Any, param: str) -> Content:
    """`prompt` or `input`: str, [str, …], [int, …] or [[int, …], …]."""
    content = Content()
    if type(value) is str:
        content.text(value)
        content.longest = value
        return content
    if type(value) is not list or not value:
        raise bad("must be a string, a list of strings, or token ids; not empty.", param)
    first = type(value[0])
    if first is int:
        content.tokens = _ids(value, param)
        return content
    if len(value) > MAX_PROMPTS:
        raise bad(f"at most {MAX_PROMPTS} prompts are allowed in one request.", param)
    content.sequences = len(value)
    if first is list:
        content.tokens = max(_ids(item, f"{param}.{index}") for index, item in enumerate(value))
    elif first is str:
        _largest(value, content, param)
    else:
        raise bad("must be a string, a list of strings, or token ids.", param)
    return content


def _ids(value: Any, param: str) -> int:
    if type(value) is not list or not value or len(value) > MAX_IDS:
        raise bad(f"must be a list of 1 to {MAX_IDS} token ids.", param)
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > MAX_CAP:
        raise bad("token ids are integers, 0 or more, and not mixed with anything else.", param)
    return len(value)


def _largest(texts: list[Any], content: Content, param: str) -> None:
    """Keep the largest narrow and the largest wide size; together they are no less than any one text's."""
    for index, item in enumerate(texts):
        if type(item) is not str:
            raise bad("must be a list of strings.", f"{param}.{index}")
        if item.isascii():
            content.narrow = max(content.narrow, len(item))
        else:
            content.wide = max(content.wide, len(item.encode()))
        if len(item) > len(content.longest):
            content.longest = item


def rerank(document: dict[str, Any]) -> Content:
    """One query against each of the documents."""
    query = document.get("query")
    if type(query) is not str:
        raise bad("query must be a string.", "query")
    return _pairs([query], _texts(document.get("documents"), "documents"))


def score(document: dict[str, Any]) -> Content:
    """text_1 × text_2 in any of their names: one against many, or the same number on both sides."""
    left_name, right_name = _score_names(document)
    left, right = _texts(document[left_name], left_name), _texts(document[right_name], right_name)
    if len(left) not in (1, len(right)):
        raise bad(f"holds {len(left)} texts, which is neither 1 nor as many as {right_name}.", left_name)
    return _pairs(left, right)


def _score_names(document: dict[str, Any]) -> tuple[str, str]:
    """Exactly one of the four pairs of names: with two of them it would be unclear which one the server reads."""
    present = {name for pair in SCORE_NAMES for name in pair if document.get(name) is not None}
    for pair in SCORE_NAMES:
        if present == set(pair):
            return pair
    raise bad(
        "name exactly one pair: text_1 and text_2, queries and documents, queries and items, or data_1 and data_2.", "text_1"
    )


def _texts(value: Any, param: str) -> list[str]:
    texts = [value] if type(value) is str else value
    if type(texts) is not list or not texts or len(texts) > MAX_PROMPTS:
        raise bad(f"must be a string or a list of 1 to {MAX_PROMPTS} strings.", param)
    for index, item in enumerate(texts):
        if type(item) is not str:
            raise bad("must be a string.", f"{param}.{index}")
    return texts


def _pairs(left: list[str], right: list[str]) -> Content:
    content = Content()
    other = Content()
    _largest(left, content, "")
    _largest(right, other, "")
    content.narrow += other.narrow
    content.wide += other.wide
    content.sequences = len(right)
    content.parts = 2
    return content


def pairs(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs of a checked rerank or score document, for an exact count."""
    names = ("query", "documents") if "query" in document else _score_names(document)
    left, right = (_texts(document[name], name) for name in names)
    return list(zip(left * (len(right) if len(left) == 1 else 1), right, strict=True))
