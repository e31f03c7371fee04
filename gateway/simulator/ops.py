"""The routes beside generation: models, health, version, metrics, tokenizing.

Owns their shapes. A frozen engine changes none of them, as in vLLM.
"""

from typing import Any

from gateway.simulator.chat import encode_chat
from gateway.simulator.errors import bad_request
from gateway.simulator.exchange import Exchange
from gateway.simulator.schema import DetokenizeRequest, TokenizeRequest, read
from gateway.simulator.simulation import Simulation
from gateway.simulator.tokens import PromptError


async def health(simulation: Simulation, exchange: Exchange) -> None:
    """GET /health and /ping: 200 and nothing, as long as the process lives."""
    await exchange.json(200, b"")


async def version(simulation: Simulation, exchange: Exchange) -> None:
    """GET /version."""
    await exchange.json(200, {"version": simulation.config.vllm_version})


async def metrics(simulation: Simulation, exchange: Exchange) -> None:
    """GET /metrics."""
    await exchange.json(200, simulation.metrics.render(simulation.engine), b"text/plain; version=0.0.4; charset=utf-8")


async def models(simulation: Simulation, exchange: Exchange) -> None:
    """GET /v1/models."""
    cards: list[dict[str, Any]] = [
        {
            "id": name,
            "object": "model",
            "created": simulation.created,
            "owned_by": "vllm",
            "root": str(simulation.model.directory),
            "parent": None,
            "max_model_len": simulation.config.max_model_len,
            "permission": [],
        }
        for name in simulation.config.served_model_names
    ]
    await exchange.json(200, {"object": "list", "data": cards})


async def tokenize(simulation: Simulation, exchange: Exchange) -> None:
    """POST /tokenize: a prompt, or messages with their template."""
    request = read(TokenizeRequest, exchange.body)
    simulation.served(request.model)
    if request.messages is not None:
        extra, add = request.chat_template_kwargs, request.add_generation_prompt
        ids = encode_chat(simulation, request.messages, request.tools, extra, add)
    elif request.prompt is not None:
        ids = simulation.model.encode(request.prompt)
    else:
        raise bad_request("Give a prompt or messages.", "prompt")
    strings = [simulation.model.pieces[token] for token in ids] if request.return_token_strs else None
    limit = simulation.config.max_model_len
    await exchange.json(200, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


async def detokenize(simulation: Simulation, exchange: Exchange) -> None:
    """POST /detokenize."""
    request = read(DetokenizeRequest, exchange.body)
    simulation.served(request.model)
    try:
        await exchange.json(200, {"prompt": simulation.model.decode(request.tokens)})
    except PromptError as error:
        raise bad_request(str(error), "tokens") from error
