"""A request body, checked and described: what the engine is asked for, and the bytes that will be sent.

Owns: `parse` and `Parsed`.
Promises: what was checked is what is sent, for the forwarded body is serialised from the parsed document; nothing but a
typed refusal comes back for any bytes; synchronous and pure, so a caller may run it in a thread when the body is large.
Talks to: `strict_json`, `fields`, `content`, `dialects`, `prompts`, `multipart`; the policy through `ModelRules`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from gateway import policy
from gateway.edge import content, dialects, features, fields, media, multipart, prompts, strict_json
from gateway.edge.checks import NOT_ALLOWED, Fields
from gateway.edge.content import Content
from gateway.edge.decoding import decode
from gateway.edge.routes import Parser, Route
from gateway.errors import Reason, Refusal, Refused
from gateway.flow.shape import Shape, Task

__all__ = ["ModelRules", "Parsed", "decode", "parse"]

JSON_TYPES = frozenset({b"application/json", b""})
CAPS: dict[Parser, tuple[str, ...]] = {
    "chat": ("max_tokens", "max_completion_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
}
_WITH_N = frozenset({"chat", "completions"})
WRITTEN_CAP: dict[Parser, str] = {
    "chat": "max_completion_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
    "transcription": "max_completion_tokens",
    "translation": "max_completion_tokens",
}


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What the policy says about requests to one model. Build once per policy load; `tables` caches the allow-lists."""

    name: str
    upstream_model: str
    media: media.Rules = "refuse"
    allow_fields: tuple[str, ...] = ()
    lora: bool = False
    tables: dict[Parser, Fields] = field(default_factory=dict, compare=False)

    @classmethod
    def from_policy(cls, name: str, model: policy.Model, *, lora: bool = False) -> ModelRules:
        """`lora`: the model's name is an adapter on its backends."""
        return cls(name, model.upstream_model or name, model.media, model.allow_fields, lora)

    def allowed(self, parser: Parser) -> Fields:
        """The allow-list of an endpoint for this model."""
        found = self.tables.get(parser)
        if found is None:
            found = self.tables[parser] = fields.allowed(parser, self.allow_fields)
        return found


Lookup = Callable[[str], ModelRules | None]


@dataclass(slots=True)
class Parsed:
    """A checked request. `output_tokens`: the larger of the caps named, None when none is; `sequences`: prompts × n.

    `document` is None for multipart bodies, which keep their parts in `form`.
    """

    route: Route
    rules: ModelRules
    task: Task
    stream: bool
    sequences: int
    output_tokens: int | None
    features: frozenset[str]
    content: Content
    document: dict[str, Any] | None
    compact: bytes
    dirty: bool = False
    form: multipart.Form | None = None

    @property
    def model(self) -> str:
        """The model's name in the policy."""
        return self.rules.name

    def shape(self, input_tokens: int, output_tokens: int) -> Shape:
        """The request as the envelope sees it."""
        return Shape(self.task, self.features, input_tokens, output_tokens, self.sequences)

    def forward(
        self, *, output_limit: int | None = None, cache_salt: str | None = None, user_key: bytes = b"", model: str | None = None
    ) -> bytes:
        """The body to send, by default under the model's upstream name.

        `output_limit` is written where the request names none; `cache_salt` keeps prefix caches of tenants apart;
        `user` is replaced by a keyed hash. Added names are spliced in; a changed one costs a serialisation.
        """
        name = model or self.rules.upstream_model
        if self.form is not None:
            limit = output_limit if self.output_tokens is None else None
            return self.form.rebuilt(name, None if limit is None else (WRITTEN_CAP[self.route.parser], str(limit)))
        document = cast("dict[str, Any]", self.document)
        added: dict[str, Any] = {}
        if output_limit is not None and self.output_tokens is None and self.route.parser in WRITTEN_CAP:
            added[WRITTEN_CAP[self.route.parser]] = output_limit
        if cache_salt is not None:
            added["cache_salt"] = cache_salt
        changed = self.dirty or document["model"] != name or "user" in document or any(key in document for key in added)
        if not changed:
            return self.compact[:-1] + b"," + orjson.dumps(added)[1:] if added else self.compact
        body = {**document, **added, "model": name}
        if "user" in body:
            body["user"] = hashlib.blake2b(body["user"].encode(), key=user_key[:64], digest_size=16).hexdigest()
        return orjson.dumps(body)


def parse(route: Route, content_type: bytes | None, raw: bytes, lookup: Lookup) -> Parsed | Refusal:
    """A decoded body (no content coding) to a `Parsed`, or why not.

    `lookup` knows the models that this tenant may use: a name it does not know is `model_not_found`, forbidden or not.
    """
    try:
        if route.task == "transcribe":
            return _audio(route, content_type, raw, lookup)
        return _json(route, content_type, raw, lookup)
    except Refused as refused:
        return refused.refusal


def _json(route: Route, content_type: bytes | None, raw: bytes, lookup: Lookup) -> Parsed | Refusal:
    if content_type != b"application/json" and (refusal := wrong_type(content_type)) is not None:
        return refusal
    read = strict_json.read(raw)
    if isinstance(read, Refusal):
        return read
    document, compact = read
    name = document.get("model")
    if type(name) is not str or not name:
        return strict_json.invalid("model must be a string that names a model.", "model")
    rules = lookup(name)
    if rules is None:
        return model_not_found()
    parser = route.parser
    found = rules.allowed(parser).problem(document)
    if found is not None:
        return refused_field(*found)
    dirty = _tidy(parser, document)
    size = _READERS[parser](document, rules.media)
    asked = features.asked(parser, document, size, rules.lora)
    return Parsed(
        route,
        rules,
        route.task or "generate",
        document.get("stream") is True,
        size.sequences * (document.get("n") or 1 if parser in _WITH_N else 1),
        _cap(parser, document),
        asked,
        size,
        document,
        compact,
        dirty,
    )


def _tidy(parser: Parser, document: dict[str, Any]) -> bool:
    """Take out nulls (they mean absent) and fields that are never forwarded. True when something changed."""
    dropped = fields.DROPPED_NAMES[parser]
    if parser == "responses":
        document["store"] = False  # an answer that the engine keeps would outlive its reservation
    elif None not in document.values() and dropped.isdisjoint(document):
        return False
    for name in [name for name, value in document.items() if value is None or name in dropped]:
        del document[name]
    return True


def _cap(parser: Parser, document: dict[str, Any]) -> int | None:
    """The larger of the output caps named. 0 on completions means: only echo; the engine still makes one token."""
    largest: int | None = None
    for name in CAPS.get(parser, ()):
        value = document.get(name)
        if value is not None and (largest is None or value > largest):
            largest = value
    if largest is not None:
        return largest or 1
    if parser == "messages":
        raise content.bad("max_tokens is required.", "max_tokens")
    return None if parser in CAPS else 0


def refused_field(name: str, problem: str) -> Refusal:
    """A top-level field that is not allowed, or whose value is not."""
    name = name[:64]
    if problem == NOT_ALLOWED:
        return Refusal(Reason.FIELD_NOT_ALLOWED, f"The field {name!r} is not allowed here.", param=name)
    reason = Reason.FIELD_NOT_ALLOWED if NOT_ALLOWED in problem else Reason.INVALID_BODY
    return Refusal(reason, f"{name} {problem}.", param=name)


def model_not_found() -> Refusal:
    """The same for a model that does not exist and one that this tenant may not use."""
    return Refusal(Reason.MODEL_NOT_FOUND, "The model does not exist or you do not have access to it.", param="model")


def wrong_type(content_type: bytes | None) -> Refusal | None:
    """415, or None for JSON, and where no type is named; a charset other than UTF-8 is another encoding."""
    kind, _, parameters = (content_type or b"").partition(b";")
    charset = parameters.strip().lower()
    if kind.strip().lower() in JSON_TYPES and charset in (b"", b"charset=utf-8", b'charset="utf-8"', b"charset=utf8"):
        return None
    return Refusal(
        Reason.UNSUPPORTED_ENCODING, "The content-type is not supported here.", param="content-type", fits="application/json"
    )


def _audio(route: Route, content_type: bytes | None, raw: bytes, lookup: Lookup) -> Parsed | Refusal:
    form = multipart.read(content_type, raw)
    if isinstance(form, Refusal):
        return form
    name = form.values.get("model")
    if not name:
        return strict_json.invalid("model must be a part that names a model.", "model")
    rules = lookup(name)
    if rules is None:
        return model_not_found()
    found = rules.allowed(route.parser).problem({key: value for key, value in form.values.items() if value})
    if found is not None:
        return refused_field(*found)
    size = Content()
    size.longest = form.values.get("prompt", "") + form.values.get("hotwords", "")
    size.text(size.longest)
    size.media_tokens = media.audio_tokens(raw[form.file.start : form.file.stop], rules.media, "file")
    cap = form.integer("max_completion_tokens", 1, fields.MAX_CAP)
    stream = form.boolean("stream")
    asked = features.asked(route.parser, form.numbers(features.PENALTIES), size, rules.lora)
    return Parsed(route, rules, "transcribe", stream, 1, cap, asked - {"media"}, size, None, raw, form=form)


_READERS: dict[Parser, Callable[[dict[str, Any], media.Rules], Content]] = {
    "chat": lambda document, rules: content.chat(document.get("messages"), rules),
    "completions": lambda document, _: prompts.sequences(document.get("prompt"), "prompt"),
    "responses": dialects.responses,
    "messages": dialects.anthropic,
    "embeddings": lambda document, _: prompts.sequences(document.get("input"), "input"),
    "rerank": lambda document, _: prompts.rerank(document),
    "score": lambda document, _: prompts.score(document),
}
