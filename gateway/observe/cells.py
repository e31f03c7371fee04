"""What `Metrics.finish` adds to: one cell per (model, class), one account per tenant.

Owns the fields and how the end of a stream is added. Promises plain attribute additions, and no hashing of enums for a
request that was simply served. Talks to nobody.
"""

from __future__ import annotations

from gateway.errors import Outcome, Reason
from gateway.observe.exchange import Exchange
from gateway.observe.histogram import Histogram


class Cell:
    """All that one (model, class) touches, found with one lookup. A plain success costs no enum hashing: `served`."""

    __slots__ = ("ends", "labels", "request", "served", "served_wait", "tpot", "ttft")

    def __init__(self, labels: tuple[str, str], request: Histogram, wait: Histogram, ttft: Histogram, tpot: Histogram) -> None:
        self.labels = labels
        self.served = 0
        self.ends: dict[tuple[Outcome, Reason], int] = {}
        self.request = request
        self.served_wait = wait
        self.ttft = ttft
        self.tpot = tpot


class Account:
    """What one tenant's requests came to."""

    __slots__ = ("input", "others", "output", "reserved", "served", "wasted")

    def __init__(self) -> None:
        self.served = 0
        self.others: dict[Outcome, int] = {outcome: 0 for outcome in Outcome if outcome is not Outcome.SERVED}
        self.input = self.output = self.reserved = self.wasted = 0


def observe_stream(cell: Cell, exchange: Exchange, ttft_s: float) -> None:
    """TTFT, and TPOT = time after the first token / (output tokens of one sequence - 1), where both ends are known."""
    cell.ttft.observe(ttft_s)
    output, shape, first, last = exchange.output_tokens, exchange.shape, exchange.first_at, exchange.last_at
    if output is not None and shape is not None and first is not None and last is not None and output > shape.sequences:
        cell.tpot.observe((last - first) / (output / shape.sequences - 1))


def add_tokens(account: Account, exchange: Exchange) -> None:
    """Reserved: what the shape held. Wasted: what the engine read and wrote for an answer that did not arrive whole."""
    used_input, used_output = exchange.input_tokens or 0, exchange.output_tokens or 0
    account.input += used_input
    account.output += used_output
    if exchange.shape is not None:
        account.reserved += exchange.shape.tokens
    if exchange.outcome is not Outcome.SERVED:
        account.wasted += used_input + used_output
