"""POST /v1/embeddings, /v1/score and /v1/rerank.

Owns their shapes. Each input is one sequence that only reads its prompt; vectors and scores follow from the text, so that they
repeat, and mean nothing.
"""

import base64
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from gateway.simulator.completions import prompts_of
from gateway.simulator.errors import bad_request, too_long
from gateway.simulator.exchange import Exchange
from gateway.simulator.faults import FaultKind
from gateway.simulator.generation import Generation, TokenIds
from gateway.simulator.schema import EmbeddingRequest, RerankRequest, ScoreRequest, read
from gateway.simulator.sequence import SequenceSpec
from gateway.simulator.simulation import Simulation

_DIMENSIONS = 64


async def embeddings(simulation: Simulation, exchange: Exchange) -> None:
    """POST /v1/embeddings."""
    request = read(EmbeddingRequest, exchange.body)
    model = simulation.served(request.model)
    prompts = prompts_of(simulation.model, request.input)
    await _run(simulation, exchange, prompts, "input")
    entries = []
    for index, prompt in enumerate(prompts):
        vector = _vector(prompt, request.dimensions or _DIMENSIONS)
        packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        entries.append({"index": index, "object": "embedding", "embedding": packed if _packed(request) else vector})
    head = {"id": simulation.new_id("embd"), "object": "list", "created": simulation.created, "model": model}
    await exchange.json(200, {**head, "data": entries, "usage": _usage(prompts)})


def _packed(request: EmbeddingRequest) -> bool:
    return request.encoding_format == "base64"


async def score(simulation: Simulation, exchange: Exchange) -> None:
    """POST /v1/score: one text against many, or pair by pair."""
    request = read(ScoreRequest, exchange.body)
    model = simulation.served(request.model)
    left = _texts(request.text_1 if request.text_1 is not None else request.queries, "text_1")
    right = _texts(request.text_2 if request.text_2 is not None else request.documents, "text_2")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N", "text_1")
    pairs = [simulation.model.encode(one + "\n" + other) for one, other in zip(left, right, strict=True)]
    await _run(simulation, exchange, pairs, "text_1")
    data = [{"index": index, "object": "score", "score": _score(pair)} for index, pair in enumerate(pairs)]
    head = {"id": simulation.new_id("score"), "object": "list", "created": simulation.created, "model": model}
    await exchange.json(200, {**head, "data": data, "usage": _usage(pairs)})


async def rerank(simulation: Simulation, exchange: Exchange) -> None:
    """POST /v1/rerank: documents by falling score."""
    request = read(RerankRequest, exchange.body)
    model = simulation.served(request.model)
    pairs = [simulation.model.encode(request.query + "\n" + document) for document in request.documents]
    await _run(simulation, exchange, pairs, "documents")
    ranked = sorted(((_score(pair), -index) for index, pair in enumerate(pairs)), reverse=True)
    results: list[dict[str, Any]] = [
        {"index": -index, "document": {"text": request.documents[-index]}, "relevance_score": value} for value, index in ranked
    ]
    usage = {"prompt_tokens": sum(map(len, pairs)), "total_tokens": sum(map(len, pairs))}
    body = {"id": simulation.new_id("rerank"), "model": model, "usage": usage}
    await exchange.json(200, {**body, "results": results[: request.top_n or None]})


def _texts(given: str | list[str] | None, name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise bad_request(f"{name} must hold at least one text.", name)
    return texts


async def _run(simulation: Simulation, exchange: Exchange, prompts: Sequence[TokenIds], param: str) -> None:
    """Have the engine read every prompt. Raises ApiError 400 for one that is too long."""
    limit = simulation.config.max_model_len
    for prompt in prompts:
        if not prompt:
            raise bad_request("An input must not be empty.", param)
        if len(prompt) > limit:
            raise too_long(limit, len(prompt))
    fault = exchange.fault
    factor = fault.factor if fault is not None and fault.kind is FaultKind.SLOW_PREFILL else 1.0
    specs = [SequenceSpec(prompt=prompt, max_tokens=0, prefill_factor=factor) for prompt in prompts]
    async with Generation(simulation, exchange, specs) as generation:
        await generation.wait()


def _usage(prompts: Sequence[TokenIds]) -> dict[str, Any]:
    total = sum(map(len, prompts))
    return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}


def _vector(prompt: TokenIds, dimensions: int) -> list[float]:
    """A unit vector that follows from the ids."""
    rng = random.Random(hash(prompt))  # noqa: S311 - reproducible, not secret
    raw = [rng.gauss(0.0, 1.0) for _ in range(dimensions)]
    length = math.sqrt(sum(value * value for value in raw))
    return [value / length for value in raw]


def _score(pair: TokenIds) -> float:
    return random.Random(hash(pair)).random()  # noqa: S311
