"""The exact allow-list of the public listener. What is not in this table does not exist.

Owns: which paths answer, to which method and role, in which dialect, and which reader understands the body.
Promises: `find` compares the raw bytes of the path, without decoding, folding case or trimming slashes.
Talks to: nobody. /admin/* and /console live on their own listener and have their own table.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gateway.flow.shape import Task

Kind = Literal["proxy", "local", "admin"]
Dialect = Literal["openai", "anthropic", "responses"]
Parser = Literal[
    "chat", "completions", "responses", "messages", "embeddings", "rerank", "score", "transcription", "translation",
    "tokenize", "detokenize", "count_tokens", "none",
]  # fmt: skip

CLIENT = frozenset({"client"})
SCRAPER = frozenset({"scraper", "operator"})
PROBER = frozenset({"prober", "scraper", "operator"})
MODEL_PREFIX = b"/v1/models/"


class Route(NamedTuple):
    """One path. `name` is the label in metrics and journal; `task` is None where the engine is not asked."""

    name: str
    method: str
    kind: Kind
    roles: frozenset[str]
    dialect: Dialect
    task: Task | None
    parser: Parser


ROUTES: dict[bytes, Route] = {
    b"/v1/chat/completions": Route("chat", "POST", "proxy", CLIENT, "openai", "generate", "chat"),
    b"/v1/completions": Route("completions", "POST", "proxy", CLIENT, "openai", "generate", "completions"),
    b"/v1/responses": Route("responses", "POST", "proxy", CLIENT, "responses", "generate", "responses"),
    b"/v1/messages": Route("messages", "POST", "proxy", CLIENT, "anthropic", "generate", "messages"),
    b"/v1/embeddings": Route("embeddings", "POST", "proxy", CLIENT, "openai", "pool", "embeddings"),
    b"/v1/rerank": Route("rerank", "POST", "proxy", CLIENT, "openai", "pool", "rerank"),
    b"/v1/score": Route("score", "POST", "proxy", CLIENT, "openai", "pool", "score"),
    b"/v1/audio/transcriptions": Route("transcriptions", "POST", "proxy", CLIENT, "openai", "transcribe", "transcription"),
    b"/v1/audio/translations": Route("translations", "POST", "proxy", CLIENT, "openai", "transcribe", "translation"),
    b"/v1/models": Route("models", "GET", "local", CLIENT, "openai", None, "none"),
    b"/tokenize": Route("tokenize", "POST", "local", CLIENT, "openai", None, "tokenize"),
    b"/detokenize": Route("detokenize", "POST", "local", CLIENT, "openai", None, "detokenize"),
    b"/v1/messages/count_tokens": Route("count_tokens", "POST", "local", CLIENT, "anthropic", None, "count_tokens"),
    b"/health/live": Route("live", "GET", "local", PROBER, "openai", None, "none"),
    b"/health/ready": Route("ready", "GET", "local", PROBER, "openai", None, "none"),
    b"/metrics": Route("metrics", "GET", "local", SCRAPER, "openai", None, "none"),
}
MODEL = Route("model", "GET", "local", CLIENT, "openai", None, "none")


def find(path: bytes) -> Route | None:
    """The route of a raw path (query cut off); /v1/models/{id} holds for any non-empty id, slashes included."""
    route = ROUTES.get(path)
    if route is None and path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
        return MODEL
    return route
