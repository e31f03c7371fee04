"""Every number the gateway shows Prometheus.

Owns the counters and histograms of requests and the list of gauges. Promises: `finish` is a handful of additions; label
values come from the policy alone, anything else folds into "other"; there are never more than `max_series` series,
because a child that would pass the limit is folded too; gauges are read on the event loop by a quick `snapshot`, and the
text is made by `render` in whatever thread the caller likes. Talks to nobody: other modules register callbacks with `gauge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gateway.errors import Outcome, Reason
from gateway.observe.cells import Account, Cell, add_tokens, observe_stream
from gateway.observe.exchange import Exchange
from gateway.observe.exposition import COUNTERS, GAUGES, HISTOGRAM_NAMES, Sample, Snapshot, render
from gateway.observe.histogram import ANSWER_S, FIRST_S, OVERHEAD_S, TOKEN_S, WAIT_S, Histogram

OTHER = "other"
_SERVED, _OK = Outcome.SERVED, Reason.OK  # looked up once: an enum member costs more than a global
MAX_SERIES = 2000
_GAUGE_SERIES = 500
_RESERVE = _GAUGE_SERIES + 350  # kept free: gauges, the children named "other", the process's own numbers

Reader = Callable[[], Iterable[tuple[Sequence[str], float]]]


@dataclass(frozen=True, slots=True)
class Names:
    """The label values that exist: names from the policy in force."""

    models: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    backends: frozenset[str] = frozenset()


class Metrics:
    """One instance a process. All methods but `render` belong to the event loop's thread."""

    def __init__(self, names: Names, *, max_series: int = MAX_SERIES) -> None:
        self._names = names
        self._room = max_series - _RESERVE
        self._folded = 0
        self._cells: dict[tuple[str | None, str | None], Cell] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {name: {} for name in HISTOGRAM_NAMES}
        self._accounts: dict[str, Account] = {}
        self._counters: dict[str, dict[tuple[str, ...], float]] = {}
        self._gauges: dict[str, Reader] = {}
        self._totals: dict[str, Reader] = {}
        self._overhead = self._histogram("plimsoll_overhead_seconds", (), OVERHEAD_S)

    def set_names(self, names: Names) -> None:
        """A new policy is in force: new names count by themselves from now on. What was counted stays."""
        self._names = names

    # -- the hot path ------------------------------------------------------------------------------------------------

    def finish(self, exchange: Exchange) -> None:
        """Account for one request that has ended (`ended_at` is set). Called exactly once for each."""
        cell = self._cells.get((exchange.model, exchange.priority_class)) or self._cell(exchange)
        account = self._accounts.get(exchange.tenant or OTHER) or self._account(exchange.tenant)
        wait = cell.served_wait
        if exchange.reason is _OK and exchange.outcome is _SERVED:
            cell.served += 1
            account.served += 1
        else:
            wait = self._ended_otherwise(cell, account, exchange.outcome, exchange.reason)
        ended, dispatched, queue_s = exchange.ended_at, exchange.dispatched_at, exchange.queue_s
        if ended is None:
            return
        total = ended - exchange.received_at
        cell.request.observe(total)
        if queue_s > 0 or exchange.admitted_at is not None:
            wait.observe(queue_s)
        own = total - queue_s
        if dispatched is not None:
            last = exchange.last_at
            own -= (ended if last is None else last) - dispatched
            add_tokens(account, exchange)
            if exchange.stream and exchange.first_at is not None:
                observe_stream(cell, exchange, exchange.first_at - dispatched)
        self._overhead.observe(own if own > 0 else 0.0)

    def gaps(self, model: str | None) -> Histogram:
        """The histogram of times between content events; a relay takes it once a stream and observes each gap in seconds."""
        return self._histogram("plimsoll_itl_seconds", (self._model(model),), TOKEN_S)

    # -- rarer events ------------------------------------------------------------------------------------------------

    def trigger(self, model: str, backend: str | None, axis: str, amount: int = 1) -> None:
        """A retest trigger: an axis of the slice, the identity field that changed, or live_slo."""
        self._count("plimsoll_retest_triggers_total", (self._model(model), self._backend(backend), axis), amount)

    def retry(self, backend: str, result: str) -> None:
        """A second attempt was made (served, failed) or the budget forbade it (no_budget)."""
        self._count("plimsoll_retries_total", (self._backend(backend), result))

    def reload(self, result: str) -> None:
        """The policy file was read again: applied, unchanged or refused."""
        self._count("plimsoll_policy_reloads_total", (result,))

    def gauge(self, name: str, read: Reader) -> None:
        """Register who knows gauge `name`: `read()` yields (label values, value), runs on the event loop and must be quick."""
        if name not in GAUGES:
            raise KeyError(f"{name} is not a gauge of the gateway")
        self._gauges[name] = read

    def total(self, name: str, read: Reader) -> None:
        """Register who keeps counter `name`, as for `gauge`."""
        if name not in COUNTERS:
            raise KeyError(f"{name} is not a counter of the gateway")
        self._totals[name] = read

    # -- reading -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """A copy of every number, taken on the event loop; `render` may then work in another thread."""
        samples: list[Sample] = []
        for cell in self._cells.values():
            samples.append(("plimsoll_requests_total", (*cell.labels, _SERVED, _OK), float(cell.served)))
            samples += [("plimsoll_requests_total", (*cell.labels, *end), float(n)) for end, n in cell.ends.items()]
        for tenant, account in self._accounts.items():
            samples.append(("plimsoll_tenant_requests_total", (tenant, _SERVED), float(account.served)))
            samples += [("plimsoll_tenant_requests_total", (tenant, end), float(n)) for end, n in account.others.items()]
            for kind in ("input", "output", "reserved", "wasted"):
                samples.append(("plimsoll_tokens_total", (tenant, kind), float(getattr(account, kind))))
        samples += [(name, labels, value) for name, rows in self._counters.items() for labels, value in rows.items()]
        samples += [(name, tuple(labels), float(value)) for name, read in self._totals.items() for labels, value in read()]
        gauges = [(name, tuple(labels), float(value)) for name, read in self._gauges.items() for labels, value in read()]
        kept = gauges[:_GAUGE_SERIES]
        samples += [*kept, ("plimsoll_series_folded", (), float(self._folded + len(gauges) - len(kept)))]
        histograms = [
            (name, labels, child.bounds, tuple(child.counts), child.total)
            for name, rows in self._histograms.items()
            for labels, child in rows.items()
        ]
        return Snapshot(tuple(samples), tuple(histograms))

    def render(self) -> bytes:
        """Snapshot and text in one go, for callers without a loop to protect."""
        return render(self.snapshot())

    # -- children ----------------------------------------------------------------------------------------------------

    def _cell(self, exchange: Exchange) -> Cell:
        labels = (self._model(exchange.model), self._class(exchange.priority_class))
        if labels not in self._cells and not self._take(1):
            labels = (OTHER, OTHER)
        return self._cell_of(labels)

    def _cell_of(self, labels: tuple[str, str]) -> Cell:
        found = self._cells.get(labels)
        if found is None:
            found = self._cells[labels] = Cell(
                labels,
                self._histogram("plimsoll_request_seconds", labels, ANSWER_S),
                self._histogram("plimsoll_queue_wait_seconds", (*labels, _SERVED), WAIT_S),
                self._histogram("plimsoll_ttft_seconds", labels, FIRST_S),
                self._histogram("plimsoll_tpot_seconds", labels, TOKEN_S),
            )
        return found

    def _ended_otherwise(self, cell: Cell, account: Account, outcome: Outcome, reason: Reason) -> Histogram:
        """Count an end that is not a plain success; returns the histogram its wait belongs to."""
        end = (outcome, reason)
        if end not in cell.ends and not self._take(1):
            cell = self._cell_of((OTHER, OTHER))
        cell.ends[end] = cell.ends.get(end, 0) + 1
        if outcome is _SERVED:
            account.served += 1
            return cell.served_wait
        account.others[outcome] += 1
        return self._histogram("plimsoll_queue_wait_seconds", (*cell.labels, outcome), WAIT_S)

    def _account(self, tenant: str | None) -> Account:
        name = tenant if tenant in self._names.tenants else OTHER
        found = self._accounts.get(name)
        if found is not None:
            return found
        if not self._take(len(Outcome) + 4):
            name = OTHER
        return self._accounts.setdefault(name, Account())

    def _histogram(self, family: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Histogram:
        rows = self._histograms[family]
        found = rows.get(labels)
        if found is not None:
            return found
        fresh = Histogram(bounds)
        if not self._take(fresh.series):
            labels = (OTHER,) * len(labels)
        return rows.setdefault(labels, fresh)

    def _count(self, family: str, labels: tuple[str, ...], amount: int = 1) -> None:
        rows = self._counters.setdefault(family, {})
        if labels not in rows and not self._take(1):
            labels = (OTHER,) * len(labels)
        rows[labels] = rows.get(labels, 0.0) + amount

    def _take(self, series: int) -> bool:
        """Reserve room for new series; False when the limit says to fold instead."""
        if self._room < series:
            self._folded += 1
            return False
        self._room -= series
        return True

    def _model(self, name: str | None) -> str:
        return name if name is not None and name in self._names.models else OTHER

    def _class(self, name: str | None) -> str:
        return name if name is not None and name in self._names.classes else OTHER

    def _backend(self, name: str | None) -> str:
        return name if name is not None and name in self._names.backends else OTHER
