"""The data path: what happens to a proxied request, top to bottom in `DataPath.serve`.

Owns: the requests under way, draining, and the 50 ms tick behind every deadline. Promises: a grant is settled exactly
once, whatever goes wrong; a client that leaves ends its request wherever that is; at most one generation is started for one
request. Talks to: `intake` (bytes to demand), the controller (demand to grant), `dispatch` (grant to answer), metrics, journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from gateway.edge.agreement import Agreement, Provisional
from gateway.edge.dispatch import Backends, Dispatch, unreachable
from gateway.edge.door import DRAINING, Door, Journal
from gateway.edge.incoming import Incoming
from gateway.edge.intake import Intake
from gateway.edge.job import Job
from gateway.edge.protocol import PlimsollProtocol
from gateway.edge.reader import Bounds
from gateway.edge.retry_budget import RetryBudget
from gateway.edge.rules import PathRules, TenantPath
from gateway.errors import Outcome, Reason, Refusal, Refused
from gateway.flow.breaker import Result
from gateway.flow.controller import Controller
from gateway.flow.demand import Demand
from gateway.flow.grant import Grant
from gateway.flow.waiting import Waiting
from gateway.forward.relay import End
from gateway.forward.upstream import ConnectFailed, Headers, Upstream, UpstreamFailure
from gateway.observe.metrics import Metrics

TICK_S = 0.05
_SWEEP_EVERY = 5  # ticks between two looks at idle connections
# A held answer that the backend broke is not charged to the caller, who saw nothing of it. One that the caller left is.
_NOTHING_FOR_THE_CALLER = frozenset({
    Reason.UPSTREAM_RESET, Reason.UPSTREAM_ERROR, Reason.STALL_TIMEOUT, Reason.DRAINING, Reason.INTERNAL_ERROR,
})  # fmt: skip
_NOBODY = TenantPath("", 1.0, "", 0, None, lambda _: None, "")


class DataPath(Door):
    """One instance a process; the `Front` of every client connection."""

    def __init__(
        self,
        rules: PathRules,
        bounds: Bounds,
        *,
        controller: Controller,
        intake: Intake,
        backends: Backends,
        metrics: Metrics,
        journal: Journal,
        retries: RetryBudget,
        upstreams: Callable[[], Iterable[Upstream]],
        agreement: Agreement | None = None,
    ) -> None:
        super().__init__(rules, bounds, intake, metrics, journal)
        self._controller = controller
        self._backends = backends
        self._retries = retries
        self._upstreams = upstreams
        self._agreement = agreement  # with the other replicas, where there are any
        self._dispatch = Dispatch(backends, metrics, self._attempt_id)
        self._ticks = 0
        self._quiet = asyncio.Event()  # draining, and nothing runs any more

    # The request path

    def serve(self, client: PlimsollProtocol, incoming: Incoming) -> None:
        """One proxied request: read, describe, admit, send. The key and the route were checked at its head.

        Whatever can be had at once is; only what has to wait for something becomes a task. `ended` hears of the answer.
        """
        job = self._open(client, incoming)
        under_way = False
        try:
            parsed = self._intake.read_now(job)  # parse; the model is one this tenant may use
            demand = self._intake.demand_now(job, parsed) if parsed is not None else None  # the shape, where a bound tells
            grant = self._admit_now(job, demand) if demand is not None else None  # a slice holds it beside all in flight
            if job.provisional is not None and job.provisional.asked is not None:  # the others are asked
                job.provisional.asked.pending.add_done_callback(partial(self._answered, job))
            elif grant is None or not self._dispatch.send_now(job, grant):  # an idle connection; the relay answers
                job.task = client.loop.create_task(self._serve_waiting(job))
            under_way = True
        except Refused as refused:
            self._turn_down(job, refused.refusal)
        finally:
            if not under_way:
                self._close(job)

    def _answered(self, job: Job, _: asyncio.Future[Any]) -> None:
        """The other replicas have answered; where it is yes, everything else can be had at once."""
        provisional, agreement = job.provisional, self._agreement
        if provisional is None or agreement is None:
            return  # the client has left, which was seen to
        under_way, sent = False, False
        try:
            if agreement.agreed(provisional.grant, provisional.asked):
                job.provisional, now = None, time.monotonic()
                job.exchange.queue_s += now - provisional.entered
                sent = self._dispatch.send_now(job, self._admitted(job, provisional.grant, now))
            if not sent:
                job.task = job.client.loop.create_task(self._serve_waiting(job))
            under_way = True
        except Refused as refused:
            self._turn_down(job, refused.refusal)
        finally:
            if not under_way:
                self._close(job)

    async def _serve_waiting(self, job: Job, failure: UpstreamFailure | None = None) -> None:
        """The same steps, from the first that has to wait on: for a thread, a count, a place, a connection.

        `failure`: the backend cannot have had the first try; go on with the second.
        """
        under_way, job.started = False, True
        try:
            unsent = failure if failure is not None else await self._first_try(job)
            if unsent is not None:
                await self._second_try(job, unsent)
            under_way = True
        except Refused as refused:
            self._turn_down(job, refused.refusal)
        except asyncio.CancelledError:
            self._departed(job)
        finally:
            job.task = None
            if not under_way:
                self._close(job)

    async def _first_try(self, job: Job) -> ConnectFailed | None:
        parsed = job.parsed or await self._intake.read(job)
        demand = job.demand or await self._intake.demand(job, parsed)
        return await self._dispatch.send(job, job.grant or await self._admit(job, demand))

    async def _second_try(self, job: Job, failure: UpstreamFailure | ConnectFailed) -> None:
        """Once more, where the budget allows, on another backend if there is one. Raises Refused."""
        grant = await self._admit(job, self._again(job, failure))
        job.retried = True
        unsent = await self._dispatch.send(job, grant)
        if unsent is not None:
            self._metrics.retry(grant.backend, "failed")
            raise unreachable(unsent)

    def ended(self, job: Job, end: End) -> None:
        """The exchange with the backend is over. Called from its socket's events, or by the tick."""
        grant, under_way = job.grant, False
        assert grant is not None
        try:
            unsent = end if isinstance(end, UpstreamFailure) and end.before_written else None
            if unsent is not None:
                grant.report(Result.FAILURE, time.monotonic())
            if job.retried:
                self._metrics.retry(grant.backend, "served" if unsent is None else "failed")
            if unsent is None:
                self._dispatch.conclude(job, grant, end)
            elif job.retried:
                self._turn_down(job, unreachable(unsent).refusal)
            else:
                job.started = False
                job.task = job.client.loop.create_task(self._serve_waiting(job, unsent))
                under_way = True
        finally:
            if not under_way:
                self._close(job)

    def stream_head(self, job: Job, status: int, headers: Headers) -> bytes:
        """The head of a stream's answer."""
        return self._dispatch.stream_head(job, status, headers)

    def _admit_now(self, job: Job, demand: Demand) -> Grant | None:
        """The grant, where it is to be had at once; None when the request has to wait for it. Raises Refused."""
        now = time.monotonic()
        answer = self._controller.request(demand, now)
        if isinstance(answer, Refusal):
            raise Refused(answer)
        if isinstance(answer, Grant):
            if self._agreement is None:
                return self._admitted(job, answer, now)
            job.provisional = Provisional(answer, None, now)  # it goes back, should asking fail
            job.provisional = Provisional(answer, self._agreement.ask(answer), now)
        else:
            job.waiting = answer
        return None

    async def _admit(self, job: Job, demand: Demand) -> Grant:
        """Wait for the grant, and for the other replicas to agree. Raises Refused."""
        entered, asked = time.monotonic(), None
        waiting, job.waiting = job.waiting, None
        provisional, job.provisional = job.provisional, None
        answer: Grant | Waiting | Refusal
        if provisional is not None:
            answer, asked, entered = provisional
        else:
            answer = waiting or self._controller.request(demand, entered)
        if isinstance(answer, Refusal):
            raise Refused(answer)
        try:
            if not isinstance(answer, Grant):
                answer = await self._controller.wait(answer)
            if self._agreement is not None:
                answer = await self._agreement.confirm(answer, asked)
        finally:
            now = time.monotonic()
            job.exchange.queue_s += now - entered
        return self._admitted(job, answer, now)

    def _admitted(self, job: Job, grant: Grant, now: float) -> Grant:
        exchange = job.exchange
        exchange.admitted_at = now
        exchange.backend, exchange.record = grant.backend, grant.record
        exchange.composition = grant.composition()
        job.grant, job.dispatched = grant, False
        self._retries.request()
        return grant

    def _again(self, job: Job, failure: UpstreamFailure | ConnectFailed) -> Demand:
        """The demand for the second try, on another backend if there is one. Raises Refused when there is no second try."""
        now = time.monotonic()
        grant, demand = job.grant, job.demand
        assert grant is not None and demand is not None
        job.dispatched = False  # the backend cannot have had it
        self._settle(job, now)
        job.relay = None
        job.exchange.dispatched_at = None
        if isinstance(failure, ConnectFailed) and not failure.may_retry:
            raise unreachable(failure)
        if not self._retries.take(now):
            self._metrics.retry(grant.backend, "no_budget")
            raise unreachable(failure)
        others = tuple(name for name in demand.backends if name != grant.backend)
        return demand._replace(backends=others or demand.backends)

    # Beginning and end

    def _open(self, client: PlimsollProtocol, incoming: Incoming) -> Job:
        exchange = self._exchange(client, incoming)
        rules, principal = self.rules, incoming.principal
        tenant = rules.tenants.get(principal.tenant or "", _NOBODY) if principal is not None else _NOBODY
        exchange.tenant, exchange.priority_class = tenant.name, tenant.priority_class
        job = client.job = Job(self, client, incoming, rules, tenant, exchange)
        self.jobs.add(job)
        return job

    def _turn_down(self, job: Job, refusal: Refusal) -> None:
        exchange = job.exchange
        exchange.outcome = Outcome.FAILED if exchange.attempts else Outcome.REFUSED
        exchange.reason, exchange.message = refusal.reason, refusal.message
        self._dispatch.answer(job, refusal)

    def _departed(self, job: Job) -> None:
        """The client has left. What its backend is still generating is stopped."""
        if job.answered:
            return
        job.answered = True
        if job.relay is not None:
            job.relay.abandon()
        exchange = job.exchange
        exchange.outcome, exchange.reason, exchange.status = Outcome.CANCELLED, Reason.CLIENT_CLOSED, 499

    def _close(self, job: Job) -> None:
        """Give back what was reserved, write the account, and let the client go on with its next request.

        After a defect too, which is then the caller's 500."""
        relay = job.relay
        if not job.answered:
            if relay is not None:
                relay.abandon()
            self._dispatch.fail(job, Refusal(Reason.INTERNAL_ERROR, "Something went wrong inside the gateway."))
            job.client.flush()  # the loop drops a connection whose reader raised
        now = time.monotonic()
        if relay is not None:
            job.exchange.first_at, job.exchange.last_at = relay.first_at, relay.last_at
        if job.waiting is not None:
            self._controller.leave(job.waiting)
        if job.provisional is not None and self._agreement is not None:
            self._agreement.withdraw(job.provisional.grant, job.provisional.asked)
            job.provisional = None
        self._settle(job, now)
        self.jobs.discard(job)
        self._account(job.exchange, now)
        job.relay = None  # each knows the other: left so, only the garbage collector would free what the request held
        if self.draining and not self.jobs:
            self._quiet.set()
        job.client.finished(keep_alive=job.keep_alive)

    def _settle(self, job: Job, now: float) -> None:
        """Exactly once a grant: at what was used where that is known, at what was delivered where it broke off."""
        grant, job.grant = job.grant, None
        if grant is None:
            return
        if not job.dispatched:
            grant.give_back(now)
            return
        exchange, relay = job.exchange, job.relay
        if exchange.input_tokens is None and relay is not None and relay.stream and relay.scanner is not None:
            exchange.usage_estimated = True
            exchange.events = relay.scanner.events
            shape = grant.shape
            exchange.input_tokens = shape.sequences * shape.input_tokens if relay.first_at is not None else 0
            exchange.output_tokens = relay.scanner.content_events
        elif exchange.input_tokens is None and exchange.reason in _NOTHING_FOR_THE_CALLER:
            exchange.input_tokens = exchange.output_tokens = 0
        grant.settle(now, exchange.input_tokens, exchange.output_tokens)

    def left(self, job: Job) -> None:
        """The client left while its request was worked on: nothing is generated for nobody."""
        if job.task is not None:
            job.task.cancel()
        if job.task is None or not job.started:  # a task that has not begun will not see to it
            self._departed(job)
            self._close(job)

    # Time

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Look at every clock once."""
        if self._ended:
            self.settle_accounts()
        self._controller.sweep(now)
        progress = self._backends.progress
        for job in list(self.jobs):
            reason = job.overdue(now, progress)
            if reason is not None and job.relay is not None:
                job.client.loop.call_soon(job.relay.stop, reason)  # of its own: what goes wrong with one ends no other's clock
        self._ticks += 1
        if self._ticks % _SWEEP_EVERY == 0:
            for upstream in self._upstreams():
                upstream.sweep(now)
            self.connections.sweep(now)

    async def drain(self, deadline: float) -> None:
        """Take no more work, let what runs finish until `deadline` (monotonic), then end it with an error of its own."""
        self.draining = True
        self._controller.drain(DRAINING)
        for client in self.connections:
            if not client.busy:
                client.shutdown()
        if self.jobs:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._quiet.wait()
        for job in list(self.jobs):
            if job.relay is not None:
                job.client.loop.call_soon(job.relay.stop, Reason.DRAINING)
            else:
                job.client.leave()
        if self.jobs:
            await self._quiet.wait()
