"""POST /v1/chat/completions.

Owns the chat shapes: the answer object, and the stream of a role chunk, content chunks, the usage chunk and [DONE]. Talks to
`Generation` for text and to the exchange for bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.simulator.errors import bad_request
from gateway.simulator.exchange import Exchange
from gateway.simulator.generation import Generation, Piece, TokenIds, output_limit, sequence_specs, stop_strings, usage
from gateway.simulator.logprobs import chat_logprobs
from gateway.simulator.schema import ChatRequest, Sampling, read
from gateway.simulator.script import chosen_tool, structured_text
from gateway.simulator.simulation import Simulation
from gateway.simulator.tokens import PromptError

DONE = b"data: [DONE]\n\n"


def encode_chat(
    simulation: Simulation,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    extra: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> TokenIds:
    """The prompt of a chat. Raises ApiError 400."""
    if any(not isinstance(message.get("role"), str) for message in messages):
        raise bad_request("Every message needs a role.", "messages")
    try:
        return simulation.model.encode(simulation.model.render(messages, tools, add_generation_prompt, extra))
    except PromptError as error:
        raise bad_request(str(error), "messages") from error


def check_stream_options(request: Sampling) -> None:
    """`stream_options` belongs to streams. Raises ApiError 400."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")


def data(content: Any) -> bytes:
    """One SSE data event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat that is ready to run, whichever API it came by. `tool` is (name, arguments) when one is called."""

    request: Sampling
    model: str
    prompt: TokenIds
    limit: int
    tool: tuple[str, str] | None
    script: str | None
    logprobs: bool
    stops: tuple[str, ...]

    def generation(self, simulation: Simulation, exchange: Exchange) -> Generation:
        """Its sequences."""
        specs = sequence_specs(simulation, exchange, self.request, self.prompt, self.limit, self.script, self.logprobs)
        return Generation(simulation, exchange, specs, self.stops, self.request.include_stop_str_in_output)


def plan_chat(
    simulation: Simulation,
    request: Sampling,
    prompt: TokenIds,
    asked: int | None,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    response_format: Mapping[str, Any] | None,
    logprobs: bool = False,
) -> ChatPlan:
    """Resolve limits, tools and constraints. Raises ApiError."""
    model = simulation.served(request.model)
    limit = output_limit(simulation.config.max_model_len, len(prompt), asked, None)
    tool = chosen_tool(tools, choice)
    script = tool[1] if tool else structured_text(response_format, request.structured_outputs)
    stops = () if script is not None else stop_strings(request.stop)
    return ChatPlan(request, model, prompt, limit, tool, script, logprobs, stops)


async def chat(simulation: Simulation, exchange: Exchange) -> None:
    """The route."""
    request = read(ChatRequest, exchange.body)
    simulation.served(request.model)
    check_stream_options(request)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    prompt = encode_chat(simulation, request.messages, request.tools, request.chat_template_kwargs, request.add_generation_prompt)
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = bool(request.logprobs)
    plan = plan_chat(simulation, request, prompt, asked, request.tools, request.tool_choice, request.response_format, logprobs)
    writer = _ChatWriter(simulation, exchange, request, plan)
    async with plan.generation(simulation, exchange) as generation:
        await (writer.stream(generation) if request.stream else writer.whole(generation))


class _ChatWriter:
    """Turns pieces into chat completion objects."""

    def __init__(self, simulation: Simulation, exchange: Exchange, request: ChatRequest, plan: ChatPlan) -> None:
        self._simulation = simulation
        self._exchange = exchange
        self._request = request
        self._plan = plan
        self._id = simulation.new_id("chatcmpl")
        self._started: set[int] = set()
        head = {"id": self._id, "object": "chat.completion.chunk", "created": simulation.created, "model": plan.model}
        self._head = head
        self._fast = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":%d,"delta":{"content":'
        self._fast_end = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'

    async def whole(self, generation: Generation) -> None:
        """The answer as one object."""
        texts: list[list[str]] = [[] for _ in range(self._request.n)]
        tokens: list[list[int]] = [[] for _ in range(self._request.n)]
        finishes = ["stop"] * self._request.n
        async for piece in generation:
            texts[piece.choice].append(piece.text)
            tokens[piece.choice].extend(piece.tokens)
            finishes[piece.choice] = piece.finish or "stop"
        choices = [self._choice(i, "".join(texts[i]), tokens[i], finishes[i]) for i in range(self._request.n)]
        body = {**self._head, "object": "chat.completion", "choices": choices, "system_fingerprint": self._simulation.fingerprint}
        await self._exchange.json(200, {**body, "usage": usage(len(self._plan.prompt), generation.completion_tokens)})

    async def stream(self, generation: Generation) -> None:
        """The answer as events."""
        exchange = self._exchange
        await exchange.start_stream()
        async for piece in generation:
            if piece.choice not in self._started:
                self._started.add(piece.choice)
                await exchange.write(self._chunk(piece.choice, {"role": "assistant", "content": ""}, None))
                if self._plan.tool:
                    await exchange.content(self._tool_start(piece.choice, self._plan.tool[0]))
            await self._send_piece(piece)
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            total = usage(len(self._plan.prompt), generation.completion_tokens)
            await exchange.write(
                data({**self._head, "choices": [], "usage": total, "system_fingerprint": self._simulation.fingerprint})
            )
        await exchange.write(DONE)
        await exchange.end_stream()

    async def _send_piece(self, piece: Piece) -> None:
        if piece.finish is None and not self._plan.tool and not self._request.logprobs:
            if piece.text:
                await self._exchange.content(self._fast % piece.choice + orjson.dumps(piece.text) + self._fast_end)
            return
        finish = "tool_calls" if self._plan.tool and piece.finish == "stop" else piece.finish
        delta: dict[str, Any] = {"content": piece.text}
        if self._plan.tool:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece.text}}]}
        await self._exchange.content(self._chunk(piece.choice, delta, finish, self._logprobs(piece.tokens)))

    def _logprobs(self, tokens: Sequence[int]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._simulation.model.pieces, tokens, self._request.top_logprobs or 0)

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None = None) -> bytes:
        return data({**self._head, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]})

    def _tool_start(self, index: int, name: str) -> bytes:
        call = {"index": 0, "id": f"call_{self._id}_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        return self._chunk(index, {"tool_calls": [call]}, None)

    def _choice(self, index: int, text: str, tokens: list[int], finish: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "tool_calls": []}
        if self._plan.tool:
            function = {"name": self._plan.tool[0], "arguments": text}
            message = {**message, "content": None, "tool_calls": [{"id": f"call_{self._id}_{index}", "type": "function"}]}
            message["tool_calls"][0]["function"] = function
            finish = "tool_calls" if finish == "stop" else finish
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish,
            "stop_reason": None,
        }
