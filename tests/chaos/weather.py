"""What goes wrong meanwhile: faults of backends and of their processes, and reloads of the policy.

Owns the list of troubles. Promises: one of the two backends is well at any time, and both are in the end, so that a
gateway that stops serving has only itself to blame.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.chaos.harbour import SimulatorProcess
from tests.support.attested import AttestedGateway

FAULTS = (
    "reset;after=2;times=4", "reset;times=3", "fin;after=1;times=4", "fin;times=3", "stall;after=1;times=4;seconds=3",
    "stall;times=4;seconds=3", "error500;times=6", "busy503;times=6", "stream_error;after=1;times=4",
    "slow_prefill;times=6;factor=50", "freeze;seconds=1.2", "refuse;seconds=0.4", "restart;seconds=0.2",
)  # fmt: skip


class Weather:
    """Troubles, one after the other, until it is over."""

    def __init__(self, gateway: AttestedGateway, backends: dict[str, SimulatorProcess], luck: random.Random) -> None:
        self.gateway, self.backends, self.luck = gateway, backends, luck
        self.seen: Counter[str] = Counter()
        self.over = asyncio.Event()
        self._reloads = 0

    async def blow(self) -> None:
        """Go on until `over`. All troubles come once before one comes again."""
        while not self.over.is_set():
            troubles: list[Callable[[], Awaitable[None]]] = [self.dies, self.stands_still, self.drifts, self.reload, self.typo]
            troubles += [self.leaves_the_policy, *(self._fault(text) for text in FAULTS)]
            self.luck.shuffle(troubles)
            for trouble in troubles:
                if self.over.is_set():
                    break
                await trouble()
                await asyncio.sleep(self.luck.uniform(0, 0.15))

    async def clear(self) -> None:
        """Fair weather: every backend runs, is in the policy and open."""
        for backend in self.backends.values():
            await backend.well()
        self.gateway.urls = {name: backend.url for name, backend in self.backends.items()}
        self.gateway.models = {"tiny": list(self.backends)}
        await self.gateway.reload()
        for name in self.backends:
            await self.gateway.opened(name)

    def _some(self) -> tuple[str, SimulatorProcess]:
        return self.luck.choice(list(self.backends.items()))

    def _fault(self, text: str) -> Callable[[], Awaitable[None]]:
        async def fault() -> None:
            self.seen[text.partition(";")[0]] += 1
            _, backend = self._some()
            await backend.fault(text)
            await asyncio.sleep(self.luck.uniform(0.1, 0.5))
            await backend.well()

        return fault

    async def dies(self) -> None:
        """A backend is killed and comes back."""
        self.seen["dies"] += 1
        _, backend = self._some()
        await backend.end()
        await backend.start()

    async def stands_still(self) -> None:
        """The whole process of a backend is stopped for a while."""
        self.seen["stands_still"] += 1
        _, backend = self._some()
        backend.signal(signal.SIGSTOP)
        await asyncio.sleep(self.luck.uniform(0.3, 1.5))
        backend.signal(signal.SIGCONT)

    async def drifts(self) -> None:
        """A backend comes back as another than was measured, and is put right."""
        self.seen["drifts"] += 1
        _, backend = self._some()
        await backend.fault("restart;seconds=0;max_num_seqs=7")
        await asyncio.sleep(0.4)
        await backend.fault("restart;seconds=0;max_num_seqs=16")

    async def reload(self) -> None:
        """The policy changes in what the path reads at each request."""
        self.seen["reload"] += 1
        self._reloads += 1
        waiting = 200 + self._reloads % 7
        await self.gateway.reload(queue={"max_requests": waiting}, retries={"budget_min_per_s": self._reloads % 3})

    async def typo(self) -> None:
        """A policy that cannot be read is put in force, as far as that goes."""
        self.seen["typo"] += 1
        (self.gateway.folder / "policy.yaml").write_text("backends: [")
        self.gateway.signal(signal.SIGHUP)
        await asyncio.sleep(0.1)
        self.gateway.write(self.gateway.policy())

    async def leaves_the_policy(self) -> None:
        """A backend with requests in flight is taken out of the policy, and put back."""
        self.seen["leaves_the_policy"] += 1
        name, _ = self._some()
        kept = [other for other in self.backends if other != name]
        urls = dict(self.gateway.urls)
        self.gateway.urls, self.gateway.models = {each: urls[each] for each in kept}, {"tiny": kept}
        await self.gateway.reload()
        await asyncio.sleep(0.1)
        self.gateway.urls, self.gateway.models = urls, {"tiny": list(self.backends)}
        await self.gateway.reload()
