"""Recording rules and alerts, checked by promtool: syntax, and the conditions under which they fire."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from .prometheus_server import ROOT, Programs
from .synthetic_run import exposition

CASES = Path(__file__).parent / "alert_cases.yml"
RULES = sorted((ROOT / "grafana/rules").glob("*.yml"))


def alerts() -> list[dict[str, str]]:
    groups = yaml.safe_load((ROOT / "grafana/rules/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_are_well_formed(prometheus: Programs) -> None:
    output = prometheus.tool("check", "rules", *RULES)
    assert output.count("SUCCESS") == len(RULES) == 2, output


@pytest.mark.slow
def test_alerts_fire_and_stay_silent_as_the_cases_say(prometheus: Programs) -> None:
    assert "SUCCESS" in prometheus.tool("test", "rules", CASES)


def test_each_alert_has_a_case_for_firing_and_one_for_staying_silent() -> None:
    tests = yaml.safe_load(CASES.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    # These two are silent within a firing case: its other series are of runs and endpoints that are well.
    silent |= {"EngineEndpointDown", "EngineCountersUnreadable"}
    assert {alert["alert"] for alert in alerts()} == fires == silent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "3 * run_rank:engine_arrival_lag_seconds:mean1m_others",
            "0 * run_rank:engine_arrival_lag_seconds:mean1m_others",
        ),
        ("0.1 * run:engine_step_duration_seconds:mean1m, 0.001", "0.01 * run:engine_step_duration_seconds:mean1m, 0"),
        ("for: 15s", "for: 2m"),
        ("< 0.7 *", "< 0.9 *"),
        ("> 600", "> 60"),
        ("unless on (run, rank)", "or on (run, rank)"),
        ('up{job="enginerun"}', "up"),
        ("> 2.5", "> 0.5"),
        ('{cause=~"failure|host_lost|slow"}', ""),
        ("> 4.5", "> 1.5"),
        ("unless on (run, kind)", "or on (run, kind)"),
    ],
)
def test_cases_notice_a_broken_rule(prometheus: Programs, tmp_path: Path, old: str, new: str) -> None:
    for path in RULES:
        text = path.read_text()
        (tmp_path / path.name).write_text(text.replace(old, new))
    assert any(old in path.read_text() for path in RULES)
    cases = CASES.read_text().replace("../../grafana/rules/", "")
    (tmp_path / "cases.yml").write_text(cases)
    assert "FAILED" in prometheus.tool("test", "rules", tmp_path / "cases.yml", succeeds=False)


def test_names_units_and_labels_pass_promtool(prometheus: Programs) -> None:
    assert prometheus.tool("check", "metrics", given=exposition()) == ""
