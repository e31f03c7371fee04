"""From a request's prompts to a stream of text pieces.

Owns how sampling fields become sequences (limits, stop lengths, seeds, scripts) and how tokens become pieces of text. Promises:
the same request under the same seed gives the same answer; every sequence is gone from the engine when the block ends. Talks
to the driver through the exchange.
"""

import random
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from gateway.simulator.driver import Collector, Delta
from gateway.simulator.errors import bad_request, too_long
from gateway.simulator.exchange import Exchange
from gateway.simulator.faults import FaultKind
from gateway.simulator.schema import Sampling
from gateway.simulator.sequence import SequenceSpec
from gateway.simulator.simulation import Simulation
from gateway.simulator.tokens import TextAssembler

_SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF
TokenIds = tuple[int, ...]


class Piece(NamedTuple):
    """New text of one choice, its tokens, and why it ended (None: it goes on)."""

    choice: int
    text: str
    tokens: list[int]
    finish: str | None
    stopped_by: str | None


def output_limit(max_model_len: int, prompt_tokens: int, asked: int | None, default: int | None) -> int:
    """Tokens to make at most: what was asked or the default, clamped to the room left. Raises ApiError 400."""
    if asked is not None and asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if asked is not None and asked > max_model_len:
        raise bad_request(
            f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens.",
            "max_tokens",
        )
    room = max_model_len - prompt_tokens
    if room < 1:
        raise too_long(max_model_len, prompt_tokens)
    wanted = asked if asked is not None else default
    return room if wanted is None else min(wanted, room)


def sequence_specs(
    simulation: Simulation,
    exchange: Exchange,
    request: Sampling,
    prompt: TokenIds,
    limit: int,
    script: str | None,
    logprobs: bool,
) -> list[SequenceSpec]:
    """The `n` sequences of one prompt."""
    config = simulation.config
    if request.min_tokens > limit:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={limit}, got {request.min_tokens}.", "min_tokens")
    base = hash((config.seed, request.seed or 0, *prompt))
    words = simulation.model.encode(script) if script is not None else ()
    fault = exchange.fault
    factor = fault.factor if fault is not None and fault.kind is FaultKind.SLOW_PREFILL else 1.0
    specs = []
    for choice in range(request.n):
        seed = hash((base, choice)) & _SEED_BITS
        specs.append(
            SequenceSpec(
                prompt=prompt,
                max_tokens=limit,
                eos_after=len(words) if words else _eos_after(request, seed, config.mean_output_tokens),
                script=words,
                seed=seed,
                logprobs=logprobs,
                salt=_salt(request.cache_salt),
                prefill_factor=factor,
            )
        )
    return specs


def _eos_after(request: Sampling, seed: int, mean: int) -> int | None:
    """The length at which the model would stop: geometric, from the request's own seed."""
    if request.ignore_eos:
        return None
    drawn = random.Random(~seed & _SEED_BITS).expovariate(1.0 / mean)  # noqa: S311 - reproducible, not secret
    return max(1, request.min_tokens, int(drawn) + 1)


def _salt(text: str | None) -> int:
    return hash(tuple(text.encode("utf-8", "replace"))) if text else 0


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Non-empty stop strings of a request."""
    given = [stop] if isinstance(stop, str) else stop or []
    return tuple(text for text in given if text)


class Generation:
    """The sequences of one request in the engine. Use as `async with`, iterate inside."""

    def __init__(
        self,
        simulation: Simulation,
        exchange: Exchange,
        specs: Sequence[SequenceSpec],
        stops: tuple[str, ...] = (),
        keep_stop: bool = False,
    ) -> None:
        self.completion_tokens = 0
        self._driver = simulation.driver
        self._exchange = exchange
        self._specs = specs
        self._assemblers = [TextAssembler(simulation.model.pieces, stops, keep_stop) for _ in specs]
        self._live = set(range(len(specs)))
        self._held: dict[int, list[int]] = {}
        self._collector: Collector | None = None

    async def __aenter__(self) -> Self:
        """Queue the sequences."""
        self._collector = self._driver.submit(self._specs)
        self._exchange.watch(self._collector)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Abort what still runs."""
        if self._collector is not None:
            self._driver.close(self._collector)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come, until each has ended."""
        collector = self._collector
        if collector is None:
            raise RuntimeError("use the generation as a context manager")
        while self._live:
            for delta in await self._exchange.news(collector):
                if delta.choice not in self._live:
                    continue
                self.completion_tokens += len(delta.tokens)
                tokens = self._unmuted(delta)
                if tokens is not None:
                    yield self._piece(collector, delta, tokens)

    async def wait(self) -> None:
        """Run to the end and drop the text (pooling)."""
        async for _ in self:
            pass

    def _unmuted(self, delta: Delta) -> list[int] | None:
        """The tokens to show now; None while a silent tool parser holds them back."""
        fault = self._exchange.fault
        if fault is None or fault.kind is not FaultKind.SILENT_TOOLS:
            return delta.tokens
        held = self._held.setdefault(delta.choice, [])
        held.extend(delta.tokens)
        if delta.finish is None and (fault.after is None or len(held) < fault.after):
            return None
        self._held[delta.choice] = []
        return held

    def _piece(self, collector: Collector, delta: Delta, tokens: list[int]) -> Piece:
        assembler = self._assemblers[delta.choice]
        text = assembler.push(tokens, delta.finish is not None)
        finish = delta.finish
        if assembler.stopped_by is not None:
            finish = "stop"
            self._driver.abort(collector.seq_ids[delta.choice], stopped=True)
        if finish is not None:
            self._live.discard(delta.choice)
        return Piece(delta.choice, text, tokens, finish, assembler.stopped_by)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
