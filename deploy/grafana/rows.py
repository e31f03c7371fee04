"""What the dashboard shows, from the question asked first at night to the one asked last. Data only; build.py draws it.

Owns every query. `$model` and `$backend` are the dashboard's variables; queries about a tenant or the process have none of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Query:
    """One PromQL expression and the legend of its lines ({{label}} is filled in by Grafana)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """`kind`: graph, stat or table. `says` is the panel's help. It is red from `red_from` on, or below `red_below`."""

    title: str
    says: str
    queries: tuple[Query, ...]
    kind: str = "graph"
    unit: str = "short"
    width: int = 8
    stack: bool = False
    red_from: float | None = None
    red_below: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


M, B, MB = 'model=~"$model"', 'backend=~"$backend"', 'model=~"$model",backend=~"$backend"'
JOB = 'job="plimsoll"'
USED, HELD = 'kind=~"input|output"', 'kind="reserved"'


def rate(counter: str, by: str, labels: str = M) -> str:
    """Events per second."""
    return f"sum by ({by}) (rate({counter}{{{labels}}}[$__rate_interval]))"


def quantiles(histogram: str, labels: str = M) -> tuple[Query, ...]:
    """The 50th, 95th and 99th percentile of a histogram."""
    buckets = rate(f"{histogram}_bucket", "le", labels)
    return tuple(Query(f"histogram_quantile({q / 100:g}, {buckets})", f"p{q}") for q in (50, 95, 99))


CAN_IT_ADMIT = Row(
    "Can it admit",
    (
        Panel(
            "Closed gates",
            "Backends of these models with no evidence in force. Above zero: `plimsoll top` names the reason of each.",
            (
                Query(
                    f"count(plimsoll_verdict{{{MB}}}) - "
                    f'(count(plimsoll_envelope_limit{{{MB},axis="concurrency"}} > 0) or vector(0))'
                ),
            ),
            kind="stat",
            width=3,
            red_from=1,
        ),
        Panel(
            "Open breakers",
            "Backends that fail; nothing is sent to them until the breaker half-opens.",
            (Query(f'sum(plimsoll_breaker_state{{{B},state="open"}})'),),
            kind="stat",
            width=3,
            red_from=1,
        ),
        Panel(
            "Fullest backend",
            "In flight as a share of the largest measured concurrency. At 100 % callers wait.",
            (
                Query(
                    f"max(sum by (backend) (plimsoll_in_flight_sequences{{{MB}}}) / "
                    f'(max by (backend) (plimsoll_envelope_limit{{{MB},axis="concurrency"}}) > 0)) or vector(0)'
                ),
            ),
            kind="stat",
            unit="percentunit",
            width=3,
            red_from=0.99,
        ),
        Panel(
            "Served in the last minutes",
            "The share of requests for a model whose answer arrived whole; probes and scrapes are not counted.",
            (
                Query(
                    f'sum(rate(plimsoll_requests_total{{{M},model!="other",outcome="served"}}[5m])) / '
                    f'sum(rate(plimsoll_requests_total{{{M},model!="other"}}[5m]))'
                ),
            ),
            kind="stat",
            unit="percentunit",
            width=3,
            red_below=0.95,
        ),
        Panel(
            "Verdict in force",
            "The best verdict of each model's records on each backend, and its reason.",
            (Query(f"plimsoll_verdict{{{MB}}} == 1"),),
            kind="table",
            width=12,
        ),
        Panel(
            "In flight and the envelope",
            "Sequences at each backend, below the line of what was measured.",
            (
                Query(f"sum by (backend) (plimsoll_in_flight_sequences{{{MB}}})", "{{backend}} in flight"),
                Query(f'max by (backend) (plimsoll_envelope_limit{{{MB},axis="concurrency"}})', "{{backend}} measured"),
            ),
        ),
        Panel(
            "Prefill and decode",
            "Sequences that have no token yet, and those that stream.",
            (Query(f"sum by (phase) (plimsoll_in_flight_sequences{{{MB}}})", "{{phase}}"),),
            stack=True,
        ),
        Panel(
            "Identity",
            "The configuration each backend shows now. Two hashes of one backend: it was restarted with other settings.",
            (Query(f"plimsoll_identity_info{{{B}}} == 1"),),
            kind="table",
        ),
    ),
)

REFUSALS = Row(
    "Refusals and retest triggers",
    (
        Panel(
            "Requests by outcome",
            "Served, refused (never dispatched), failed (dispatched, and broken) and cancelled (the caller left).",
            (Query(rate("plimsoll_requests_total", "outcome"), "{{outcome}}"),),
            unit="reqps",
            width=6,
            stack=True,
        ),
        Panel(
            "Refused, by reason",
            "The reason is the `code` that the caller got.",
            (Query(rate("plimsoll_requests_total", "reason", f'{M},outcome="refused"'), "{{reason}}"),),
            unit="reqps",
            width=6,
            stack=True,
        ),
        Panel(
            "Failed or cancelled, by reason",
            "Dispatched, and the answer did not arrive whole.",
            (Query(rate("plimsoll_requests_total", "reason", f'{M},outcome=~"failed|cancelled"'), "{{reason}}"),),
            unit="reqps",
            width=6,
            stack=True,
        ),
        Panel(
            "Retest triggers since the gateway started, by axis",
            "What was asked for outside the measured slices, or which field of the identity changed: what to measure next.",
            (Query(f"sum by (model, backend, axis) (plimsoll_retest_triggers_total{{{MB}}})"),),
            kind="table",
            width=6,
        ),
    ),
)

LATENCY = Row(
    "Latency",
    tuple(
        Panel(title, says, quantiles(histogram), unit="s", width=width)
        for title, says, histogram, width in (
            (
                "Time to first token",
                "From dispatch to the first content, streams only: comparable to the record.",
                "plimsoll_ttft_seconds",
                8,
            ),
            ("Time per output token", "The mean after the first, one value a stream.", "plimsoll_tpot_seconds", 8),
            ("Between tokens", "Time between two content events of a stream.", "plimsoll_itl_seconds", 8),
            ("Wait in the queue", "Zero for requests admitted at once.", "plimsoll_queue_wait_seconds", 12),
            ("Whole request", "From receipt to the end of the answer, the queue included.", "plimsoll_request_seconds", 12),
        )
    ),
)

QUEUE = Row(
    "Queue",
    (
        Panel("Waiting requests", "By class.", (Query("sum by (class) (plimsoll_queue_requests)", "{{class}}"),), stack=True),
        Panel(
            "Oldest",
            "Age of the request that has waited longest.",
            (Query("max by (class) (plimsoll_queue_oldest_seconds)", "{{class}}"),),
            unit="s",
        ),
        Panel(
            "Waiting tokens",
            "What the waiting requests would reserve.",
            (Query("sum by (class) (plimsoll_queue_tokens)", "{{class}}"),),
            stack=True,
        ),
    ),
)

TOKENS = Row(
    "Tokens",
    (
        Panel(
            "Read and written, by tenant",
            "As the engine reports them, per second.",
            (Query(rate("plimsoll_tokens_total", "tenant, kind", USED), "{{tenant}} {{kind}}"),),
        ),
        Panel(
            "Used share of what was reserved",
            "Low: callers ask for far larger outputs than they take, and wait for it.",
            (
                Query(
                    f"{rate('plimsoll_tokens_total', 'tenant', USED)} / ({rate('plimsoll_tokens_total', 'tenant', HELD)} > 0)",
                    "{{tenant}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Wasted, by tenant",
            "Read and written by the engine for answers that did not arrive whole.",
            (Query(rate("plimsoll_tokens_total", "tenant", 'kind="wasted"'), "{{tenant}}"),),
        ),
        Panel(
            "Requests by tenant",
            "Per second.",
            (Query(rate("plimsoll_tenant_requests_total", "tenant, outcome", ""), "{{tenant}} {{outcome}}"),),
            unit="reqps",
            width=12,
        ),
        Panel(
            "Reserved at the backends",
            "Input and output tokens of everything in flight, as it was asked for.",
            (Query(f"sum by (backend) (plimsoll_reserved_tokens{{{B}}})", "{{backend}}"),),
            width=12,
        ),
    ),
)

BACKEND = Row(
    "Backend",
    (
        Panel(
            "Breaker",
            "1 for the state it is in.",
            (Query(f"max by (backend, state) (plimsoll_breaker_state{{{B}}})", "{{backend}} {{state}}"),),
        ),
        Panel(
            "Breaker transitions since the gateway started",
            "How often each backend's breaker entered each state.",
            (Query(f"sum by (backend, state) (plimsoll_breaker_transitions_total{{{B}}})"),),
            kind="table",
        ),
        Panel(
            "Second attempts since the gateway started",
            "Only after a refused connection, or a close before the request was written; no_budget: forbidden by the budget.",
            (Query(f"sum by (backend, result) (plimsoll_retries_total{{{B}}})"),),
            kind="table",
        ),
    ),
)

GATEWAY = Row(
    "The gateway itself",
    (
        Panel(
            "Overhead",
            "All of a request's time but the queue and the backend.",
            quantiles("plimsoll_overhead_seconds", ""),
            unit="s",
        ),
        Panel(
            "CPU",
            "One process, one core: at 100 % it is full.",
            (Query(f"rate(process_cpu_seconds_total{{{JOB}}}[$__rate_interval])", "{{instance}}"),),
            unit="percentunit",
            red_from=0.9,
        ),
        Panel(
            "Memory",
            "Resident.",
            (Query(f"process_resident_memory_bytes{{{JOB}}}", "{{instance}}"),),
            unit="bytes",
        ),
        Panel(
            "Open files",
            "Sockets included; at the limit no connection is accepted.",
            (Query(f"process_open_fds{{{JOB}}} / process_max_fds{{{JOB}}}", "{{instance}}"),),
            unit="percentunit",
            red_from=0.8,
        ),
        Panel(
            "Journal lines lost",
            "Since the gateway started.",
            (Query("plimsoll_journal_dropped_lines"),),
            kind="stat",
            width=4,
            red_from=1,
        ),
        Panel(
            "Policy refused",
            "1: the file on disk cannot be used, and an older one is in force.",
            (Query("max(plimsoll_policy_stale)"),),
            kind="stat",
            width=4,
            red_from=1,
        ),
        Panel(
            "Policy reloads since the gateway started",
            "By result.",
            (Query("sum by (result) (plimsoll_policy_reloads_total)"),),
            kind="table",
            width=4,
        ),
        Panel("Draining", "1: it takes no new requests.", (Query("max(plimsoll_draining)"),), kind="stat", width=4, red_from=1),
    ),
)

ROWS = (CAN_IT_ADMIT, REFUSALS, LATENCY, QUEUE, TOKENS, BACKEND, GATEWAY)
