"""Counting input tokens: a bound first, which costs nothing; exactly, in a thread, only when the bound cannot decide.

Owns: `TokenCounter` (one per tokenizer) and its cache of counts.
Promises: `bound` never says less than the server will count, or says that it does not know; `count` never runs on the
event loop, ends by its deadline, and refuses what it cannot count. A count is cached by the digest of what is counted.
Talks to: `bounds`, `templates`, `conversation`, the `count_pool` that all counters share; the backend's /tokenize through an
injected function.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol, cast

import orjson
from tokenizers import Tokenizer

from gateway.edge import bounds, corpus, prompts
from gateway.edge.body import Parsed
from gateway.edge.conversation import Conversation, Uncountable, build
from gateway.edge.count_pool import CountPool, uncountable
from gateway.edge.routes import Parser
from gateway.edge.templates import ChatTemplate, TemplateRefused, TemplateUnusable
from gateway.errors import PlimsollError, Reason, Refusal, Refused

MAX_COUNT_BYTES = 8 * 1024 * 1024  # text beyond this is not tokenized here
MAX_REMOTE_BYTES = 32 * 1024
CACHE_ENTRIES = 4096
# What else, beside the text, makes a prompt longer: with any of these only an exact count will do.
_PROMPT_FIELDS = frozenset({
    "tools", "chat_template_kwargs", "continue_final_message", "reasoning_effort", "reasoning", "thinking", "output_config",
    "documents", "chat_template", "tool_choice", "max_tool_calls",
})  # fmt: skip
_COUNTED = ("messages", "system", "input", "instructions", "prompt", "query", "add_generation_prompt", "add_special_tokens")
_PAIRS = ("documents", "items", "queries", "text_1", "text_2", "data_1", "data_2")
Fetch = Callable[[dict[str, Any]], Awaitable[list[int]]]


class TokenizerUnusable(PlimsollError):
    """The tokenizer that a backend handed out, or that the operator named, cannot be used."""


class Counter(Protocol):
    """What the request path needs of a counter."""

    def bound(self, parsed: Parsed) -> tuple[int, int | None]: ...
    async def count(self, parsed: Parsed, deadline: float) -> int: ...


class TokenCounter:
    """Counts for one tokenizer and template. `mode`: local, or remote when the server's own counting was seen to differ."""

    def __init__(self, tokenizer: Tokenizer, text: bounds.TextBound, template: ChatTemplate | None, pool: CountPool) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.mode: Literal["local", "remote"] = "local"
        self._text = text
        self._overhead = template.overhead if template is not None else None
        self._single = tokenizer.num_special_tokens_to_add(False)
        self._pair = tokenizer.num_special_tokens_to_add(True)
        self._pool = pool
        self._cache: OrderedDict[bytes, int] = OrderedDict()
        self._fetch: Fetch | None = None
        self._turn = asyncio.Lock()

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], pool: CountPool) -> TokenCounter:
        """From what GET /plimsoll/tokenizer serves: `tokenizer` (text), `chat_template`, `special_tokens`.

        Raises TokenizerUnusable; the payload comes from a backend and may be anything. CPU work: call it in a thread.
        """
        source = payload.get("tokenizer")
        if not isinstance(source, str):
            raise TokenizerUnusable("the backend hands out no tokenizer.json")
        try:
            description = orjson.loads(source)
            tokenizer = Tokenizer.from_str(source)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise TokenizerUnusable(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = _special_tokens(payload.get("special_tokens"))
        tokenizer.add_special_tokens(list(special.values()))
        try:
            return cls(tokenizer, bounds.analyse(description), _template(payload.get("chat_template"), special), pool)
        except TemplateUnusable as error:
            raise TokenizerUnusable(str(error)) from error

    def bound(self, parsed: Parsed) -> tuple[int, int | None]:
        """(low, high) input tokens of the largest sequence; high is None when only an exact count can tell."""
        content = parsed.content
        parser = parsed.route.parser
        if parsed.document is None:
            high = self._text.high(content.narrow, content.wide)
            return content.media_tokens, None if high is None else high + content.media_tokens + self._single
        if parser in ("chat", "messages", "responses"):
            return self._chat_bound(parsed)
        if content.tokens:
            return content.tokens, content.tokens
        specials = self._pair if content.parts else self._single
        high = self._text.high(content.narrow, content.wide)
        low = len(content.longest) // self._text.longest if self._text.longest else 1
        return max(low, 1), None if high is None else high + specials + content.parts * self._text.prefix

    def _chat_bound(self, parsed: Parsed) -> tuple[int, int | None]:
        content, overhead = parsed.content, self._overhead
        low = 1
        if len(content.longest) > 4096 and self._text.longest and overhead is not None:
            low = max(1, len(content.longest.strip()) // self._text.longest)
        document = cast("dict[str, Any]", parsed.document)
        if overhead is None or not content.plain or not _PROMPT_FIELDS.isdisjoint(document):
            return low, None
        if content.parts and cast("ChatTemplate", self.template).content_format != "string":
            return low, None
        fixed = overhead.base + overhead.per_message * content.messages + content.parts + self._single
        high = self._text.high(content.narrow, content.wide)
        return low, None if high is None else high + fixed

    def saw(self, high: int | None, prompt_tokens: int) -> bool:
        """Compare a bound with the usage the server reported. False, once it was too low: no bound is given any more."""
        if high is not None and prompt_tokens > high:
            self._text = bounds.TextBound(None)
            return False
        return True

    async def count(self, parsed: Parsed, deadline: float) -> int:
        """Input tokens of the largest sequence, exactly. `deadline`: loop time. Raises Refused."""
        content = parsed.content
        if content.tokens:
            return content.tokens
        if content.bytes > MAX_COUNT_BYTES:
            raise Refused(uncountable(f"The text is larger than {MAX_COUNT_BYTES} bytes and is not counted."))
        key = _digest(parsed)
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            return known
        if self.mode == "remote" and self._fetch is not None:
            found = await self._count_remote(parsed, self._fetch, deadline)
        else:
            found = await self._pool.run(lambda: self.count_now(parsed), deadline, len(parsed.compact))
        self._cache[key] = found
        if len(self._cache) > CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return found

    def count_now(self, parsed: Parsed) -> int:
        """The same, on the calling thread. Raises Refused."""
        document, parser = parsed.document, parsed.route.parser
        if document is None:
            return parsed.content.media_tokens + self._encode(parsed.content.longest)
        if parser in ("chat", "messages", "responses"):
            return len(self.chat_ids(parser, document)) + parsed.content.media_tokens
        if parser in ("rerank", "score"):
            pairs = prompts.pairs(document)
            # Each text once: the two of a pair are encoded apart from each other, and one may stand in all pairs.
            sizes = {text: self._encode(text, specials=False) for text in {text for pair in pairs for text in pair}}
            return max(sizes[left] + sizes[right] for left, right in pairs) + self._pair
        specials = document.get("add_special_tokens", True)
        return max(self._encode(text, specials) for text in _texts(parser, document))

    def chat_ids(self, parser: Any, document: dict[str, Any]) -> list[int]:
        """Ids of a rendered conversation. Raises Refused."""
        if self.template is None:
            raise Refused(uncountable("The model has no chat template, so the input cannot be counted."))
        try:
            made = build(parser, document, self.template.content_format, self.template.knows_developer)
            return self.rendered_ids(made, document.get("add_special_tokens", False))
        except Uncountable as error:
            raise Refused(uncountable(str(error))) from error

    def rendered_ids(self, made: Conversation, specials: bool = False) -> list[int]:
        """Ids of a conversation. Raises Refused with the template's words when it will not render."""
        template = cast("ChatTemplate", self.template)
        try:
            text = template.render(made.messages, made.tools, **made.kwargs)
        except TemplateRefused as error:
            raise Refused(Refusal(Reason.INVALID_BODY, f"The chat template refused: {error}", param="messages")) from error
        return self.encode_ids(text, specials)

    def encode_ids(self, text: str, specials: bool) -> list[int]:
        """Ids of one text. As a batch of one, which lets other threads run meanwhile; `encode` does not."""
        try:
            return self.tokenizer.encode_batch_fast([text], add_special_tokens=specials)[0].ids
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise Refused(uncountable("The model's tokenizer cannot encode this text.")) from error

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special ones included. As a batch of one, for the same reason."""
        text: str = self.tokenizer.decode_batch([ids], skip_special_tokens=False)[0]
        return text

    def _encode(self, text: str, specials: bool = True) -> int:
        return len(self.encode_ids(text, specials))

    async def verify(self, fetch: Fetch) -> bool:
        """Compare with the backend's /tokenize on a fixed corpus. False, and remote counting from now on, if they differ.

        `fetch` takes a /tokenize body without the model and gives the ids; what it raises is passed on.
        """
        self._fetch = fetch
        for body in corpus.bodies(chat=self.template is not None):
            theirs = await fetch(body)
            try:
                ours = await asyncio.to_thread(self._ids_of, body)
            except Refused:
                ours = []
            if ours != theirs:
                self.mode = "remote"
                self._text = bounds.TextBound(self._text.factor) if "messages" in body else bounds.TextBound(None)
                self._overhead = None
                self._cache.clear()
                return False
        self.mode = "local"
        return True

    def _ids_of(self, body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return self.encode_ids(body["prompt"], True)
        return self.chat_ids("chat", body)

    async def _count_remote(self, parsed: Parsed, fetch: Fetch, deadline: float) -> int:
        """By the backend's /tokenize: small bodies, one at a time."""
        document = cast("dict[str, Any]", parsed.document)
        if parsed.content.bytes > MAX_REMOTE_BYTES or len(parsed.compact) > 2 * MAX_REMOTE_BYTES:
            raise Refused(uncountable(f"The text is larger than {MAX_REMOTE_BYTES} bytes and cannot be counted for this model."))
        if parsed.route.parser == "chat":
            names = ("messages", "tools", "add_generation_prompt", "add_special_tokens", "chat_template_kwargs")
            bodies = [{name: document[name] for name in names if name in document}]
        elif parsed.route.parser in ("completions", "embeddings"):
            bodies = [{"prompt": text} for text in _texts(parsed.route.parser, document)]
        else:
            raise Refused(uncountable("The input of this endpoint cannot be counted for this model."))
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                return max([len(await fetch(body)) for body in bodies]) + parsed.content.media_tokens
        except TimeoutError:
            raise Refused(uncountable("The input could not be counted in time.")) from None


class NoCounter:
    """For a backend without a tokenizer: only ids given as numbers have a size."""

    def bound(self, parsed: Parsed) -> tuple[int, int | None]:
        tokens = parsed.content.tokens
        return (tokens, tokens) if tokens else (1, None)

    async def count(self, parsed: Parsed, deadline: float) -> int:
        """The number of ids. Raises Refused for text."""
        if parsed.content.tokens:
            return parsed.content.tokens
        raise Refused(uncountable("No tokenizer is known for this model, so its input cannot be counted."))


def _texts(parser: Parser, document: dict[str, Any]) -> list[str]:
    """The prompts of a checked completions or embeddings body that names none as ids."""
    texts = document["prompt" if parser == "completions" else "input"]
    return [texts] if isinstance(texts, str) else texts


def _digest(parsed: Parsed) -> bytes:
    """Of everything that the count depends on; of the whole body for multipart."""
    hasher = hashlib.blake2b(parsed.route.parser.encode(), digest_size=16)
    document = parsed.document
    if document is None:
        hasher.update(parsed.compact)
    else:
        names = (*_COUNTED, *_PAIRS, *sorted(_PROMPT_FIELDS))
        hasher.update(orjson.dumps([[name, document[name]] for name in names if name in document]))
    return hasher.digest()


def _special_tokens(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 64:
        return {}
    return {name: text for name, text in value.items() if isinstance(name, str) and isinstance(text, str) and text}


def _template(value: Any, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The template in force. Of several named ones the default: the one for tools is counted by /tokenize."""
    if isinstance(value, dict):
        value = value.get("default")
    return ChatTemplate(value, special_tokens) if isinstance(value, str) and value else None
