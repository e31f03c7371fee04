"""A record as a page that people read.

Owns: the facts of the page and their order. Promises: one self-contained HTML file without a reference to anything outside;
everything from the record is escaped; what is not known is called unknown, and the page says what the record does not cover.
Talks to: `plots` for the pictures, `evidence.verdict` for the decision; the layout is in report.html.j2.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, select_autoescape
from markupsafe import Markup

from gateway.evidence.record import Level, Range, Record, Slice, record_id
from gateway.evidence.states import Verdict
from gateway.evidence.target import Target
from gateway.evidence.verdict import as_measured, evaluate
from gateway.qualify.plots import Picture, pictures
from gateway.qualify.samples import RawSample

TEMPLATE = Path(__file__).with_name("report.html.j2")
_KINDS = {
    "uniform": "drawn over the box",
    "opposite": "opposite corners together",
    "largest": "all of the largest size",
    "trace": "from the trace",
}
_COLUMNS = (("e2e_ms", "p50"), ("e2e_ms", "p95"), ("e2e_ms", "p99"), ("ttft_ms", "p95"), ("tpot_ms", "p95"), ("itl_ms", "p95"))
_TITLES = {"e2e_ms": "end to end", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}
_LIMITS = {"e2e_ms": "e2e_ms_p95", "ttft_ms": "ttft_ms_p95", "tpot_ms": "tpot_ms_p95"}


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and its pictures for use elsewhere."""

    html: str
    pictures: tuple[Picture, ...]


def report(record: Record, samples: Sequence[RawSample], target: Target | None, now: dt.datetime, *, png: bool = False) -> Report:
    """The report of a record. `samples` may be empty; `target` None: limits are not drawn and service is not judged.

    The verdict is the one for a backend that still is what the record was measured on.
    """
    limits = _limits(target)
    drawn = pictures(record, samples, limits, png=png)
    verdict = evaluate(record, as_measured(record), target or Target(confidence=None), now)
    environment = Environment(autoescape=select_autoescape(default=True, default_for_string=True))
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        record=record,
        id=record_id(record),
        model=_model(record),
        generated=now.strftime("%Y-%m-%d %H:%M UTC"),
        verdict=_verdict(verdict),
        details=verdict.details,
        judged=target is not None,
        limits=[(_TITLES[name], value) for name, value in limits.items()],
        tiles=_tiles(record),
        slices=[_slice(each) for each in record.slices],
        company=_company(record, samples),
        failures=_failures(samples),
        pictures=[(picture.name, picture.caption, Markup(picture.svg)) for picture in drawn],  # noqa: S704 - drawn here
        protocol=_protocol(record),
        configuration=list(_leaves(record.configuration)),
        uncovered=uncovered(record),
        samples=len(samples),
    )  # fmt: skip
    return Report(html, tuple(drawn))


def uncovered(record: Record) -> list[str]:
    """What the record does not cover, in sentences with its numbers."""
    most_in = max(each.input_tokens.max for each in record.slices)
    most_out = max(each.output_tokens.max for each in record.slices)
    most = max(each.levels[-1].concurrency for each in record.slices)
    found = [
        f"Anything larger: inputs beyond {most_in:,} tokens, outputs beyond {most_out:,}, or more than {most} sequences at once.",
        "A combination of sizes and concurrency that no single box holds, even when each number occurs in some box.",
        "Another model, vLLM version, machine or configuration: any change of the configuration hash makes this history.",
        "Time in a queue before dispatch, and the network between a caller and the gateway.",
    ]
    features = {"logprobs", "prompt_logprobs", "structured_output", "penalties", "lora", "media"}
    if missing := sorted(features - {name for each in record.slices for name in each.features}):
        found.append("Requests with " + ", ".join(name.replace("_", " ") for name in missing) + ": they were not measured.")
    if all(each.prefix_reuse == "none" for each in record.slices):
        found.append("Speed gained by a warm prefix cache: prompts shared nothing, so that the numbers do without it.")
    else:
        found.append("Traffic without the prefix reuse of the slices that name one.")
    found.append(
        "A population made only of the largest requests: the percentiles are those of the mix; the table of company says how "
        "much slower the largest alone were."
    )
    found += [f"Assumed, not measured: {assumption}." for assumption in record.protocol.assumptions]
    return found


def _limits(target: Target | None) -> dict[str, float]:
    if target is None:
        return {}
    values = {name: getattr(target.limits, limit) for name, limit in _LIMITS.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def _model(record: Record) -> str:
    """The model's name; of a local directory its last part, the whole stands in the configuration."""
    group = record.configuration.get("model")
    name = group.get("id") if isinstance(group, Mapping) else None
    if not isinstance(name, str):
        return record.identity.model_revision or "an unknown model"
    return Path(name).name if name.startswith(("/", ".")) else name


def _verdict(verdict: Verdict) -> dict[str, str]:
    return {name.replace("_", " "): value for name, value in verdict.fields.items()}


def _tiles(record: Record) -> list[tuple[str, str, str]]:
    """The numbers to read first: value, what it is, and beneath it one line more."""
    best = max(record.slices, key=lambda each: each.levels[-1].concurrency)
    top = best.levels[-1]
    sent = sum(level.requests for each in record.slices for level in each.levels)
    failed = sum(level.errors + level.timeouts for each in record.slices for level in each.levels)
    return [
        (str(top.concurrency), "requests at once, at most", f"{best.input_tokens.max:,} in, {best.output_tokens.max:,} out"),
        (_ms(top.e2e_ms.p95), "p95 end to end, there", f"at most {_ms(top.e2e_ms.p95_upper)}"),
        (_ms(top.ttft_ms.p95), "p95 to the first token", f"at most {_ms(top.ttft_ms.p95_upper)}"),
        (_number(top.output_tokens_per_s), "output tokens a second", f"at least {_number(top.output_tokens_per_s_lower)}"),
        (f"{sent:,}", "requests sent", f"{failed:,} failed or timed out"),
    ]


def _slice(each: Slice) -> dict[str, Any]:
    observed = each.observed_input_tokens, each.observed_output_tokens
    return {
        "name": f"{_span(each.input_tokens)} in × {_span(each.output_tokens)} out",
        "task": each.task,
        "features": ", ".join(each.features) or "none",
        "reuse": each.prefix_reuse,
        "observed": "; ".join(_span(r) for r in observed if r is not None) or "unknown",
        "levels": [_level(level) for level in each.levels],
    }


def _level(level: Level) -> dict[str, Any]:
    return {
        "concurrency": level.concurrency,
        "sent": f"{level.requests:,}",
        "failed": f"{level.errors} / {level.timeouts} / {level.cancelled}",
        "bad": level.errors + level.timeouts > 0,
        "latency": [_bounded(getattr(level, metric), name) for metric, name in _COLUMNS],
        "queue": _ms(level.queue_ms.mean),
        "preemptions": "unknown" if level.preemptions is None else str(level.preemptions),
        "rate": (_number(level.output_tokens_per_s), _number(level.output_tokens_per_s_lower)),
        "state": "void" if level.void else "over-saturated" if level.oversaturated else "",
    }  # fmt: skip


def _bounded(statistics: Any, name: str) -> tuple[str, str | None]:
    upper = getattr(statistics, name + "_upper")
    return _ms(getattr(statistics, name), unit=False), None if upper is None else _ms(upper, unit=False)


def _company(record: Record, samples: Sequence[RawSample]) -> list[tuple[str, ...]]:
    """Latency by the company a request was sent in, at the highest level of each cell."""
    rows: list[tuple[str, ...]] = []
    for cell in sorted({sample.cell for sample in samples}):
        top = max(sample.concurrency for sample in samples if sample.cell == cell)
        for kind, words in _KINDS.items():
            own = [
                s.e2e_ms for s in samples if s.cell == cell and s.concurrency == top and s.kind == kind and s.e2e_ms is not None
            ]
            if own:
                p50, p95 = np.quantile(own, [0.5, 0.95])
                rows.append(
                    (f"cell {cell + 1}", str(top), words, f"{len(own):,}", f"{p50:,.0f}", f"{p95:,.0f}", f"{max(own):,.0f}")
                )
    return rows


def _failures(samples: Sequence[RawSample]) -> list[tuple[str, str, str, int]]:
    """Every way in which requests ended badly, with the first words of one of them."""
    found: dict[tuple[str, str], list[RawSample]] = {}
    for sample in samples:
        if sample.status != "ok":
            found.setdefault((sample.status, sample.error or "-"), []).append(sample)
    return [(status, kind, own[0].detail or "", len(own)) for (status, kind), own in sorted(found.items())]


def _protocol(record: Record) -> list[tuple[str, str]]:
    protocol = record.protocol
    warm = protocol.warmup_state + ("" if protocol.warmup_requests is None else f", {protocol.warmup_requests} requests")
    return [
        ("measured", f"{protocol.started_at} to {protocol.finished_at or 'unknown'}"),
        ("tool", protocol.tool),
        ("arrival", protocol.arrival.replace("_", " ")),
        ("prompts", protocol.dataset),
        ("route", protocol.route or "unknown"),
        ("path", protocol.path),
        ("warm-up", warm),
        ("repeats", str(protocol.repeats)),
        ("confidence of every bound", protocol.confidence or "no bounds"),
        ("seed", "unknown" if protocol.seed is None else str(protocol.seed)),
        ("KV cache", "unknown" if protocol.kv_cache_tokens is None else f"{protocol.kv_cache_tokens:,} tokens"),
        ("identity", protocol.identity_source or "unknown"),
        ("plan", protocol.plan or "unknown"),
    ]


def _leaves(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in sorted(document.items()):
        if isinstance(value, Mapping) and value:
            rows += _leaves(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, "none" if value is None else str(value)))
    return rows


def _span(each: Range) -> str:
    return f"{each.min:,}-{each.max:,}"


def _ms(value: str | None, *, unit: bool = True) -> str:
    return "unknown" if value is None else _number(value) + (" ms" if unit else "")


def _number(value: str | None) -> str:
    if value is None:
        return "unknown"
    number = float(value)
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"
