"""What the product asks of a backend: a shape, limits, and how sure the evidence must be.

Owns: the target as the verdict sees it. Promises: frozen, exact decimals, units in the names.
Talks to: `policy.Target`, from which it is made.
"""

from dataclasses import dataclass
from decimal import Decimal
from typing import Self

from gateway import policy


@dataclass(frozen=True, slots=True)
class TargetSlice:
    """The shape that is needed: tokens in, tokens out, sequences at once."""

    input: int
    output: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The service level objective, from dispatch. Milliseconds, tokens per second, counts. None: not judged."""

    e2e_ms_p95: Decimal | None = None
    ttft_ms_p95: Decimal | None = None
    tpot_ms_p95: Decimal | None = None
    output_tokens_per_s_min: Decimal | None = None
    errors_max: int = 0
    timeouts_max: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """`confidence` asks that latency holds at an upper bound and throughput at a lower one of at least that confidence."""

    slice: TargetSlice | None = None
    limits: Limits = Limits()
    confidence: Decimal | None = Decimal("0.95")
    admit_conditional: bool = False
    prefix_reuse: tuple[str, ...] = ()
    task: str = "generate"
    features: frozenset[str] = frozenset()

    @classmethod
    def from_policy(cls, target: policy.Target) -> Self:
        """The target that a policy file states for a model."""
        slo, wanted = target.slo, target.slice
        return cls(
            slice=TargetSlice(wanted.input, wanted.output, wanted.concurrency) if wanted is not None else None,
            limits=Limits(
                e2e_ms_p95=_exact(slo.e2e_ms_p95),
                ttft_ms_p95=_exact(slo.ttft_ms_p95),
                tpot_ms_p95=_exact(slo.tpot_ms_p95),
                output_tokens_per_s_min=_exact(slo.output_tokens_per_s_min),
                errors_max=slo.errors_max,
                timeouts_max=slo.timeouts_max,
            ),
            confidence=_exact(target.confidence),
            admit_conditional=target.conditional == "admit",
            prefix_reuse=target.prefix_reuse,
        )


def _exact(value: float | None) -> Decimal | None:
    """The decimal that was written in the policy, whole numbers without a fraction."""
    if value is None:
        return None
    return Decimal(int(value)) if value == int(value) else Decimal(str(value))
