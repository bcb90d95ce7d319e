"""Conversion of dashboards to Grafana's JSON, by its SDK."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from grafana.common import RUN, Dashboard, Panel, Query

with warnings.catch_warnings():
    # The SDK prefers the second schema, which older Grafanas cannot read, and which files do not need.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import common as common_builders
    from grafana_foundation_sdk.builders import dashboard as builders
    from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, table, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models import common as common_models
    from grafana_foundation_sdk.models import dashboard as models
    from grafana_foundation_sdk.models import heatmap as heatmap_models
    from grafana_foundation_sdk.models import prometheus as prometheus_models


WIDE = 24  # columns of Grafana's grid
TAG = "enginerun"
SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BUCKET = 1e-9  # value of a heat map's cell up to which the cell is empty


def render_dashboard(dashboard: Dashboard) -> str:
    """Return the dashboard in the JSON that Grafana loads."""
    return json.dumps(build_dashboard(dashboard), cls=JSONEncoder, indent=2) + "\n"


def round_trip(given: str) -> str:
    """Return the dashboard after the SDK has read and written it, which silently drops what it does not know."""
    register_default_plugins()
    dashboard = models.Dashboard.from_json(json.loads(given))
    dashboard.panels = [_remove_old_field(panel) for panel in dashboard.panels or []]
    return json.dumps(dashboard, cls=JSONEncoder, indent=2) + "\n"


def _remove_old_field(panel: Any) -> Any:
    """Remove a field that the SDK always writes, but that is not in the schema since version 13."""
    if panel.type_val == "table":
        panel.options.footer = None
    return panel


def build_dashboard(dashboard: Dashboard) -> models.Dashboard:
    """Return the dashboard as an object of the SDK."""
    made = (
        builders.Dashboard(f"enginerun: {dashboard.title}")
        .uid(dashboard.uid)
        .description(dashboard.about)
        .tags([TAG])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("5s")
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables(list(_make_variables(dashboard)))
        .annotations(list(_make_annotations(dashboard)))
        .link(
            builders.DashboardLink("enginerun")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
    ).build()
    made.panels = list(_place_panels(dashboard))
    return made


def _make_variables(dashboard: Dashboard) -> Iterator[Any]:
    yield builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    yield _from_labels("run", "Run", "label_values(engine_rank_up, run)").description("A job: its script and process.")
    if dashboard.by_rank:
        yield (
            _from_labels("rank", "Rank", f"label_values(engine_rank_up{{{RUN}}}, rank)")
            .sort(models.VariableSort.NUMERICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text="All", value="$__all"))
        )


def _from_labels(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"})
        .definition(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_DESC)
    )


def _make_annotations(dashboard: Dashboard) -> Iterator[builders.AnnotationQuery]:
    for name, color, expr, title, at_value in list_annotations(dashboard):
        yield (
            builders.AnnotationQuery()
            .name(name)
            .datasource(SOURCE)
            .enable(True)
            .icon_color(color)
            .target(prometheus.Dataquery().ref_id("Anno").datasource(SOURCE).expr(expr).interval("5s").range())
            .title_format(title)
            .use_value_for_time(at_value)
        )


def list_annotations(dashboard: Dashboard) -> Iterator[tuple[str, str, str, str, bool]]:
    """Yield each annotation's name, colour, query and title, and whether its value is its time in milliseconds."""
    if dashboard.changes_marked:
        changed = f"max by (run) (engine_autotune_last_change_timestamp_seconds{{{RUN}}} > 0) * 1000"
        yield "Changes of the knobs", "blue", changed, "the tuner has put another setting into force", True
    firing = f'ALERTS{{{RUN}, alertstate="firing"}}'
    yield "Alerts", "red", firing, "{{alertname}} {{rank}}", False


def _place_panels(dashboard: Dashboard) -> Iterator[models.Panel | models.RowPanel]:
    """Yield rows from the top, with panels from the left, wrapped to the next line if they do not fit."""
    number, line = 1, 0
    for heading, panels in dashboard.rows:
        row = builders.Row(heading).build()
        row.id_val, row.grid_pos = number, models.GridPos(h=1, w=WIDE, x=0, y=line)
        row.collapsed = False
        yield row
        number, line, column, deepest = number + 1, line + 1, 0, 0
        for panel in panels:
            if column + panel.width > WIDE:
                line, column, deepest = line + deepest, 0, 0
            place = models.GridPos(h=panel.height, w=panel.width, x=column, y=line)
            made = _KINDS[panel.kind](panel).id(number).grid_pos(place).build()
            yield _remove_old_field(made)
            number, column, deepest = number + 1, column + panel.width, max(deepest, panel.height)
        line += deepest


def _set_common_options(made: Any, panel: Panel) -> Any:
    made.title(panel.title).description(panel.about).datasource(SOURCE).unit(panel.unit)
    made.targets([_make_target(panel, query, letter) for query, letter in zip(panel.queries, LETTERS, strict=False)])
    if panel.words:
        options = {
            str(code): models.ValueMappingResult(text=word, color=color, index=code)
            for code, (word, color) in panel.words.items()
        }
        made.mappings([models.ValueMap(options=options)])
    if panel.thresholds or panel.kind == "stat":
        steps = [models.Threshold(value=None, color=panel.base)]
        steps += [models.Threshold(value=value, color=color) for value, color in panel.thresholds]
        made.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.top is not None:
        made.max(panel.top)
    return made


def _make_target(panel: Panel, query: Query, letter: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(letter).datasource(SOURCE).expr(query.expr).legend_format(query.legend)
    target.editor_mode(prometheus_models.QueryEditorMode.CODE)
    if panel.kind == "table":
        return target.instant().format(prometheus_models.PromQueryFormat.TABLE)
    form = prometheus_models.PromQueryFormat
    return target.range().format(form.HEATMAP if query.heatmap else form.TIME_SERIES)


def _make_stat(panel: Panel) -> Any:
    made = stat.Panel().reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    made.graph_mode(common_models.BigValueGraphMode.NONE if panel.words else common_models.BigValueGraphMode.AREA)
    made.color_mode(common_models.BigValueColorMode.VALUE)
    made.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    if len(panel.queries) == 1:
        made.text_mode(common_models.BigValueTextMode.VALUE)
    return _set_common_options(made, panel)


def _make_timeseries(panel: Panel) -> Any:
    legend = common_builders.VizLegendOptions().display_mode(common_models.LegendDisplayMode.TABLE)
    legend.placement(common_models.LegendPlacement.BOTTOM).show_legend(True).calcs(["mean", "lastNotNull"])
    tooltip = common_builders.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    made = timeseries.Panel().legend(legend).tooltip(tooltip.sort(common_models.SortOrder.DESCENDING)).min(0)
    made.line_width(1).fill_opacity(30 if panel.stacked else 8).show_points(common_models.VisibilityMode.NEVER)
    if panel.stacked:
        made.stacking(common_builders.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if panel.thresholds:
        line = common_builders.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        made.thresholds_style(line)
    return _set_common_options(made, panel)


def _make_heatmap(panel: Panel) -> Any:
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    color.scale(heatmap_models.HeatmapColorScale.EXPONENTIAL).exponent(0.5).fill("dark-orange")
    made = (
        heatmap.Panel()
        .calculate(False)
        .color(color.reverse(False))
        .filter_values(heatmap.FilterValueRange().le(BUCKET))
    )
    buckets = any(query.heatmap for query in panel.queries)
    made.cell_values(heatmap.CellValues().unit("ops" if buckets else panel.unit))
    axis = heatmap.YAxisConfig().axis_placement(common_models.AxisPlacement.LEFT).reverse(not buckets)
    made.y_axis(axis.unit(panel.unit) if buckets else axis)
    tooltip = heatmap.HeatmapTooltip().mode(common_models.TooltipDisplayMode.SINGLE).show_color_scale(True)
    return _set_common_options(made.tooltip(tooltip), panel)


def _make_state_timeline(panel: Panel) -> Any:
    legend = common_builders.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST)
    legend.placement(common_models.LegendPlacement.BOTTOM).show_legend(True)
    made = statetimeline.Panel().legend(legend.calcs([])).merge_values(True).row_height(0.8).fill_opacity(70)
    made.show_value(common_models.VisibilityMode.AUTO)
    return _set_common_options(made, panel)


def _make_table(panel: Panel) -> Any:
    made = _set_common_options(table.Panel(), panel)
    names = {name: heading for name, (heading, _) in panel.columns.items() if name != heading}
    order = {name: index for index, name in enumerate(panel.columns)}
    made.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    made.with_transformation(
        models.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(panel.columns)}})
    )
    made.with_transformation(
        models.DataTransformerConfig(id_val="organize", options={"indexByName": order, "renameByName": names})
    )
    for heading, unit in panel.columns.values():
        if unit:
            made.override_by_name(heading, [models.DynamicConfigValue(id_val="unit", value=unit)])
    return made


_KINDS = {
    "stat": _make_stat,
    "timeseries": _make_timeseries,
    "heatmap": _make_heatmap,
    "states": _make_state_timeline,
    "table": _make_table,
}


def find_layout_problems(given: dict[str, Any]) -> Iterator[str]:
    """Yield the errors in the positions of a dashboard's panels."""
    cells: dict[tuple[int, int], str] = {}
    for panel in given["panels"]:
        place = panel["gridPos"]
        if place["x"] + place["w"] > WIDE or place["w"] < 1 or place["h"] < 1:
            yield f"'{panel['title']}' lies outside of the grid"
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                other = cells.setdefault((x, y), panel["title"])
                if other is not panel["title"]:
                    yield f"'{panel['title']}' covers '{other}'"
                    return
    numbers = sorted(panel["id"] for panel in given["panels"])
    if any(first == second for first, second in pairwise(numbers)):
        yield "two panels have the same id"
