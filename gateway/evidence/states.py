"""The words of a verdict: the eight fields, each a closed list, and the slice that a verdict lets through.

Owns: the types only. Promises: frozen values; every state is named, NOT_EVALUATED included.
Talks to: nothing; `verdict` decides.
"""

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from gateway.evidence.identity import FieldChange
from gateway.evidence.record import Trigger


class Provenance(StrEnum):
    COMPLETE = "COMPLETE"
    INCOMPLETE = "INCOMPLETE"
    MISMATCH = "MISMATCH"


class Measurement(StrEnum):
    COMPLETE = "COMPLETE"
    INCOMPLETE = "INCOMPLETE"
    WARMUP_UNKNOWN = "WARMUP_UNKNOWN"
    EXPIRED = "EXPIRED"


class SliceState(StrEnum):
    INSIDE = "INSIDE"
    OUTSIDE = "OUTSIDE"
    NOT_EVALUATED = "NOT_EVALUATED"


class Service(StrEnum):
    MET = "MET"
    MISSED = "MISSED"
    NOT_EVALUATED = "NOT_EVALUATED"


class Boundary(StrEnum):
    RECORDED = "RECORDED"
    MISSING = "MISSING"


class Retest(StrEnum):
    NOT_REQUIRED = "NOT_REQUIRED"
    REQUIRED = "REQUIRED"


class Decision(StrEnum):
    PASS = "PASS"
    CONDITIONAL = "CONDITIONAL"
    DEFER = "DEFER"


class ReasonClass(StrEnum):
    QUALIFIED = "QUALIFIED"
    PROVENANCE_INCOMPLETE = "PROVENANCE_INCOMPLETE"
    IDENTITY_CHANGED = "IDENTITY_CHANGED"
    IDENTITY_DECLARED = "IDENTITY_DECLARED"
    MEASUREMENT_INCOMPLETE = "MEASUREMENT_INCOMPLETE"
    WARMUP_UNKNOWN = "WARMUP_UNKNOWN"
    EVIDENCE_EXPIRED = "EVIDENCE_EXPIRED"
    OUT_OF_SLICE = "OUT_OF_SLICE"
    SLO_MISSED = "SLO_MISSED"
    BOUNDARY_NOTE_MISSING = "BOUNDARY_NOTE_MISSING"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The eight fields, and beside them what led to each: sentences, the fields that changed, the triggers they pull."""

    provenance_state: Provenance
    measurement_state: Measurement
    slice_state: SliceState
    service_state: Service
    security_boundary_state: Boundary
    retest_state: Retest
    final_decision: Decision
    reason_class: ReasonClass
    details: tuple[str, ...] = ()
    changes: tuple[FieldChange, ...] = ()
    triggers: tuple[Trigger, ...] = ()

    @property
    def fields(self) -> dict[str, str]:
        """The eight fields by name, in their order."""
        names = list(Verdict.__dataclass_fields__)[:8]
        return {name: str(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True)
class QualifiedSlice:
    """A slice that may open the gate. Sizes in tokens per sequence, bounds in milliseconds (None: not known).

    The bound is the confidence bound of the p95 when the target asks for a confidence, else its estimate; over all levels.
    """

    record: str
    task: str
    features: frozenset[str]
    prefix_reuse: str
    input_min: int
    input_max: int
    output_min: int
    output_max: int
    concurrency: int
    e2e_p95_ms: Decimal | None
    ttft_p95_ms: Decimal | None
    decision: Decision
