"""Command `python -m grafana`: write the dashboards, or `--check` that the files match the code."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from grafana import promql
from grafana.common import Dashboard
from grafana.queries import DASHBOARDS

DIRECTORY = Path(__file__).parent / "dashboards"


def find_problems(dashboard: Dashboard) -> Iterator[str]:
    """Yield the errors of a dashboard, one line each."""
    from grafana.build import find_layout_problems, list_annotations, render_dashboard

    for panel in dashboard.panels:
        where = f"{dashboard.title}, panel '{panel.title}'"
        for word in ("title", "about", "unit"):
            if not getattr(panel, word).strip():
                yield f"{where}: no {word}"
        for query in panel.queries:
            yield from (f"{where}: {problem}: {query.expr}" for problem in promql.find_problems(query.expr))
    for name, _, expr, _, _ in list_annotations(dashboard):
        yield from (f"{dashboard.title}, annotation '{name}': {problem}" for problem in promql.find_problems(expr))
    yield from (
        f"{dashboard.title}: {problem}" for problem in find_layout_problems(json.loads(render_dashboard(dashboard)))
    )


def find_rule_problems() -> Iterator[str]:
    """Yield the errors of the rules, one line each."""
    for rule in promql.load_rules():
        name = rule.get("alert") or rule["record"]
        yield from (f"rule {name}: {problem}" for problem in promql.find_problems(rule["expr"]))
        if "alert" in rule and not (
            "severity" in rule["labels"] and {"summary", "description"} <= set(rule["annotations"])
        ):
            yield f"rule {name}: no severity, summary or description"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grafana", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    given = parser.parse_args(arguments)
    from grafana.build import render_dashboard

    wrong = [*find_rule_problems(), *(problem for dashboard in DASHBOARDS for problem in find_problems(dashboard))]
    for problem in wrong:
        print(problem, file=sys.stderr)
    if wrong:
        return 1
    for dashboard in DASHBOARDS:
        path = DIRECTORY / f"{dashboard.uid}.json"
        made = render_dashboard(dashboard)
        if not given.check:
            path.write_text(made)
            print(path)
        elif not path.exists() or path.read_text() != made:
            wrong.append(path.name)
            present = path.read_text().splitlines() if path.exists() else []
            lines = difflib.unified_diff(present, made.splitlines(), path.name, "what the code says", lineterm="", n=1)
            print("\n".join(islice(lines, 30)), file=sys.stderr)
    known = {f"{dashboard.uid}.json" for dashboard in DASHBOARDS}
    for path in sorted(DIRECTORY.glob("*.json")):
        if path.name not in known:
            wrong.append(path.name)
            print(f"{path.name}: no code makes this dashboard", file=sys.stderr)
    if wrong:
        print(f"{', '.join(wrong)}: run `python -m grafana`", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
