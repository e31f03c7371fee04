"""Writes dashboards/plimsoll.json from rows.py; with --check it only says whether the file is up to date.

Owns how the dashboard looks. Promises: the same rows give the same bytes. Needs grafana-foundation-sdk, which the extra `dev`
brings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from rows import ROWS, Panel, Query

OUT = Path(__file__).parent / "dashboards" / "plimsoll.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
GRAPH_HEIGHT, TOP_HEIGHT = 7, 5


def build() -> str:
    """The dashboard as JSON text."""
    page = (
        dashboard.Dashboard("Plimsoll")
        .uid("plimsoll")
        .description("Can the gateway admit; what does it refuse, and why; how long do callers wait.")
        .tags(["plimsoll", "vllm"])
        .readonly()
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_choice("model", "Model"))
        .with_variable(_choice("backend", "Backend"))
    )
    for row in ROWS:
        page = page.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            page = page.with_panel(_draw(panel))
    document = page.build()
    for number, drawn in enumerate(document.panels or [], 1):
        drawn.id_val = number
    return JSONEncoder(sort_keys=True, indent=1).encode(document) + "\n"


def _choice(label: str, title: str) -> dashboard.QueryVariable:
    """A variable over the values of one label; "All" matches whatever is there, "other" included."""
    return (
        dashboard.QueryVariable(label)
        .label(title)
        .query(f"label_values(plimsoll_verdict, {label})")
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def _draw(panel: Panel) -> Any:
    drawn: Any
    match panel.kind:
        case "graph":
            drawn = _graph(panel)
        case "stat":
            drawn = _stat()
        case "table":
            drawn = _table()
        case _:
            raise ValueError(f"{panel.title}: no such kind of panel: {panel.kind}")
    drawn = drawn.title(panel.title).description(panel.says).datasource(SOURCE).span(panel.width).unit(panel.unit)
    drawn = drawn.height(TOP_HEIGHT if panel.kind == "stat" or panel.title == "Verdict in force" else GRAPH_HEIGHT)
    for number, query in enumerate(panel.queries):
        drawn = drawn.with_target(_target(query, "ABCDEFGH"[number], panel.kind))
    steps = _steps(panel)
    return drawn if steps is None else drawn.thresholds(steps)


def _graph(panel: Panel) -> timeseries.Panel:
    drawn = (
        timeseries.Panel()
        .fill_opacity(30 if panel.stack else 8)
        .line_width(1)
        .show_points(VisibilityMode.NEVER)
        .min(0)
        .legend(parts.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True))
        .tooltip(parts.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    return drawn.stacking(parts.StackingConfig().group("A").mode(StackingMode.NORMAL)) if panel.stack else drawn


def _table() -> table.Panel:
    """One line a series, without the columns that say nothing here."""
    hidden = {"Time": True, "__name__": True, "job": True}
    return (
        table.Panel()
        .show_header(True)
        .no_value("none so far")
        .with_transformation(DataTransformerConfig("organize", options={"excludeByName": hidden}))
    )


def _stat() -> stat.Panel:
    return (
        stat.Panel()
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.BACKGROUND)
        .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _target(query: Query, name: str, kind: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(name).datasource(SOURCE).legend_format(query.legend or "__auto")
    if kind == "graph":
        return target.range()
    target = target.instant()
    return target.format(PromQueryFormat.TABLE) if kind == "table" else target


def _steps(panel: Panel) -> dashboard.ThresholdsConfig | None:
    if panel.red_from is not None:
        steps = [Threshold(None, "green"), Threshold(panel.red_from, "red")]
    elif panel.red_below is not None:
        steps = [Threshold(None, "red"), Threshold(panel.red_below, "green")]
    else:
        return None
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def main() -> int:
    """0 when the file holds what the rows say, 1 with --check when it does not."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not up to date")
    text = build()
    if not options.parse_args().check:
        OUT.write_text(text, encoding="utf-8")
        return 0
    if OUT.is_file() and OUT.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{OUT.name} is not what rows.py says: run python deploy/grafana/build.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
