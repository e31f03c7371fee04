"""From a grant to an answer: the request goes out, the relay brings the answer back, and what it was is judged once.

Owns: the choice between an idle and a new connection, the headers sent to a backend, and the translation of an end
(whole, broken, stopped) into what the caller, the breaker and the account are told. Promises: a request is sent at most
once unless the backend cannot have had it; a broken answer never looks whole. Talks to: `forward.upstream`,
`forward.relay`, `responses`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from gateway.edge import responses
from gateway.edge.job import Job
from gateway.errors import Outcome, Reason, Refusal, Refused
from gateway.flow.breaker import Result
from gateway.flow.grant import Grant
from gateway.forward.account import Account, read_account
from gateway.forward.relay import End, Relay, Window
from gateway.forward.sse import Scanner
from gateway.forward.upstream import ConnectFailed, Connection, FailureKind, Headers, Upstream, UpstreamFailure
from gateway.observe.metrics import Metrics

_BUSY = frozenset({429, 503})  # a backend that has too much to do is not broken
_OWN_VERDICT = frozenset({Reason.FIRST_TOKEN_TIMEOUT, Reason.STALL_TIMEOUT})  # of the deadlines, those that accuse it
_TIMEOUTS: dict[Reason, str] = {
    Reason.FIRST_TOKEN_TIMEOUT: "The model produced no token in time.",
    Reason.STALL_TIMEOUT: "The model stopped producing tokens.",
    Reason.EXECUTION_TIMEOUT: "The answer took longer than is allowed.",
    Reason.CALLER_DEADLINE: "The time that the caller gave is over.",
    Reason.DRAINING: "The gateway is shutting down.",
    Reason.CLIENT_WRITE_TIMEOUT: "The caller did not read the answer.",
}
_VERSION = b"anthropic-version"
_PLACE_LOST = Refusal(
    Reason.BACKEND_UNAVAILABLE, "The place on the backend was given to others before the request was sent.", retry_after_s=1.0
)


class Backends(Protocol):
    """The backends as the path uses them."""

    def upstream(self, backend: str) -> Upstream | None:
        """The connections to a backend; None when it has left the policy."""

    def progress(self, backend: str) -> int | None:
        """Iterations of its engine so far; None when not known."""

    def undercounted(self, backend: str, expected: int, found: int) -> None:
        """The backend read more input tokens than were counted here."""

    def suspect(self, backend: str) -> None:
        """It answered 500: have the gateway's own probe find out whether it is broken."""


class Dispatch:
    """Sends granted requests and concludes them."""

    def __init__(self, backends: Backends, metrics: Metrics, attempt_ids: Callable[[], bytes]) -> None:
        self._backends = backends
        self._metrics = metrics
        self._attempt_ids = attempt_ids
        self._window = Window()

    def send_now(self, job: Job, grant: Grant) -> bool:
        """Send over an idle connection. False when there is none, so that one has to be made. Raises Refused."""
        upstream = self._backends.upstream(grant.backend)
        connection = upstream.take() if upstream is not None else None
        if upstream is None or connection is None:
            return False
        job.exchange.attempts += 1
        self._send(job, grant, upstream, connection)
        return True

    async def send(self, job: Job, grant: Grant) -> ConnectFailed | None:
        """Send, over a new connection where none is idle. None when it was sent. Raises Refused."""
        upstream = self._backends.upstream(grant.backend)
        job.exchange.attempts += 1
        if upstream is None:  # between the grant and this moment
            return ConnectFailed(FailureKind.REFUSED, "the backend has left the policy")
        connection = upstream.take()
        if connection is None:
            try:
                connection = await upstream.connect()
            except ConnectFailed as failure:
                if failure.kind is not FailureKind.IDENTITY:  # that closes the gate, which is more than a breaker does
                    grant.report(Result.FAILURE, time.monotonic())
                return failure
        self._send(job, grant, upstream, connection)
        return None

    def _send(self, job: Job, grant: Grant, upstream: Upstream, connection: Connection) -> None:
        parsed, exchange, incoming = job.parsed, job.exchange, job.incoming
        route = incoming.route
        assert parsed is not None and route is not None
        now = time.monotonic()
        if job.caller_due is not None and now >= job.caller_due:
            upstream.give_back(connection)
            raise Refused(Refusal(Reason.CALLER_DEADLINE, _TIMEOUTS[Reason.CALLER_DEADLINE]))
        if not grant.may_dispatch(now):
            upstream.give_back(connection)
            raise Refused(_PLACE_LOST)
        salt = job.tenant.cache_salt if parsed.form is None else None  # every JSON route of vLLM takes one
        body = parsed.forward(output_limit=job.limit_written, cache_salt=salt, user_key=job.rules.user_key)
        kind = b"application/json" if parsed.form is None else parsed.form.content_type
        extra = b""
        if route.dialect == "anthropic":
            version = responses.acceptable_id(incoming.fields.get(_VERSION)) or "2023-06-01"
            extra = b"anthropic-version: %b\r\n" % version.encode()
        scanner, on_gap = None, None
        if parsed.stream:
            scanner, on_gap = Scanner(route.dialect, parsed.sequences), self._metrics.gaps(exchange.model).observe
        relay = job.relay = Relay(job.client, job, scanner, self._window, chunked=not incoming.http_1_0, on_gap=on_gap)
        exchange.dispatched_at = now
        job.dispatched = True
        relay.dispatch(connection, upstream.request(incoming.path, self._attempt_ids(), kind, body, extra))

    def stream_head(self, job: Job, status: int, headers: Headers) -> bytes:
        """The head of a stream, when its first byte is there."""
        job.exchange.status = status
        chunked = not job.incoming.http_1_0
        keep_alive = job.incoming.keep_alive and chunked
        ours = self.ours(job, job.grant)
        return responses.relayed_head(status, headers, ours, None, chunked=chunked, keep_alive=keep_alive)

    def ours(self, job: Job, grant: Grant | None) -> bytes:
        """The lines of our own in an answer's head."""
        exchange, rules = job.exchange, job.rules
        lines = b"x-request-id: %b\r\n" % (exchange.client_request_id or exchange.request_id).encode()
        if grant is not None:
            record = grant.record[:16].encode()
            lines += b"x-plimsoll-record: %b\r\nx-plimsoll-queue-ms: %d\r\n" % (record, int(grant.queue_s * 1000))
            if job.limit_written is not None:
                lines += b"x-plimsoll-max-tokens: %d\r\n" % job.limit_written
        return lines + rules.cors.lines(job.incoming.fields.get(b"origin")) if rules.has_cors else lines

    # What came of it

    def conclude(self, job: Job, grant: Grant, end: End) -> None:
        """The answer has ended, broken off or been stopped: tell the caller what is still to be told, and judge it."""
        relay = job.relay
        assert relay is not None
        if isinstance(end, Reason):
            self._stopped(job, grant, end)
        elif isinstance(end, UpstreamFailure):
            grant.report(Result.FAILURE, time.monotonic())
            self.fail(job, Refusal(Reason.UPSTREAM_RESET, f"The backend's answer broke off: {end.message}."))
        elif relay.stream:
            self._streamed(job, grant, relay)
        else:
            self._held(job, grant, relay)

    def _stopped(self, job: Job, grant: Grant, reason: Reason) -> None:
        if reason in _OWN_VERDICT:
            grant.report(Result.FAILURE, time.monotonic())
        if reason is Reason.CLIENT_WRITE_TIMEOUT:
            job.client.cut()
        self.fail(job, Refusal(reason, _TIMEOUTS[reason]))
        if reason is Reason.CLIENT_WRITE_TIMEOUT:
            job.exchange.outcome = Outcome.CANCELLED

    def _streamed(self, job: Job, grant: Grant, relay: Relay) -> None:
        """A stream that ended as HTTP demands, and said so itself, or told its error."""
        scanner, exchange = relay.scanner, job.exchange
        exchange.response_bytes = relay.bytes_out
        exchange.events = scanner.events if scanner is not None else 0
        error = scanner is not None and scanner.error
        if scanner is not None:
            self._note(job, Account(scanner.input_tokens, scanner.output_tokens, error, scanner.error_code))
        self._judge(job, grant, 200, error, scanner.error_code if scanner is not None else None)
        self._finished(job, keep_alive=job.incoming.keep_alive and relay.chunked)

    def _held(self, job: Job, grant: Grant, relay: Relay) -> None:
        status, exchange = relay.status, job.exchange
        if 300 <= status < 400:
            grant.report(Result.IGNORED, time.monotonic())
            self.fail(job, Refusal(Reason.UPSTREAM_ERROR, f"The backend answered with a redirect ({status})."))
            return
        body = b"".join(relay.held)
        relay.held = []
        account = read_account(body) if status == 200 else Account(0, 0, True, None)
        if account.torn and relay.claims_json:
            grant.report(Result.FAILURE, time.monotonic())
            self.fail(job, Refusal(Reason.UPSTREAM_RESET, "The backend's answer broke off: half a document."))
            return
        keep_alive = job.incoming.keep_alive and not job.incoming.http_1_0
        head = responses.relayed_head(
            status, relay.headers, self.ours(job, grant), len(body), chunked=False, keep_alive=keep_alive
        )
        job.client.write(head + body)
        exchange.status, exchange.response_bytes = status, len(body)
        self._note(job, account)
        self._judge(job, grant, status, account.error, account.code)
        self._finished(job, keep_alive=keep_alive)

    def _judge(self, job: Job, grant: Grant, status: int, error: bool, code: int | str | None) -> None:
        """Outcome for the account and result for the breaker of an answer that reached the caller whole."""
        exchange, now = job.exchange, time.monotonic()
        if not error and status < 300:
            grant.report(Result.SUCCESS, now)
            return
        exchange.reason = Reason.UPSTREAM_ERROR
        exchange.outcome = Outcome.SERVED if 400 <= status < 500 else Outcome.FAILED
        grant.report(Result.IGNORED, now)
        if (status >= 500 and status not in _BUSY) or (status == 200 and code not in _BUSY):
            self._backends.suspect(grant.backend)

    def _note(self, job: Job, account: Account) -> None:
        exchange, shape = job.exchange, job.exchange.shape
        found, written = account.input_tokens, account.output_tokens
        if shape is not None:  # a backend cannot use up a tenant's budget, or bend the counters, by what it says
            found = _within(found, shape.input_tokens * shape.sequences)
            written = _within(written, shape.output_tokens * shape.sequences)
        exchange.input_tokens, exchange.output_tokens = found, written
        if (
            found is not None
            and shape is not None
            and found > shape.input_tokens * shape.sequences
            and exchange.backend is not None
        ):
            self._backends.undercounted(exchange.backend, shape.input_tokens, found)

    def fail(self, job: Job, refusal: Refusal) -> None:
        """Tell the caller that a dispatched request has failed: as an answer, or as the last event of a stream."""
        exchange, relay = job.exchange, job.relay
        exchange.outcome, exchange.reason, exchange.message = Outcome.FAILED, refusal.reason, refusal.message
        if relay is None or not relay.begun:
            self.answer(job, refusal)
            return
        exchange.response_bytes = relay.bytes_out
        scanner = relay.scanner
        if scanner is not None:
            assert job.incoming.route is not None
            event = responses.error_event(refusal, job.incoming.route.dialect, scanner.events)
            event = b"\n\n" + event if relay.mid_event else event
            job.client.write(b"%x\r\n%b\r\n" % (len(event), event) if relay.chunked else event)
        self._finished(job, keep_alive=False)

    def answer(self, job: Job, refusal: Refusal) -> None:
        """Answer with an error, nothing having been sent so far."""
        incoming, exchange = job.incoming, job.exchange
        assert incoming.route is not None
        exchange.status = responses.status_of(refusal.reason)
        keep_alive = incoming.keep_alive and not incoming.http_1_0
        ours = self.ours(job, job.grant if job.dispatched else None)
        job.client.write(
            responses.render(refusal, incoming.route.dialect, ours, jitter=jitter(), retries=job.retries, keep_alive=keep_alive)
        )
        self._finished(job, keep_alive=keep_alive)

    @staticmethod
    def _finished(job: Job, *, keep_alive: bool) -> None:
        job.answered, job.keep_alive = True, keep_alive


def _within(stated: int | None, reserved: int) -> int | None:
    """What a backend says was used, unless that is far beyond what was asked of it: then nothing is known."""
    return stated if stated is None or stated <= 16 * reserved + 4096 else None


def unreachable(failure: UpstreamFailure | ConnectFailed) -> Refused:
    """What a caller is told when no try got through."""
    if isinstance(failure, ConnectFailed):
        return Refused(Refusal(Reason.UPSTREAM_UNREACHABLE, "The backend cannot be reached.", retry_after_s=1.0))
    return Refused(Refusal(Reason.UPSTREAM_RESET, f"The backend's answer broke off: {failure.message}."))


def jitter() -> float:
    """In [0, 1)."""
    return secrets.randbelow(1000) / 1000
