"""What was measured, as boxes, and the questions a request asks of it.

Owns the arithmetic of one backend's qualified slices: which boxes contain a shape, what the KV reservation is in
whole blocks, why a shape is outside and what would fit. Promises: pure, no clock, nothing extrapolated between
boxes. Talks to nobody; `occupancy` and `controller` use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.errors import Axis, Reason, Refusal
from gateway.flow.shape import Shape


class Box(NamedTuple):
    """One qualified slice. Sizes in tokens per sequence, `concurrency` in sequences, bounds inclusive."""

    task: str
    features: frozenset[str]
    input_min: int
    input_max: int
    output_min: int
    output_max: int
    concurrency: int
    record: str
    e2e_p95_upper_s: float | None = None
    prefix_reuse: str = "none"


_Row = tuple[int, int, int, int, str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """The qualified slices of one backend, widest concurrency first: bit i of a mask is `boxes[i]`.

    `kv_tokens` is the budget of reserved tokens, None when no budget is known or wanted.
    """

    boxes: tuple[Box, ...]
    kv_tokens: int | None = None
    block_size: int = 16
    caps: tuple[int, ...] = field(init=False, repr=False, compare=False)
    budget_blocks: int | None = field(init=False, repr=False, compare=False)
    everything: int = field(init=False, repr=False, compare=False)
    _rows: tuple[_Row, ...] = field(init=False, repr=False, compare=False)
    _budget_binds: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        boxes = tuple(sorted(self.boxes, key=lambda box: (-box.concurrency, box.record, box.input_max, box.output_max)))
        budget = None if self.kv_tokens is None else self.kv_tokens // self.block_size
        most = max((b.concurrency * self._blocks_of(b.input_max + b.output_max) for b in boxes), default=0)
        derived = {
            "boxes": boxes,
            "caps": tuple(box.concurrency for box in boxes),
            "budget_blocks": budget,
            "everything": (1 << len(boxes)) - 1,
            "_rows": tuple((b.input_min, b.input_max, b.output_min, b.output_max, b.task, b.features) for b in boxes),
            "_budget_binds": budget is not None and most > budget,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def mask(self, shape: Shape) -> int:
        """Bitmask of the boxes that contain the shape; sequences are not looked at here."""
        task, features, size_in, size_out, _ = shape
        found, bit = 0, 1
        for in_min, in_max, out_min, out_max, box_task, box_features in self._rows:
            if in_min <= size_in <= in_max and out_min <= size_out <= out_max and task == box_task and features <= box_features:
                found |= bit
            bit <<= 1
        return found

    def cap(self, mask: int) -> int:
        """The largest concurrency of the boxes in `mask`, in sequences; 0 for none."""
        return self.caps[(mask & -mask).bit_length() - 1] if mask else 0

    def blocks(self, shape: Shape) -> int:
        """KV blocks reserved: sequences × input and output rounded up to whole blocks; 0 where no budget is known."""
        if self.budget_blocks is None:
            return 0
        return shape[4] * -(-(shape[2] + shape[3]) // self.block_size)

    def place(self, shape: Shape) -> int:
        """Mask of the boxes that could ever take the shape, alone on an idle engine; 0 means never."""
        mask = self.mask(shape)
        if not mask or shape.sequences > self.cap(mask):
            return 0
        if self.budget_blocks is not None and self.blocks(shape) > self.budget_blocks:
            return 0
        return mask

    def cost(self, shape: Shape, mask: int) -> float:
        """Reserved tokens × the concurrency the shape costs the others (widest C / its own widest C)."""
        return shape.tokens * self.factor(mask)

    def factor(self, mask: int) -> float:
        """The concurrency that shapes of this mask cost the others: widest C / their own widest C, at least 1."""
        return 1.0 if mask & 1 else self.caps[0] / self.cap(mask)

    def settled(
        self, task: str, features: frozenset[str], output_tokens: int | None, sequences: int, low: int, high: int
    ) -> bool:
        """Whether every input size in [low, high] gets the same decision, so that counting exactly changes nothing.

        `output_tokens` None: no limit was named, and the default would follow from the exact input.
        """
        anywhere = False
        for box in self.boxes:
            if box.task != task or not features <= box.features or sequences > box.concurrency:
                continue
            if output_tokens is not None and not box.output_min <= output_tokens <= box.output_max:
                continue
            if high < box.input_min or low > box.input_max:
                continue
            if low < box.input_min or high > box.input_max:
                return False
            anywhere = True
        if not anywhere or not self._budget_binds:
            return True
        return output_tokens is not None and self._blocks_of(low + output_tokens) == self._blocks_of(high + output_tokens)

    def default_output(self, task: str, features: frozenset[str], input_tokens: int, server_default: int | None) -> int | None:
        """The limit for a request that names none: the smaller of the server's default and the largest output of the
        highest-concurrency box that contains the input; None when no box does."""
        holding = [b for b in self.boxes if b.task == task and features <= b.features]
        holding = [b for b in holding if b.input_min <= input_tokens <= b.input_max]
        if not holding:
            return None
        widest = holding[0].concurrency
        largest = max(box.output_max for box in holding if box.concurrency == widest)
        if self.budget_blocks is not None:
            largest = min(largest, max(0, self.budget_blocks * self.block_size - input_tokens))
        return largest if server_default is None else min(server_default, largest)

    def limits(self) -> dict[str, int]:
        """The largest input, output (tokens per sequence) and concurrency (sequences) of any box."""
        return {
            "input": max((box.input_max for box in self.boxes), default=0),
            "output": max((box.output_max for box in self.boxes), default=0),
            "concurrency": max(self.caps, default=0),
        }

    def explain(self, shape: Shape) -> Refusal:
        """Why `place` is 0: the first axis (feature, input, output, sequences, then the KV budget) the shape left by."""
        left = [box for box in self.boxes if box.task == shape.task]
        if not left:
            tasks = ", ".join(sorted({box.task for box in self.boxes})) or "nothing"
            return _out(Axis.FEATURE, f"the task {shape.task} was not measured", f"tasks: {tasks}")
        holding = [box for box in left if shape.features <= box.features]
        if not holding:
            return _feature(shape, left)
        steps: tuple[tuple[Axis, int, Callable[[Box], int], Callable[[Box], int]], ...] = (
            (Axis.INPUT, shape.input_tokens, lambda box: box.input_min, lambda box: box.input_max),
            (Axis.OUTPUT, shape.output_tokens, lambda box: box.output_min, lambda box: box.output_max),
        )
        for axis, asked, low, high in steps:
            left, holding = holding, [box for box in holding if low(box) <= asked <= high(box)]
            if not holding:
                fits = _ranges((low(box), high(box)) for box in left)
                return _out(axis, f"{asked} {axis} tokens are outside what was measured", f"{axis} tokens: {fits}")
        most = max(box.concurrency for box in holding)
        if shape.sequences > most:
            text = f"{shape.sequences} sequences in one request are more than were measured at once"
            return _out(Axis.SEQUENCES, text, f"sequences: 1 to {most}")
        return self._over_budget(shape)

    def _over_budget(self, shape: Shape) -> Refusal:
        each = (self.budget_blocks or 0) // shape.sequences * self.block_size
        text = f"{shape.sequences} × {shape.input_tokens + shape.output_tokens} tokens exceed the KV budget of {self.kv_tokens}"
        if shape.output_tokens and each > shape.input_tokens:
            return _out(Axis.OUTPUT, text, f"output tokens: up to {each - shape.input_tokens}")
        return _out(Axis.INPUT, text, f"input tokens: up to {max(0, each - shape.output_tokens)}")

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


_REASONS = {
    Axis.FEATURE: (Reason.OUT_OF_SLICE_FEATURE, None),
    Axis.INPUT: (Reason.OUT_OF_SLICE_INPUT, "input"),
    Axis.OUTPUT: (Reason.OUT_OF_SLICE_OUTPUT, "max_tokens"),
    Axis.SEQUENCES: (Reason.OUT_OF_SLICE_SEQUENCES, "n"),
}


def _out(axis: Axis, what: str, fits: str) -> Refusal:
    reason, param = _REASONS[axis]
    return Refusal(reason, what, axis=axis, param=param, fits=fits)


def _feature(shape: Shape, boxes: list[Box]) -> Refusal:
    nearest = min(boxes, key=lambda box: len(shape.features - box.features))
    missing = ", ".join(sorted(shape.features - nearest.features))
    known = ", ".join(sorted({name for box in boxes for name in box.features})) or "none"
    return _out(Axis.FEATURE, f"not measured with {missing}", f"features: {known}")


def _ranges(spans: Iterable[tuple[int, int]]) -> str:
    """The union of inclusive integer spans in words: `1 to 2048 or 4096 to 8192`."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return " or ".join(f"{low} to {high}" for low, high in merged)
