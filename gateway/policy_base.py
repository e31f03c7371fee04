"""What every section of the policy is made of: the common types, and the error."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.errors import PlimsollError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}$")]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Positive = Annotated[int, Field(ge=1, lt=2**53)]


class PolicyError(PlimsollError):
    """The policy cannot be used; the message names the file, the field and what is wrong with it."""
