"""What the gateway answers by itself about tokens: /tokenize, /detokenize, /v1/messages/count_tokens, in vLLM's shapes.

Owns: reading those three bodies and building their answers.
Promises: the same field table and the same counting as for requests that are forwarded; a backend is never asked.
`read` is cheap; `answer` is CPU work and belongs in the counter's thread pool.
Talks to: `strict_json`, `fields`, `content`, `dialects` for the body, `tokens` for the ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from gateway.edge import content, dialects, strict_json
from gateway.edge.body import Lookup, ModelRules, model_not_found, refused_field, wrong_type
from gateway.edge.fields import MAX_CAP
from gateway.edge.routes import Parser, Route
from gateway.edge.tokens import MAX_COUNT_BYTES, TokenCounter
from gateway.errors import Reason, Refusal, Refused

MAX_DETOKENIZE_IDS = 1_048_576


class Question(NamedTuple):
    """A checked body of one of the three routes."""

    parser: Parser
    rules: ModelRules
    document: dict[str, Any]


def read(route: Route, content_type: bytes | None, raw: bytes, lookup: Lookup) -> Question | Refusal:
    """Check a body. `lookup` as for `body.parse`; a single model needs no name only where the caller resolves it."""
    refusal = wrong_type(content_type)
    if refusal is not None:
        return refusal
    found = strict_json.read(raw)
    if isinstance(found, Refusal):
        return found
    document = {name: value for name, value in found.document.items() if value is not None}
    name = document.get("model")
    if type(name) is not str or not name:
        return strict_json.invalid("model must be a string that names a model.", "model")
    rules = lookup(name)
    if rules is None:
        return model_not_found()
    problem = rules.allowed(route.parser).problem(document)
    if problem is not None:
        return refused_field(*problem)
    try:
        _check(route.parser, document, rules)
    except Refused as refused:
        return refused.refusal
    return Question(route.parser, rules, document)


def _check(parser: Parser, document: dict[str, Any], rules: ModelRules) -> None:
    if parser == "detokenize":
        ids = document.get("tokens")
        if type(ids) is not list or len(ids) > MAX_DETOKENIZE_IDS or not set(map(type, ids)) <= {int}:
            raise content.bad(f"tokens must be a list of at most {MAX_DETOKENIZE_IDS} integers.", "tokens")
        if ids and (min(ids) < 0 or max(ids) > MAX_CAP):
            raise content.bad("A token id is out of range.", "tokens")
        return
    if parser == "count_tokens":
        size = dialects.anthropic(document, rules.media)
    elif "messages" in document:
        if "prompt" in document:
            raise content.bad("Give prompt or messages, not both.", "prompt")
        size = content.chat(document["messages"], rules.media)
    else:
        size = content.Content()
        if type(document.get("prompt")) is not str:
            raise content.bad("prompt must be a string.", "prompt")
        size.text(document["prompt"])
    if size.media:
        raise Refused(Refusal(Reason.FIELD_NOT_ALLOWED, "Media cannot be tokenized here.", param="messages"))
    if size.bytes > MAX_COUNT_BYTES:
        raise Refused(Refusal(Reason.BODY_TOO_LARGE, "The text is too large.", fits=f"at most {MAX_COUNT_BYTES} bytes of text"))


def answer(question: Question, counter: TokenCounter, max_model_len: int | None) -> dict[str, Any] | Refusal:
    """The JSON of a 200, or why not."""
    try:
        if question.parser == "detokenize":
            return {"prompt": counter.decode(question.document["tokens"])}
        if question.parser == "count_tokens":
            count = len(counter.chat_ids("count_tokens", question.document))
            return {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        return _tokenized(question.document, counter, max_model_len)
    except Refused as refused:
        return refused.refusal


def _tokenized(document: dict[str, Any], counter: TokenCounter, max_model_len: int | None) -> dict[str, Any]:
    if "messages" in document:
        ids = counter.chat_ids("tokenize", document)
    else:
        ids = counter.encode_ids(cast("str", document["prompt"]), document.get("add_special_tokens", True))
    strings = [counter.tokenizer.id_to_token(item) for item in ids] if document.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
