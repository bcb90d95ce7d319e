"""A setting is declared once: options, environment, refusals, knobs and gauges derive from one field of `Config`."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from engine.config import config
from engine.config.forms import Bytes, Number, Whole, Words, parse_truth
from engine.config.setting import Knob, Option, define_setting
from engine.errors import ConfigError
from engine.launch.cli import options
from engine.launch.errors import LaunchError
from engine.metrics.knobs import GAUGES, make_gauges
from engine.session import commands
from engine.tuning.knobs import KNOBS, describe_axis
from engine_ext import snapshots as native

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class More(config.Config):
    """Additional settings that the engine does not have."""

    lane_bytes: int = define_setting(
        1 << 16,
        "bytes",
        Bytes(1 << 10, 1 << 20, "64K"),
        "Room of a lane.",
        "OLD_LANE",
        option=Option("SIZE"),
        knob=Knob(),
    )
    lane_wait_ms: float = define_setting(
        2.0, "milliseconds", Number(0, 9), "Patience of a lane.", knob=Knob(0.5, 3, off=0.0)
    )
    lane_kind: str = define_setting(
        "wide", "", Words("wide", "narrow"), "Kind of a lane.", option=Option(), knob=Knob(words=("wide",))
    )
    tracks: int = define_setting(
        1, "tracks", Whole(1, 8), "Number of tracks.", option=Option("N", ("--lane-count", "--tracks"))
    )
    lane_log: bool = define_setting(
        False, "", parse_truth, "Write down tracks.", option=Option(off="write down no tracks")
    )


def given(*arguments: str) -> dict[str, str]:
    """Settings that command-line options give, by variable."""
    return options.parse(["-np", "2", *arguments, "true"], More).settings


def test_a_new_setting_has_an_option_and_a_variable_and_an_alias() -> None:
    assert given("--lane-bytes", "2K", "--lane-count", "3") == {"ENGINE_LANE_BYTES": "2K", "ENGINE_TRACKS": "3"}
    assert given("--tracks", "3", "--lane-log", "--lane-kind", "narrow") == {
        "ENGINE_TRACKS": "3",
        "ENGINE_LANE_LOG": "1",
        "ENGINE_LANE_KIND": "narrow",
    }
    assert given("--lane-log", "--no-lane-log") == {"ENGINE_LANE_LOG": "0"}
    chosen = config.load({**given("--lane-bytes", "2K"), "OLD_LANE": "4K"}, kind=More)
    assert isinstance(chosen, More) and chosen.lane_bytes == 2 << 10
    assert config.load({"OLD_LANE": "4K"}, {"tracks": 2}, More) == More(lane_bytes=4 << 10, tracks=2)
    row = "| `lane_bytes` | `ENGINE_LANE_BYTES` | `--lane-bytes` | bytes | 65536 | Room of a lane. |"
    assert row in config.describe(More)


def test_a_new_setting_is_refused_in_the_same_words_wherever_it_comes_from() -> None:
    expected = "is '2M'; expected a number of bytes from 1024 to 1048576, such as 64K"
    with pytest.raises(LaunchError, match=f"^--lane-bytes {expected} "):
        given("--lane-bytes", "2M")
    with pytest.raises(ConfigError, match=f"^ENGINE_LANE_BYTES {expected}$"):
        config.load({"ENGINE_LANE_BYTES": "2M"}, kind=More)
    with pytest.raises(ConfigError, match=f"^OLD_LANE {expected}$"):
        config.load({"OLD_LANE": "2M"}, kind=More)
    for call in (
        lambda: config.load({}, {"lane_bytes": "2M"}, More),
        lambda: config.check_knobs({"lane_bytes": "2M"}, More),
    ):
        with pytest.raises(ConfigError, match=f"^lane_bytes {expected}$"):
            call()
    with pytest.raises(LaunchError, match="unrecognized arguments: --lane-wait-ms"):
        given("--lane-wait-ms", "1")  # it has no option


def test_a_new_setting_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--help"], More)
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--lane-bytes SIZE room of a lane",
        "--lane-kind {wide,narrow}",
        "--no-lane-log write down no tracks",
    ):
        assert words in text


def test_a_new_knob_is_taken_searched_and_shown() -> None:
    assert config.check_knobs({"lane_bytes": "2K", "lane_wait_ms": None}, More) == {"lane_bytes": 2 << 10}
    with pytest.raises(ConfigError, match=r"there is no knob 'tracks'; there are: .*, lane_bytes, lane_wait_ms"):
        config.check_knobs({"tracks": 2}, More)
    knobs = config.list_knobs(More)
    assert {name: describe_axis(knobs[name]) for name in knobs.keys() - config.list_knobs()} == {
        "lane_bytes": {"kind": "Integer", "low": 1 << 10, "high": 1 << 20, "log": True},
        "lane_wait_ms": {"kind": "Real", "low": 0.5, "high": 3, "log": True, "off": 0.0},
        "lane_kind": {"kind": "Choice", "values": ["wide"]},
    }
    shown = [(gauge.field, gauge.label, gauge.per) for gauge in make_gauges(knobs)[len(GAUGES) :]]
    assert shown == [
        ("lane", "lane_bytes", 1.0),
        ("lane_wait_ns", "lane_wait_seconds", 1e9),
        ("lane_kind", "lane_kind", 1.0),
    ]


def test_the_native_engine_has_the_same_knobs_with_the_same_ranges() -> None:
    here: dict[str, Any] = {}
    for name, each in config.list_knobs().items():
        form: Any = each.parse
        here[name] = set(form.words) if isinstance(form, Words) else (form.low, form.high)
    there = {name: set(may) if isinstance(may[0], str) else may for name, may in native.KNOBS.items()}
    assert there == here and list(native.KNOBS) == list(KNOBS) == list(config.list_knobs())


def test_editors_are_shown_what_set_knobs_takes() -> None:
    *shown, unknown = inspect.signature(commands.set_knobs).parameters.values()
    kinds = {each.name: str(each.type) for each in fields(config.Config)}
    assert {each.name: each.annotation for each in shown} == {
        name: " | ".join(dict.fromkeys((kinds[name], "str", "None"))) for name in config.list_knobs()
    }
    assert {(each.kind, each.default) for each in shown} == {(inspect.Parameter.KEYWORD_ONLY, None)}
    assert unknown.annotation == "Never"  # `check_knobs` and type checkers reject other names


def test_the_documents_name_every_knob() -> None:
    settings, tuning = ((ROOT / "docs/reference" / page).read_text() for page in ("settings.md", "autotune.md"))
    assert f"engine.set_knobs({', '.join(f'{name}=...' for name in config.list_knobs())})" in " ".join(settings.split())
    section = tuning.partition("## What is tuned")[2]
    assert re.findall(r"^- `(\w+)`: ", section, re.MULTILINE)[: len(KNOBS)] == list(KNOBS)


# Engine files besides `config.py` that must name a knob, other than in prose.
NAMES = {"fusion_threshold": "fusion.threshold", "cycle_time_ms": "cycle.time.ms", "chunk_bytes": "chunk.bytes"}
ALLOWED = {
    "engine/config/config.py",
    "engine/foresee/command.py",  # option to replay a timeline with another value
    "engine/foresee/model.py",  # applies the knob to tensors
    "engine/foresee/recorded.py",  # reads timelines
    "engine/launch/cli/options.py",  # Horovod's option in another unit, --fusion-threshold-mb
    "engine/metrics/report/advice.py",  # names the option that a user should change
    "engine/session/commands.py",  # parameters of `set_knobs`, for editors: a test compares them with the fields
}


@pytest.mark.parametrize("name", NAMES)
def test_a_knob_is_named_in_no_more_files_than_it_must_be(name: str) -> None:
    named = re.compile(NAMES[name].replace(".", "[-_]"), re.IGNORECASE)
    found = Counter(
        {str(path.relative_to(ROOT)): len(named.findall(path.read_text())) for path in ROOT.glob("engine/**/*.py")}
    )
    assert {path for path, times in found.items() if times} <= ALLOWED
    assert found["engine/config/config.py"] <= 2  # the field, and Horovod's variable
