"""Metrics and labels in a PromQL expression, and the check that the engine exports them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from engine.metrics.definitions import COMMON, ERRORS, KNOBS, SERIES
from engine.metrics.names import ALGORITHMS, OPERATIONS, REASONS

RULES = Path(__file__).parent / "rules"
# Series of Prometheus itself.
BUILT_IN = {
    "up": ("job", "instance"),
    "ALERTS": ("alertname", "alertstate", "severity", "kind", *COMMON),
}
SCRAPED = ("job", "instance")  # labels that Prometheus adds
VALUES = {"op": OPERATIONS, "algorithm": ALGORITHMS, "reason": REASONS, "kind": ERRORS, "name": KNOBS}

_TOKEN = re.compile(
    r'\s+|(?P<text>"(?:[^"\\]|\\.)*")|(?P<duration>\[[^\]]*\])|(?P<variable>\$\{?\w+\}?)|(?P<name>[A-Za-z_:][\w:]*)'
    r"|(?P<number>\d[\w.]*(?:e[+-]?\d+)?)|(?P<sign>=~|!~|!=|==|>=|<=|.)"
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "offset", "bool", "inf", "nan"}


def find_problems(expr: str) -> Iterator[str]:
    """Yield each name in an expression with Grafana's variables that no code exports, as a problem in one line."""
    selectors, grouped = _parse(expr)
    known = {**{name: series.all_labels for name, series in SERIES.items()}, **list_recorded_series(), **BUILT_IN}
    if not selectors:
        yield "names no metric"
    labels = {"le", *SCRAPED}
    for name, matched in selectors:
        if name not in known:
            yield f"names {name}, which no code exports and no rule records"
            continue
        labels.update(known[name])
        for label, operator, value in matched:
            if label not in (*known[name], "le", *SCRAPED):
                yield f"asks {name} for the label {label}, which it does not have"
            elif name in SERIES and label in VALUES and operator in ("=", "!="):
                if value not in VALUES[label]:
                    yield f"asks {name} for {label}={value}, which it never is"
            elif operator in ("=~", "!~") and name in SERIES and label in VALUES:
                for part in value.split("|"):
                    if part not in VALUES[label]:
                        yield f"asks {name} for {label}={part}, which it never is"
    for label in grouped:
        if label not in labels:
            yield f"groups by {label}, which none of its metrics has"


@cache
def list_recorded_series() -> Mapping[str, tuple[str, ...]]:
    """Return the labels of the series that the rules record, from the first part of the series' name."""
    return {
        rule["record"]: tuple(rule["record"].partition(":")[0].split("_")) for rule in load_rules() if "record" in rule
    }


def load_rules() -> list[dict[str, Any]]:
    """Return all rules of all files, as parsed from YAML."""
    files = sorted(RULES.glob("*.yml"))
    return [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


Selector = tuple[str, list[tuple[str, str, str]]]


def _parse(expr: str) -> tuple[list[Selector], list[str]]:
    """Return the metrics with their matchers, and the labels of groupings."""
    tokens = [match for match in _TOKEN.finditer(re.sub(r"#[^\n]*", "", expr)) if match.lastgroup]
    selectors: list[Selector] = []
    grouped: list[str] = []
    at = 0
    while at < len(tokens):
        token, kind = tokens[at].group(), tokens[at].lastgroup
        after = tokens[at + 1].group() if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name" or token.lower() in _WORDS:
            continue
        if token in _GROUPING:
            if after == "(":
                end = next(index for index in range(at, len(tokens)) if tokens[index].group() == ")")
                grouped += [part.group() for part in tokens[at:end] if part.lastgroup == "name"]
                at = end
            continue
        if after == "(" or after in ("by", "without"):
            continue  # a function or an aggregation
        matched = []
        if after == "{":
            end = next(index for index in range(at, len(tokens)) if tokens[index].group() == "}")
            inner = [part.group() for part in tokens[at + 1 : end]]
            matched = [(inner[i], inner[i + 1], inner[i + 2].strip('"')) for i in range(0, len(inner) - 2, 4)]
            at = end
        selectors.append((token, matched))
    return selectors, grouped
