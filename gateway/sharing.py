"""Whether this gateway is alone or one of several, decided once from the policy.

Owns the choice of the controller and, with a shared state, the parts that agree with the other replicas. Alone, nothing stands
between a decision and its dispatch. Talks to: `flow`, `replicas`, `state`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from gateway import policy as policies
from gateway.flow.controller import Trigger
from gateway.flow.grant import Grant
from gateway.flow.shared import SharedController
from gateway.forward.watch import Counted
from gateway.replicas import Replicas
from gateway.state.redis_store import RedisLeases

LEAVE_S = 0.5


class Sharing:
    """One of several replicas. `policy()` is the one in force; `count_of`: what a backend counts, by gateway."""

    def __init__(
        self,
        policy: Callable[[], policies.Policy],
        owner: str,
        on_trigger: Trigger,
        count_of: Callable[[str], Counted | None],
        backends: Callable[[], Iterable[str]],
    ) -> None:
        first, state = policy(), policy().state
        self.degraded = True  # until the first connection
        self._policy, self._backends = policy, backends
        self.controller = SharedController(first.queue, time.monotonic, on_trigger, first.breaker)
        self._replicas = Replicas(
            self.controller,
            share=state.degraded == "share",
            lease_s=state.lease_s,
            longest_s=lambda: policy().timeouts.execution_s,
            count_of=count_of,
            on_degraded=self._set_degraded,
        )
        self._store = self._replicas.store = RedisLeases(
            state.url,
            owner,
            namespace=state.namespace,
            lease_s=state.lease_s,
            longest_s=first.timeouts.execution_s,
            on_wake=self._replicas.woken,
            on_state=self._replicas.state,
        )

    def _set_degraded(self, degraded: bool) -> None:
        self.degraded = degraded

    async def confirm(self, grant: Grant) -> Grant:
        """Have a grant agreed with the others. Raises Refused. A gateway that only observes holds nothing back."""
        return grant if self._policy().enforcement == "observe" else await self._replicas.confirm(grant)

    async def run(self) -> None:
        """Stay connected and alive until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._store.run())
            group.create_task(self._replicas.run(self._backends))

    async def leave(self) -> None:
        """Hand every place over to the others, as far as that can be done soon."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._replicas.leave()
        except TimeoutError:
            return
