"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shapes.

Owns the message object and its events (`event:` lines, no [DONE]). Messages become chat messages. Talks to the chat plan for
everything else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.simulator.chat import ChatPlan, encode_chat, plan_chat
from gateway.simulator.exchange import Exchange
from gateway.simulator.generation import Generation, Piece, TokenIds
from gateway.simulator.schema import CountTokensRequest, MessagesRequest, Sampling, read
from gateway.simulator.simulation import Simulation

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


async def count_tokens(simulation: Simulation, exchange: Exchange) -> None:
    """POST /v1/messages/count_tokens."""
    request = read(CountTokensRequest, exchange.body)
    simulation.served(request.model)
    count = len(_prompt(simulation, request))
    await exchange.json(200, {"input_tokens": count, "context_management": {"original_input_tokens": count}})


async def messages(simulation: Simulation, exchange: Exchange) -> None:
    """POST /v1/messages."""
    request = read(MessagesRequest, exchange.body)
    simulation.served(request.model)
    sampling = Sampling(model=request.model, stop=request.stop_sequences, stream=request.stream)
    prompt, choice = _prompt(simulation, request), _choice(request.tool_choice)
    plan = plan_chat(simulation, sampling, prompt, request.max_tokens, _chat_tools(request.tools), choice, None)
    writer = _MessageWriter(simulation, exchange, plan)
    async with plan.generation(simulation, exchange) as generation:
        await (writer.stream(generation) if request.stream else writer.whole(generation))


def _prompt(simulation: Simulation, request: CountTokensRequest) -> TokenIds:
    system = [{"role": "system", "content": _text(request.system)}] if request.system else []
    chat = [{"role": item.get("role"), "content": _text(item.get("content"))} for item in request.messages]
    return encode_chat(simulation, [*system, *chat], _chat_tools(request.tools))


def _text(content: object) -> str:
    """Text of a string or of content blocks; a tool's use and its result count as their JSON."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    parts = [str(b["text"]) if "text" in b else orjson.dumps(b).decode() for b in blocks if isinstance(b, Mapping)]
    return "".join(parts)


def _chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in tools
    ]


def _choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    match (choice or {}).get("type"):
        case "any":
            return "required"
        case "tool":
            return {"name": (choice or {}).get("name")}
    return None


class _MessageWriter:
    """Turns pieces into a message object and its events."""

    def __init__(self, simulation: Simulation, exchange: Exchange, plan: ChatPlan) -> None:
        self._exchange = exchange
        self._plan = plan
        self._id = simulation.new_id("msg")

    async def whole(self, generation: Generation) -> None:
        """The answer as one object."""
        parts: list[str] = []
        last: Piece | None = None
        async for last in generation:
            parts.append(last.text)
        content = self._block("".join(parts))
        reason, sequence = self._ending(last)
        await self._exchange.json(200, self._message([content], reason, sequence, generation.completion_tokens))

    async def stream(self, generation: Generation) -> None:
        """The answer as events."""
        await self._exchange.start_stream()
        await self._event("message_start", {"message": self._message([], None, None, 0)})
        await self._event("content_block_start", {"index": 0, "content_block": self._block("")})
        last: Piece | None = None
        async for last in generation:
            if last.text:
                text = {"type": "text_delta", "text": last.text}
                delta = {"type": "input_json_delta", "partial_json": last.text} if self._plan.tool else text
                await self._event("content_block_delta", {"index": 0, "delta": delta}, content=True)
        await self._event("content_block_stop", {"index": 0})
        reason, sequence = self._ending(last)
        usage = self._usage(generation.completion_tokens)
        await self._event("message_delta", {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage})
        await self._event("message_stop", {})
        await self._exchange.end_stream()

    async def _event(self, name: str, fields: Mapping[str, Any], content: bool = False) -> None:
        event = b"event: " + name.encode("ascii") + b"\ndata: " + orjson.dumps({"type": name, **fields}) + b"\n\n"
        await (self._exchange.content(event) if content else self._exchange.write(event))

    def _ending(self, last: Piece | None) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)."""
        if last is not None and last.stopped_by is not None:
            return "stop_sequence", last.stopped_by
        finish = (last.finish if last is not None else None) or "stop"
        return ("tool_use" if self._plan.tool and finish == "stop" else _STOP_REASONS[finish]), None

    def _block(self, text: str) -> dict[str, Any]:
        if not self._plan.tool:
            return {"type": "text", "text": text}
        return {"type": "tool_use", "id": f"toolu_{self._id}", "name": self._plan.tool[0], "input": _object(text)}

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, made: int) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._plan.model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(made),
        }

    def _usage(self, made: int) -> dict[str, int]:
        return {"input_tokens": len(self._plan.prompt), "output_tokens": made}


def _object(text: str) -> Any:
    """The arguments as an object; {} when they were cut off by the token limit."""
    try:
        return orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return {}
