"""The warm-up of a record, run again on an engine that was started since: a cold engine is not the one that was measured.

Owns how many requests, which sizes and how many at once. Promises: sizes come from the record's own boxes, drawn with its
seed; never more at once than the first slice's concurrency; an engine that has finished as many requests since its start is
warm already and is sent nothing. Talks to the backend through its watch, off the data path.
"""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import orjson

from gateway.evidence.record import Record, Slice
from gateway.forward.watch import FINISHED_METRIC, Watch

log = logging.getLogger("plimsoll.warmup")

REQUEST_TIMEOUT_S = 120.0
_IDS = range(100, 200)  # token ids that any vocabulary of use has


class WarmUp:
    """One warm-up of one engine. `model` is the name the backend serves."""

    def __init__(self, watch: Watch, model: str, record: Record) -> None:
        self._watch = watch
        self._model = model
        self._record = record
        self._random = Random(record.protocol.seed or 0)  # noqa: S311 - sizes, not secrets

    async def run(self) -> bool:
        """True when the engine is warm; False when a request failed, so that it is tried again."""
        protocol = self._record.protocol
        wanted = protocol.warmup_requests or 0 if protocol.warmup_state == "completed" else 0
        slices = [s for s in self._record.slices if s.task in ("generate", "pool")]
        if not wanted or not slices:
            return True
        finished = await self._watch.metric(FINISHED_METRIC)
        if finished is not None and finished >= wanted:
            return True
        log.info("backend %s: warming up with %d requests", self._watch.name, wanted)
        room = asyncio.Semaphore(slices[0].levels[-1].concurrency)
        results = await asyncio.gather(*(self._one(slices[n % len(slices)], room) for n in range(wanted)))
        if not all(results):
            log.warning("backend %s: %d of %d warm-up requests failed", self._watch.name, results.count(False), wanted)
        return all(results)

    async def _one(self, box: Slice, room: asyncio.Semaphore) -> bool:
        path, body = self._body(box)
        async with room:
            answer = await self._watch.post(path, orjson.dumps(body), REQUEST_TIMEOUT_S)
        return answer is not None and answer[0] == 200

    def _body(self, box: Slice) -> tuple[str, dict[str, Any]]:
        size = self._random.randint(max(1, box.input_tokens.min), box.input_tokens.max)
        prompt = self._random.choices(_IDS, k=size)
        if box.task == "pool":
            return "/v1/embeddings", {"model": self._model, "input": prompt}
        output = self._random.randint(max(1, box.output_tokens.min), max(1, box.output_tokens.max))
        body = {"model": self._model, "prompt": prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True}
        return "/v1/completions", body
