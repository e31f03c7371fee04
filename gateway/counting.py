"""Which token counter speaks for a backend, and for a model through the backends it may use.

Owns one counter per configuration hash, made from the tokenizer that the backend hands out, or from the directory that the
policy names. Promises: a counter is checked against the backend's own /tokenize before the gate opens on it; making and
checking one never holds up the event loop. Talks to: the backends' watches, `edge.tokens`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from gateway import policy as policies
from gateway.edge.count_pool import CountPool
from gateway.edge.tokens import Counter, NoCounter, TokenCounter, TokenizerUnusable
from gateway.evidence.identity import IdentityError
from gateway.evidence.model_files import tokenizer_bundle
from gateway.forward.watch import Watch

log = logging.getLogger("plimsoll.counting")

TOKENIZE_TIMEOUT_S = 10.0
_KEPT = 16


class NotVerified(Exception):
    """The backend's /tokenize gave no usable answer, so that nothing could be compared."""


class Counting:
    """The counters of all backends."""

    def __init__(self, pool: CountPool) -> None:
        self._pool = pool
        self._by_hash: dict[str, Counter] = {}  # configuration hash, or the directory of an operator's tokenizer
        self._of_backend: dict[str, Counter] = {}
        self._none = NoCounter()

    def of(self, backend: str) -> Counter:
        """The counter of one backend; one that counts nothing until `learn` has made it."""
        return self._of_backend.get(backend, self._none)

    def of_first(self, backends: tuple[str, ...]) -> Counter:
        """The counter for a model: that of its first backend that has one. Models are served alike wherever they are."""
        return next((self._of_backend[name] for name in backends if name in self._of_backend), self._none)

    async def learn(self, watch: Watch, models: Mapping[str, policies.Model]) -> bool:
        """Have a counter for a backend's present configuration. False when it could not be fetched now: try again."""
        identity = watch.observation.identity
        directory = next((m.tokenizer for m in models.values() if m.tokenizer is not None), None)
        attested = identity is not None and identity.source == "attested"
        key = identity.hash if attested and identity is not None else str(directory) if directory is not None else None
        if key is None:
            self._of_backend.pop(watch.name, None)
            return True
        counter = self._by_hash.get(key)
        if counter is None:
            try:
                counter = await self._make(watch, directory if not attested else None, models)
            except IdentityError as error:
                log.warning("backend %s: its tokenizer cannot be fetched: %s", watch.name, error)
                return False
            except TokenizerUnusable as error:
                log.error("backend %s: %s; text cannot be counted for it", watch.name, error)
                counter = self._none
            self._by_hash[key] = counter
            while len(self._by_hash) > _KEPT:
                del self._by_hash[next(iter(self._by_hash))]
        self._of_backend[watch.name] = counter
        return True

    async def _make(self, watch: Watch, directory: Path | None, models: Mapping[str, policies.Model]) -> Counter:
        if directory is not None:
            payload: Any = await asyncio.to_thread(tokenizer_bundle, directory, None)
        else:
            raw = await watch.tokenizer()
            try:
                payload = await asyncio.to_thread(orjson.loads, raw)
            except orjson.JSONDecodeError as error:
                raise TokenizerUnusable("the tokenizer's payload is not JSON") from error
        if not isinstance(payload, dict):
            raise TokenizerUnusable("the tokenizer's payload is not an object")
        counter = await asyncio.to_thread(TokenCounter.from_payload, payload, self._pool)
        await self._verify(watch, counter, models)
        return counter

    async def _verify(self, watch: Watch, counter: TokenCounter, models: Mapping[str, policies.Model]) -> None:
        model = next((m.upstream_model or name for name, m in models.items()), "")

        async def ids(body: dict[str, Any]) -> list[int]:
            answer = await watch.post("/tokenize", orjson.dumps({"model": model, **body}), TOKENIZE_TIMEOUT_S)
            if answer is None or answer[0] != 200:
                raise NotVerified(f"/tokenize answered {answer[0] if answer else 'nothing'}")
            try:
                tokens = orjson.loads(answer[1])["tokens"]
            except (orjson.JSONDecodeError, KeyError, TypeError) as error:
                raise NotVerified("/tokenize answered without tokens") from error
            return [int(token) for token in tokens]

        try:
            same = await counter.verify(ids)
        except NotVerified as error:
            log.warning("backend %s: token counts are not verified: %s", watch.name, error)
            return
        if not same:
            log.warning("backend %s: its /tokenize counts otherwise than its tokenizer here; /tokenize is used", watch.name)
