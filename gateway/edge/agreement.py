"""What the data path asks of those who share admission with it: a grant is provisional until they agree."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

from gateway.flow.grant import Grant


class Asked(Protocol):
    """A question that is under way."""

    @property
    def pending(self) -> asyncio.Future[Any]: ...


class Agreement(Protocol):
    """Agreeing with the other replicas. One question is one round trip."""

    def ask(self, grant: Grant) -> Asked | None:
        """Ask for a provisional grant, and wait for nothing. None where something has to be seen to first: `confirm` does."""

    def agreed(self, grant: Grant, asked: Any) -> bool:
        """Whether the answer, which has come, is yes; if not, `confirm` goes on from it."""

    def withdraw(self, grant: Grant, asked: Any) -> None:
        """The caller has left before the answer was taken up (`asked` None: before anything was asked)."""

    async def confirm(self, grant: Grant, asked: Any) -> Grant:
        """Have a provisional grant agreed, waiting for room where others hold it. Raises Refused."""


class Provisional(NamedTuple):
    """A grant that the others have not agreed to yet, and since when (monotonic) its request is at the gate."""

    grant: Grant
    asked: Asked | None
    entered: float
