"""Which sizes are sent, and in which company.

Owns: the draw of every request's input and output length, wave by wave.
Promises: pure; the same seed gives the same waves. Over one cycle of the mix the whole box is drawn from, its four corners are
met, opposite corners run beside each other, and a full wave of the largest size runs at once.
Talks to: `plan`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from gateway.qualify.plan import Cell, Mix, PlanError, SharedPrefix

Kind = Literal["uniform", "opposite", "largest", "warmup", "trace"]
MAX_TRACE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of one request. `prefix` names a prompt head that requests share, `prefix_tokens` long."""

    kind: Kind
    input_tokens: int
    output_tokens: int
    prefix: str | None = None
    prefix_tokens: int = 0


def waves(cell: Cell, concurrency: int, seed: int) -> Iterator[list[Size]]:
    """Waves of `concurrency` sizes without end. Every cycle holds each kind as often as the mix says, in a drawn order."""
    rng = Random(seed)  # noqa: S311 - a reproducible draw, not a secret
    step = 1 if concurrency == 1 else 2  # corners go in pairs where there is room for two
    corner = 0
    while True:
        for kind in _cycle(cell.mix, rng):
            yield [_size(cell, kind, place + corner, rng) for place in range(concurrency)]
            corner += step if kind == "opposite" else 0


def middle(cell: Cell) -> Size:
    """The size that warm-up repeats: the middle of the box."""
    inputs, outputs = cell.input_tokens, cell.output_tokens
    return _sharing(cell, "warmup", (inputs.min + inputs.max + 1) // 2, (outputs.min + outputs.max + 1) // 2)


def largest(cell: Cell) -> Size:
    """The far corner of the box."""
    return _sharing(cell, "warmup", cell.input_tokens.max, cell.output_tokens.max)


def trace(path: Path, cell: Cell) -> list[Size]:
    """The sizes of a trace file, in its order. Raises `PlanError` naming the line; every size lies in the cell's box."""
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise PlanError(f"{path}: more than {MAX_TRACE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read: {error}") from error
    sizes = [_traced(line, cell, f"{path.name} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not sizes:
        raise PlanError(f"{path}: the trace is empty")
    return sizes


def _cycle(mix: Mix, rng: Random) -> list[Kind]:
    kinds: list[Kind] = ["uniform"] * mix.uniform + ["opposite"] * mix.opposite + ["largest"] * mix.largest  # type: ignore[assignment]
    rng.shuffle(kinds)
    return kinds


def _size(cell: Cell, kind: Kind, place: int, rng: Random) -> Size:
    inputs, outputs = cell.input_tokens, cell.output_tokens
    if kind == "largest":
        return _sharing(cell, kind, inputs.max, outputs.max)
    if kind == "uniform":
        return _sharing(cell, kind, rng.randint(inputs.min, inputs.max), rng.randint(outputs.min, outputs.max))
    long_in, long_out = ((True, False), (False, True), (False, False), (True, True))[place % 4]
    return _sharing(cell, kind, inputs.max if long_in else inputs.min, outputs.max if long_out else outputs.min)


def _sharing(cell: Cell, kind: Kind, input_tokens: int, output_tokens: int) -> Size:
    """The size, with the prompt head that the cell's regime gives it."""
    if isinstance(cell.prefix_reuse, SharedPrefix):
        return Size(kind, input_tokens, output_tokens, "shared", cell.prefix_reuse.shared_prefix)
    return Size(kind, input_tokens, output_tokens)


def _traced(line: str, cell: Cell, where: str) -> Size:
    try:
        row = json.loads(line)
        size = Size(
            "trace", int(row["input_tokens"]), int(row.get("output_tokens", 0)),
            None if row.get("prefix") is None else str(row["prefix"]), int(row.get("prefix_tokens", 0)),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"{where}: needs input_tokens and output_tokens as whole numbers: {error}") from error
    inside = (
        cell.input_tokens.min <= size.input_tokens <= cell.input_tokens.max
        and cell.output_tokens.min <= size.output_tokens <= cell.output_tokens.max
    )
    if not inside or not 0 <= size.prefix_tokens < size.input_tokens:
        raise PlanError(f"{where}: {size.input_tokens} in, {size.output_tokens} out lies outside the cell's box or its prefix")
    return size
