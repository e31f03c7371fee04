"""What operators may send: checked bodies and queries of /admin. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, lt=2**53, strict=True)]
ShortName = Annotated[str, Field(min_length=1, max_length=128)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ExplainRequest(_Body):
    """Would a request of this shape be admitted now? Tokens are per sequence; without an output the default is explained."""

    model: ShortName
    input_tokens: Annotated[int, Field(ge=0, lt=2**53, strict=True)]
    output_tokens: Annotated[int, Field(ge=0, lt=2**53, strict=True)] | None = None
    sequences: Count = 1
    task: Literal["generate", "pool", "transcribe"] = "generate"
    features: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=16)] = []
    tenant: ShortName | None = None


class PlanRequest(_Body):
    """A plan that would cover this share of the demand outside the slices of a model."""

    model: ShortName
    share: Annotated[float, Field(gt=0, le=1)] = 0.95


class JournalQuery(_Body):
    """Which of the latest requests that were not served."""

    limit: Annotated[int, Field(ge=1, le=500)] = 50
    reason: Annotated[str, Field(max_length=64)] | None = None
    tenant: Annotated[str, Field(max_length=128)] | None = None
