"""A request as the envelope sees it: task, features, sizes, sequences. Everything else about it is irrelevant here."""

from __future__ import annotations

from typing import Literal, NamedTuple

Task = Literal["generate", "pool", "transcribe"]
NO_FEATURES: frozenset[str] = frozenset()


class Shape(NamedTuple):
    """What one request asks of an engine.

    `input_tokens`: per sequence, exact or an upper bound. `output_tokens`: per sequence, the larger of the
    caps named (0 for pool and transcribe tasks that generate nothing). `sequences`: prompts × n, at least 1.
    `features`: what else changes cost (logprobs, prompt_logprobs, structured_output, penalties, lora, media).
    """

    task: Task
    features: frozenset[str]
    input_tokens: int
    output_tokens: int
    sequences: int

    @property
    def tokens(self) -> int:
        """Tokens reserved: sequences × (input + output)."""
        return self.sequences * (self.input_tokens + self.output_tokens)
