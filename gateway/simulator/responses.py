"""POST /v1/responses.

Owns the Responses shapes: `event:` lines, numbered, and no [DONE]. Input items become chat messages. Talks to the chat plan for
everything else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.simulator.chat import ChatPlan, encode_chat, plan_chat
from gateway.simulator.exchange import Exchange
from gateway.simulator.generation import Generation
from gateway.simulator.schema import ResponsesRequest, read
from gateway.simulator.simulation import Simulation

Item = dict[str, Any]


async def responses(simulation: Simulation, exchange: Exchange) -> None:
    """The route."""
    request = read(ResponsesRequest, exchange.body)
    simulation.served(request.model)
    tools = [_chat_tool(tool) for tool in request.tools or ()] or None
    prompt = encode_chat(simulation, _messages(request), tools)
    asked = request.max_output_tokens
    response_format = _response_format(request.text)
    plan = plan_chat(simulation, request, prompt, asked, tools, request.tool_choice, response_format)
    writer = _ResponseWriter(simulation, exchange, request, plan)
    async with plan.generation(simulation, exchange) as generation:
        await (writer.stream(generation) if request.stream else writer.whole(generation))


def _messages(request: ResponsesRequest) -> list[Item]:
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return [*system, *(_message(item) for item in items)]


def _message(item: Mapping[str, Any]) -> Item:
    match item.get("type"):
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        case "function_call_output":
            return {"role": "tool", "content": str(item.get("output", ""))}
    return {"role": item.get("role"), "content": item.get("content")}


def _chat_tool(tool: Mapping[str, Any]) -> Item:
    function = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": function}


def _response_format(text: Mapping[str, Any] | None) -> Item | None:
    kind = (text or {}).get("format")
    return {"type": kind.get("type"), "json_schema": kind} if isinstance(kind, Mapping) else None


class _ResponseWriter:
    """Turns pieces into a response object and its events."""

    def __init__(self, simulation: Simulation, exchange: Exchange, request: ResponsesRequest, plan: ChatPlan) -> None:
        self._exchange = exchange
        self._plan = plan
        self._request = request
        self._id = simulation.new_id("resp")
        self._created = simulation.created
        self._number = 0

    async def whole(self, generation: Generation) -> None:
        """The answer as one object."""
        parts, finish = [], "stop"
        async for piece in generation:
            parts.append(piece.text)
            finish = piece.finish or finish
        await self._exchange.json(200, self._response([self._item("".join(parts))], finish, generation.completion_tokens))

    async def stream(self, generation: Generation) -> None:
        """The answer as events."""
        await self._exchange.start_stream()
        opening = {**self._response([], "stop", 0), "status": "in_progress", "usage": None}
        await self._event("response.created", {"response": opening})
        await self._event("response.in_progress", {"response": opening})
        await self._event("response.output_item.added", {"output_index": 0, "item": self._item(None)})
        if not self._plan.tool:
            await self._event("response.content_part.added", {**self._place(), "part": _part("")})
        parts, finish = [], "stop"
        kind = "response.function_call_arguments" if self._plan.tool else "response.output_text"
        async for piece in generation:
            finish = piece.finish or finish
            if piece.text:
                parts.append(piece.text)
                extra: Item = {} if self._plan.tool else {"logprobs": []}
                await self._event(f"{kind}.delta", {**self._place(), "delta": piece.text, **extra}, content=True)
        await self._close(kind, "".join(parts), finish, generation.completion_tokens)

    async def _close(self, kind: str, text: str, finish: str, made: int) -> None:
        if self._plan.tool:
            await self._event(f"{kind}.done", {**self._place(), "name": self._plan.tool[0], "arguments": text})
        else:
            await self._event(f"{kind}.done", {**self._place(), "text": text, "logprobs": []})
            await self._event("response.content_part.done", {**self._place(), "part": _part(text)})
        item = self._item(text)
        await self._event("response.output_item.done", {"output_index": 0, "item": item})
        last = "response.completed" if finish == "stop" else "response.incomplete"
        await self._event(last, {"response": self._response([item], finish, made)})
        await self._exchange.end_stream()

    async def _event(self, name: str, fields: Item, content: bool = False) -> None:
        raw = orjson.dumps({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        event = b"event: " + name.encode("ascii") + b"\ndata: " + raw + b"\n\n"
        await (self._exchange.content(event) if content else self._exchange.write(event))

    def _place(self) -> Item:
        place = {"item_id": f"item_{self._id}", "output_index": 0}
        return place if self._plan.tool else {**place, "content_index": 0}

    def _item(self, text: str | None) -> Item:
        """The output item; None: it has only begun."""
        status = "in_progress" if text is None else "completed"
        if self._plan.tool:
            call = {"call_id": f"call_{self._id}", "name": self._plan.tool[0], "arguments": text or ""}
            return {"type": "function_call", "id": f"item_{self._id}", "status": status, **call}
        content: Sequence[Item] = [] if text is None else [_part(text)]
        return {"type": "message", "id": f"item_{self._id}", "role": "assistant", "status": status, "content": content}

    def _response(self, output: list[Item], finish: str, made: int) -> Item:
        prompt = len(self._plan.prompt)
        cut = finish == "length"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": self._request.instructions,
            "max_output_tokens": self._plan.limit,
            "model": self._plan.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": self._request.tool_choice or "auto",
            "tools": self._request.tools or [],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + made,
            },
        }


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
