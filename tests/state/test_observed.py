"""A gateway that only observes asks nobody, also for what it admitted just before its policy was made to enforce."""

from __future__ import annotations

import time
from pathlib import Path

from gateway import policy as policies
from gateway.edge.door import DRAINING
from gateway.flow.demand import Open
from gateway.flow.envelope import Envelope
from gateway.flow.observed import ObservedGrant
from gateway.observe.retest import Ledger
from gateway.sharing import Sharing
from tests.edge_path.site import POLICY
from tests.flow.helpers import box, demand


async def test_what_was_observed_is_asked_of_nobody_whatever_the_policy_says_by_now() -> None:
    text = POLICY.format(url="http://127.0.0.1:1", digest="0" * 64) + "state: {url: 'redis://127.0.0.1:1/0'}\n"
    enforcing = policies.parse(text, base=Path("/"))
    sharing = Sharing(lambda: enforcing, "me", lambda *_: None, lambda _: None, lambda: None, lambda *_: None, Ledger())  # type: ignore[arg-type, return-value]
    sharing.controller.set_backend("b", Open(Envelope((box(),)), "sha256:h"))
    sharing.controller.set_enforcement(observe=True)
    grant = sharing.controller.request(demand(), time.monotonic())
    assert isinstance(grant, ObservedGrant), "the state cannot be reached, and nobody needs it"
    sharing.controller.set_enforcement(observe=False)
    assert sharing.ask(grant) is None
    assert await sharing.confirm(grant, None) is grant
    grant.settle(time.monotonic(), 1, 1)
    sharing.controller.set_enforcement(observe=True)
    sharing.controller.drain(DRAINING)
    assert sharing.controller.request(demand(), time.monotonic()) is DRAINING
