"""The pictures of a report, as SVG for the page and PNG for elsewhere.

Owns: how each is drawn. Promises: dark on light, readable without colour alone (markers and labels differ too); a figure for
which there is nothing to draw is not drawn. Talks to: matplotlib, without a display and without its global state.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from gateway.evidence.record import Record, Slice
from gateway.qualify.samples import RawSample
from gateway.qualify.stats import Floats

INK, MUTED, GRID, LIMIT = "#1b2733", "#5b6b7a", "#e3e8ed", "#c0392b"
COLOURS = ("#1f5f8b", "#d9822b", "#3a8f5c", "#8e5aa8", "#a8453c", "#4b7f8c")
MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE: Any = {
    "font.family": ["DejaVu Sans"], "font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": GRID, "axes.axisbelow": True, "svg.fonttype": "none", "legend.frameon": False, "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.titlelocation": "left",
}  # fmt: skip
_MOST_POINTS = 4000
_PLATE: Any = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}  # under words over lines


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure: a name for its file, what it shows in a sentence, and its two forms; the PNG where it was asked for."""

    name: str
    caption: str
    svg: str
    png: bytes | None


def pictures(record: Record, samples: Sequence[RawSample], limits: dict[str, float], *, png: bool = False) -> list[Picture]:
    """Every figure that this record has data for. `limits`: p95 limits in milliseconds by metric (`e2e_ms`, ...)."""
    with rc_context(_STYLE):
        return [_picture(name, caption, figure, png=png) for name, caption, figure in _figures(record, samples, limits)]


def _figures(record: Record, samples: Sequence[RawSample], limits: dict[str, float]) -> Iterator[tuple[str, str, Figure]]:
    yield "slices", "What was measured: each box is one slice, its label the concurrency.", _slice_map(record)
    for metric, title in (("e2e_ms", "End to end"), ("ttft_ms", "Time to first token"), ("tpot_ms", "Time per output token")):
        figure = _latency(record, metric, title, limits.get(metric))
        if figure is not None:
            caption = f"{title} against concurrency. The band and whiskers reach to the confidence bound of each percentile."
            yield f"latency-{metric.removesuffix('_ms')}", caption, figure
    yield "throughput", "Output tokens and requests a second; whiskers reach to the lower bound.", _throughput(record)
    good = [sample for sample in samples if sample.status == "ok"]
    if any(sample.ttft_ms is not None for sample in good):
        caption = "Time to first token against input length; the line goes through the medians of eighths of the requests."
        yield "ttft-input", caption, _ttft_by_input(record, good)
    if good:
        caption = "Share of requests that were answered within a time, for each concurrency."
        yield "distribution", caption, _distribution(record, good)


def _picture(name: str, caption: str, figure: Figure, *, png: bool) -> Picture:
    canvas = FigureCanvasAgg(figure)
    svg, raster = io.StringIO(), io.BytesIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", dpi=144, metadata={"Date": None, "Creator": None})
    if png:
        canvas.print_figure(raster, format="png", dpi=120, metadata={"Software": None}, pil_kwargs={"optimize": True})
    text = svg.getvalue()
    return Picture(name, caption, text[text.index("<svg") :], raster.getvalue() if png else None)


def _panels(count: int, width: float = 9.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """One row of panels for each pair of slices."""
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    flat = [axis for row in axes for axis in row]
    for axis in flat[count:]:
        axis.set_axis_off()
    return figure, flat[:count]


def _slice_map(record: Record) -> Figure:
    """Input across, output up; darker and labelled: more at once."""
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    axis = figure.subplots()
    most = max(each.levels[-1].concurrency for each in record.slices)
    boxes = sorted(record.slices, key=lambda each: -_area(each))
    for place, each in enumerate(boxes):
        inputs, outputs, depth = each.input_tokens, each.output_tokens, each.levels[-1].concurrency
        colour = COLOURS[place % len(COLOURS)]
        fill = Rectangle(
            (inputs.min, outputs.min), max(inputs.max - inputs.min, 1), max(outputs.max - outputs.min, 1),
            facecolor=colour, alpha=0.15 + 0.45 * depth / most, edgecolor=colour, linewidth=1.6,
        )  # fmt: skip
        axis.add_patch(fill)
        label = f"{depth} at once" + ("" if not each.features else f"\n+ {', '.join(each.features)}")
        axis.annotate(
            label, (inputs.max, outputs.max), xytext=(-8, -8), textcoords="offset points", ha="right", va="top",
            fontweight="bold", color=INK,
        )  # fmt: skip
    axis.set_xlim(0, max(each.input_tokens.max for each in boxes) * 1.08)
    axis.set_ylim(0, max(max(each.output_tokens.max for each in boxes), 1) * 1.12)
    axis.set_xlabel("input tokens")
    axis.set_ylabel("output tokens")
    return figure


def _latency(record: Record, metric: str, title: str, limit: float | None) -> Figure | None:
    shown = [each for each in record.slices if any(getattr(level, metric).p50 for level in each.levels)]
    if not shown:
        return None
    figure, axes = _panels(len(shown))
    for axis, each in zip(axes, shown, strict=True):
        for place, (name, label) in enumerate((("p50", "p50"), ("p95", "p95"), ("p99", "p99"))):
            _percentile_line(axis, each, metric, name, label, place)
        if limit is not None:
            axis.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.4)
            axis.annotate(
                f"limit on p95: {limit:g} ms", (0.99, limit), xycoords=("axes fraction", "data"), xytext=(0, 5), ha="right",
                textcoords="offset points", color=LIMIT, fontsize=9, bbox=_PLATE,
            )  # fmt: skip
        _concurrency_axis(axis, each)
        axis.set_ylim(0, max(axis.get_ylim()[1], (limit or 0.0) * 1.12))
        axis.set_ylabel(f"{title.lower()}, ms")
        axis.set_title(_name(each))
        axis.legend(loc="best", fontsize=9)
    return figure


def _percentile_line(axis: Axes, each: Slice, metric: str, name: str, label: str, place: int) -> None:
    rows = [(level.concurrency, getattr(level, metric)) for level in each.levels]
    known = [(c, float(getattr(s, name)), getattr(s, name + "_upper")) for c, s in rows if getattr(s, name) is not None]
    if not known:
        return
    x, y = [row[0] for row in known], [row[1] for row in known]
    colour = COLOURS[place]
    axis.plot(x, y, color=colour, marker=MARKERS[place], markersize=5, linewidth=1.8, label=label)
    bounded = [(c, value, float(upper)) for c, value, upper in known if upper is not None]
    if bounded:
        low, high = [row[1] for row in bounded], [row[2] for row in bounded]
        centres = [row[0] for row in bounded]
        axis.fill_between(centres, low, high, color=colour, alpha=0.14, linewidth=0)
        axis.errorbar(
            centres,
            low,
            yerr=[[0.0] * len(low), [b - a for a, b in zip(low, high, strict=True)]],
            fmt="none",
            ecolor=colour,
            capsize=3,
            linewidth=1,
        )


def _throughput(record: Record) -> Figure:
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, rate, title in (
        (left, "output_tokens_per_s", "output tokens per second"),
        (right, "requests_per_s", "requests per second"),
    ):
        for place, each in enumerate(record.slices):
            known = [(level.concurrency, getattr(level, rate), getattr(level, rate + "_lower")) for level in each.levels]
            points = [
                (c, float(value), float(value if lower is None else lower)) for c, value, lower in known if value is not None
            ]
            if not points:
                continue
            x, y = [p[0] for p in points], [p[1] for p in points]
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            axis.errorbar(
                x, y, yerr=[[p[1] - p[2] for p in points], [0.0] * len(points)], color=colour, marker=marker, capsize=3,
                linewidth=1.8, markersize=5, label=_name(each),
            )  # fmt: skip
        axis.set_ylim(bottom=0)
        axis.set_xlabel("requests at once")
        axis.set_ylabel(title)
        _whole_ticks(axis, sorted({level.concurrency for each in record.slices for level in each.levels}))
    left.legend(loc="best", fontsize=8)
    return figure


def _ttft_by_input(record: Record, good: Sequence[RawSample]) -> Figure:
    cells = sorted({sample.cell for sample in good})
    figure, axes = _panels(len(cells))
    for axis, cell in zip(axes, cells, strict=True):
        own = [s for s in good if s.cell == cell and s.ttft_ms is not None and s.input_tokens is not None]
        for place, concurrency in enumerate(sorted({sample.concurrency for sample in own})):
            points = sorted((s.input_tokens or 0, s.ttft_ms or 0.0) for s in own if s.concurrency == concurrency)
            points = points[:: max(1, len(points) // _MOST_POINTS)]
            x, y = np.array([p[0] for p in points], dtype=float), np.array([p[1] for p in points])
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            # A cloud of thousands is one image inside the SVG, or the page would be megabytes.
            axis.scatter(x, y, s=7, color=colour, marker=marker, alpha=0.28, linewidths=0, rasterized=True)
            line = middles(x, y)
            axis.plot(
                [m[0] for m in line], [m[1] for m in line], color=colour, marker=marker, markersize=4, linewidth=1.6,
                label=f"{concurrency} at once",
            )  # fmt: skip
        axis.set_xlabel("input tokens")
        axis.set_ylabel("time to first token, ms")
        axis.set_ylim(bottom=0)
        axis.set_title(_cell_name(record, cell, len(cells)))
        axis.legend(loc="best", fontsize=8)
    return figure


def middles(x: Floats, y: Floats) -> list[tuple[float, float]]:
    """The median of each eighth of the points, by `x` rising. Points of one `x` stay in one part: a corner is drawn often."""
    ends = np.unique(np.quantile(x, np.linspace(0, 1, 9)[1:], method="inverted_cdf")) if len(x) else x
    part = np.searchsorted(ends, x, side="left")
    return [(float(np.median(x[part == place])), float(np.median(y[part == place]))) for place in range(len(ends))]


def _distribution(record: Record, good: Sequence[RawSample]) -> Figure:
    cells = sorted({sample.cell for sample in good})
    figure, axes = _panels(len(cells))
    for axis, cell in zip(axes, cells, strict=True):
        for place, concurrency in enumerate(sorted({s.concurrency for s in good if s.cell == cell})):
            values = np.sort([s.e2e_ms or 0.0 for s in good if s.cell == cell and s.concurrency == concurrency])
            share = np.arange(1, len(values) + 1) / len(values)
            thin = max(1, len(values) // 500)
            axis.step(values[::thin], share[::thin], where="post", color=COLOURS[place % len(COLOURS)], linewidth=1.7,
                      label=f"{concurrency} at once", linestyle=("-", "--", "-.", ":")[place % 4])  # fmt: skip
        axis.axhline(0.95, color=MUTED, linewidth=0.9, linestyle=":")
        axis.annotate(
            "p95", (0.005, 0.95), xycoords="axes fraction", xytext=(0, -11), textcoords="offset points", fontsize=8, color=MUTED
        )
        axis.set_xlabel("end to end, ms")
        axis.set_ylabel("share of requests")
        axis.set_ylim(0, 1.0)
        axis.set_xlim(left=0)
        axis.set_title(_cell_name(record, cell, len(cells)))
        axis.legend(loc="lower right", fontsize=8)
    return figure


def _concurrency_axis(axis: Axes, each: Slice) -> None:
    axis.set_xlabel("requests at once")
    _whole_ticks(axis, [level.concurrency for level in each.levels])


def _whole_ticks(axis: Axes, levels: list[int]) -> None:
    """Ticks at the measured levels; on a wide range a logarithmic axis, so that the low ones stay apart."""
    if len(levels) > 2 and levels[-1] / levels[0] >= 16:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
    close = {b for a, b in pairwise(levels) if axis.get_xscale() == "linear" and b - a < levels[-1] / 20}
    shown = [level for level in levels if level not in close]
    axis.set_xticks(shown, [str(level) for level in shown])
    if axis.get_xscale() == "linear":
        axis.set_xlim(0, levels[-1] * 1.08)


def _area(each: Slice) -> int:
    return (each.input_tokens.max - each.input_tokens.min + 1) * (each.output_tokens.max - each.output_tokens.min + 1)


def _name(each: Slice) -> str:
    extra = "" if not each.features else " + " + ", ".join(each.features)
    return f"{each.input_tokens.min}-{each.input_tokens.max} in, {each.output_tokens.min}-{each.output_tokens.max} out{extra}"


def _cell_name(record: Record, cell: int, cells: int) -> str:
    """The slice of a cell, when every cell became one."""
    return _name(record.slices[cell]) if cells == len(record.slices) and cell < cells else f"cell {cell + 1}"
