"""POST /v1/completions.

Owns the completion shapes. Several prompts and `n` choices give one sequence each, numbered prompt by prompt. Talks to
`Generation` for text and to the exchange for bytes.
"""

from collections.abc import Sequence
from typing import Any

from gateway.simulator.chat import DONE, check_stream_options, data
from gateway.simulator.errors import bad_request
from gateway.simulator.exchange import Exchange
from gateway.simulator.generation import Generation, Piece, TokenIds, output_limit, sequence_specs, stop_strings, usage
from gateway.simulator.logprobs import completion_logprobs
from gateway.simulator.schema import MAX_PROMPTS, CompletionRequest, Prompt, read
from gateway.simulator.script import structured_text
from gateway.simulator.simulation import Simulation
from gateway.simulator.tokens import PromptError, TokenModel

_DEFAULT_MAX_TOKENS = 16


def prompts_of(model: TokenModel, prompt: Prompt) -> list[TokenIds]:
    """Every prompt of a request as ids: a text, ids, texts, or lists of ids. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [model.encode(prompt)]
    if not prompt:
        raise bad_request("prompt: an empty list holds no prompt.", "prompt")
    if isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}.", "prompt")
    found = [model.encode(item) if isinstance(item, str) else tuple(item) for item in prompt]
    try:
        for ids in found:
            model.check(ids)
    except PromptError as error:
        raise bad_request(str(error), "prompt") from error
    return found


async def completions(simulation: Simulation, exchange: Exchange) -> None:
    """The route."""
    request = read(CompletionRequest, exchange.body)
    simulation.served(request.model)
    check_stream_options(request)
    prompts = prompts_of(simulation.model, request.prompt)
    script = structured_text(request.response_format, request.structured_outputs)
    specs = []
    for prompt in prompts:
        if not prompt:
            raise bad_request("The prompt must not be empty.", "prompt")
        limit = output_limit(simulation.config.max_model_len, len(prompt), request.max_tokens, _DEFAULT_MAX_TOKENS)
        specs += sequence_specs(simulation, exchange, request, prompt, limit, script, request.logprobs is not None)
    stops = () if script is not None else stop_strings(request.stop)
    writer = _CompletionWriter(simulation, exchange, request, prompts)
    async with Generation(simulation, exchange, specs, stops, request.include_stop_str_in_output) as generation:
        await (writer.stream(generation) if request.stream else writer.whole(generation, len(specs)))


class _CompletionWriter:
    """Turns pieces into completion objects."""

    def __init__(
        self, simulation: Simulation, exchange: Exchange, request: CompletionRequest, prompts: Sequence[TokenIds]
    ) -> None:
        self._model = simulation.model
        self._fingerprint = simulation.fingerprint
        self._exchange = exchange
        self._request = request
        self._prompts = prompts
        self._prompt_tokens = sum(map(len, prompts))
        self._offsets: dict[int, int] = {}
        self._head = {
            "id": simulation.new_id("cmpl"),
            "object": "text_completion",
            "created": simulation.created,
            "model": simulation.served(request.model),
        }

    def _echo(self, index: int) -> str:
        return self._model.decode(self._prompts[index // self._request.n]) if self._request.echo else ""

    async def whole(self, generation: Generation, count: int) -> None:
        """The answer as one object."""
        texts = [[self._echo(index)] for index in range(count)]
        tokens: list[list[int]] = [[] for _ in range(count)]
        finishes = ["stop"] * count
        async for piece in generation:
            texts[piece.choice].append(piece.text)
            tokens[piece.choice].extend(piece.tokens)
            finishes[piece.choice] = piece.finish or "stop"
        choices = [self._choice(i, "".join(texts[i]), tokens[i], finishes[i]) for i in range(count)]
        total = usage(self._prompt_tokens, generation.completion_tokens)
        await self._exchange.json(
            200, {**self._head, "choices": choices, "system_fingerprint": self._fingerprint, "usage": total}
        )

    async def stream(self, generation: Generation) -> None:
        """The answer as events."""
        await self._exchange.start_stream()
        async for piece in generation:
            await self._send_piece(piece)
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            total = usage(self._prompt_tokens, generation.completion_tokens)
            await self._exchange.write(
                data({**self._head, "choices": [], "usage": total, "system_fingerprint": self._fingerprint})
            )
        await self._exchange.write(DONE)
        await self._exchange.end_stream()

    async def _send_piece(self, piece: Piece) -> None:
        text = piece.text if piece.choice in self._offsets else self._echo(piece.choice) + piece.text
        if not text and piece.finish is None:
            return
        choice = self._choice(piece.choice, text, piece.tokens, piece.finish)
        await self._exchange.content(data({**self._head, "choices": [choice]}))

    def _choice(self, index: int, text: str, tokens: list[int], finish: str | None) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = completion_logprobs(self._model.pieces, tokens, self._request.logprobs, offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
