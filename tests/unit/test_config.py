"""Settings: their sources, precedence, and the errors of bad ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engine.config import config
from engine.errors import ConfigError
from engine.launch.process import plan


def test_defaults_need_no_environment() -> None:
    chosen = config.load({})
    assert chosen.fusion_threshold == 64 << 20
    assert chosen.stall_limit == 600
    assert chosen.spin_us is None
    assert chosen.output_dir is None


def test_every_default_is_a_value_that_its_parser_accepts() -> None:
    for entry in dataclasses.fields(config.Config):
        assert config.list_settings()[entry.name].read(entry.default) == entry.default


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("67108864", 1 << 26),
        ("64M", 1 << 26),
        ("64MiB", 1 << 26),
        ("64 mb", 1 << 26),
        ("1k", 1024),
        ("2G", 2 << 30),
    ],
)
def test_bytes_may_have_a_suffix(text: str, nbytes: int) -> None:
    assert config.load({"ENGINE_FUSION_THRESHOLD": text}).fusion_threshold == nbytes


def test_our_variable_goes_before_its_alias_and_a_caller_before_both() -> None:
    environ = {"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_LOG_LEVEL": "trace"}
    assert config.load(environ).cycle_time_ms == 3.5
    assert config.load(environ).log_level == "DEBUG"
    environ["ENGINE_CYCLE_TIME_MS"] = "2"
    assert config.load(environ).cycle_time_ms == 2.0
    assert config.load(environ, {"cycle_time_ms": 1}).cycle_time_ms == 1.0


def test_horovods_stall_switch_turns_warnings_off_unless_ours_is_set() -> None:
    environ = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "30"}
    assert config.load(environ).stall_warning == 0
    assert config.load(environ).stall_limit == 600
    assert config.load({**environ, "ENGINE_STALL_WARNING": "7"}).stall_warning == 7
    assert config.load(environ, {"stall_warning": 9}).stall_warning == 9
    assert config.load({**environ, "HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_warning == 30
    with pytest.raises(ConfigError, match="HOROVOD_STALL_CHECK_DISABLE is 'x'; expected 1 or 0"):
        config.load({"HOROVOD_STALL_CHECK_DISABLE": "x"})


@pytest.mark.parametrize(
    ("variable", "text", "setting", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "1048576", "fusion_threshold", 1 << 20),
        ("HOROVOD_CYCLE_TIME", "2.5", "cycle_time_ms", 2.5),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30", "stall_warning", 30),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90", "stall_limit", 90),
        ("HOROVOD_START_TIMEOUT", "12", "start_timeout", 12),
        ("HOROVOD_LOG_LEVEL", "warning", "log_level", "WARNING"),
        ("HOROVOD_AUTOTUNE", "1", "autotune", True),
        ("HOROVOD_AUTOTUNE_LOG", "/a.csv", "autotune_log", Path("/a.csv")),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "0", "autotune_warmup", 0),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "10", "autotune_steps", 10),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "17", "autotune_trials", 17),
    ],
)
def test_horovods_variables_keep_their_units(variable: str, text: str, setting: str, value: Any) -> None:
    assert getattr(config.load({variable: text}), setting) == value


def test_variables_without_effect_are_accepted_whatever_they_say_and_can_be_named() -> None:
    environ = dict.fromkeys(config.WITHOUT_EFFECT, "anything")
    assert config.load(environ) == config.load({})
    assert config.without_effect(environ) == list(config.WITHOUT_EFFECT)
    assert config.without_effect({"HOROVOD_CACHE_CAPACITY": ""}) == []


def test_a_variable_that_is_misspelt_is_told_and_others_are_not() -> None:
    wrong = {"ENGINE_FUSION_TRESHOLD": "3", "ENGINE_STALL_LIMITS": "4"}
    assert config.find_misspelt(wrong) == {
        "ENGINE_FUSION_TRESHOLD": "ENGINE_FUSION_THRESHOLD",
        "ENGINE_STALL_LIMITS": "ENGINE_STALL_LIMIT",
    }
    known = [each.variable for each in config.list_settings().values()]
    ours = (
        *known,
        *plan.OURS,
        *plan.OF_WORKERS,
        "ENGINE_RANK",
        "ENGINE_SIZE",
        "ENGINE_HOST_NAME",
        "ENGINE_SECRET_FILE",
    )
    assert config.find_misspelt(dict.fromkeys((*ours, "ENGINE_ROOM", "PATH"), "1")) == {}


def test_an_empty_variable_counts_as_not_set() -> None:
    assert config.load({"ENGINE_CYCLE_TIME_MS": "", "HOROVOD_CYCLE_TIME": "4"}).cycle_time_ms == 4.0


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("ENGINE_FUSION_THRESHOLD", "-1", "a number of bytes"),
        ("ENGINE_FUSION_THRESHOLD", "1.5M", "a number of bytes"),
        ("ENGINE_FUSION_THRESHOLD", "MM", "a number of bytes"),
        ("ENGINE_CYCLE_TIME_MS", "fast", "a number from 0 to 10000"),
        ("ENGINE_CYCLE_TIME_MS", "nan", "a number from 0 to 10000"),
        ("ENGINE_STALL_LIMIT", "inf", "a number of seconds from 0 to 1e+09; 0 is never"),
        ("ENGINE_START_TIMEOUT", "0", "a number of seconds from 0.001 to 1e+09"),
        ("ENGINE_START_TIMEOUT", "1e10", "a number of seconds from 0.001 to 1e+09"),
        ("ENGINE_SHUTDOWN_TIMEOUT", "1e11", "a number of seconds from 0 to 1e+09"),
        ("ENGINE_STALL_WARNING", "1.5e10", "a number of seconds from 0 to 1e+09; 0 is never"),
        ("ENGINE_FUSION_THRESHOLD", "17179869184G", "a number of bytes from 0 to 2^60"),
        ("ENGINE_FUSION_THRESHOLD", "9" * 5000, "a number of bytes from 0 to 2^60"),
        ("ENGINE_TIMELINE_LIMIT", str((1 << 60) + 1), "a number of bytes from 0 to 2^60"),
        ("ENGINE_LOG_LEVEL", "loud", "one of trace, debug"),
        ("ENGINE_AUTOTUNE_TRIALS", "0", "a whole number from 1 to 1000"),
        ("ENGINE_AUTOTUNE_STEPS", "2.5", "a whole number from 1 to 10000"),
        ("ENGINE_STORES", "fast", "one of auto, cached, streaming"),
        ("ENGINE_KERNELS", "sse", "one of auto, plain, avx2, avx512"),
        ("ENGINE_SPIN_US", "-1", "auto, or a number from 0 to 1000"),
        ("ENGINE_TIMELINE", " ", "dynamic, or a path"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "maybe", "1 or 0"),
        ("HOROVOD_CYCLE_TIME", "x", "a number from 0 to 10000"),
    ],
)
def test_a_bad_value_is_named_with_its_variable_and_the_expected_form(variable: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({variable: value})
    assert variable in str(caught.value)
    assert repr(value)[:90] in str(caught.value)
    assert expected in str(caught.value)


def test_an_address_that_kubernetes_sets_for_a_service_is_no_setting() -> None:
    assert config.load({"ENGINE_METRICS_PORT": "tcp://10.96.1.2:9400"}).metrics_port is None
    assert config.load({"ENGINE_METRICS_PORT": "9400"}).metrics_port == 9400


def test_the_largest_values_are_accepted() -> None:
    durations = ("stall_warning", "stall_limit", "start_timeout", "shutdown_timeout")
    chosen = config.load({}, {**dict.fromkeys(durations, 1e9), "fusion_threshold": 1 << 60, "timeline_limit": 1 << 60})
    assert {getattr(chosen, name) for name in durations} == {1e9}
    assert chosen.fusion_threshold == chosen.timeline_limit == 1 << 60


@pytest.mark.parametrize("value", [None, True, "x", -1, [1]])
def test_a_bad_override_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ConfigError, match="cycle_time_ms is "):
        config.load({}, {"cycle_time_ms": value})


def test_an_override_of_no_setting_lists_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'cycle_time'; did you mean 'cycle_time_ms'\? There are: fusion"):
        config.load({}, {"cycle_time": 1})


@pytest.mark.parametrize("value", ["4095", "2M", "-1", "some"])
def test_a_chunk_fits_into_a_slot(value: str) -> None:
    with pytest.raises(ConfigError, match=r"4096 to 1048576 bytes|a number of bytes"):
        config.load({"ENGINE_CHUNK_BYTES": value})
    assert config.load({"ENGINE_CHUNK_BYTES": "64K"}).chunk_bytes == 1 << 16


def test_auto_is_left_to_the_engine_and_a_directory_is_absolute() -> None:
    chosen = config.load({"ENGINE_SPIN_US": "auto", "ENGINE_OUTPUT_DIR": "there"})
    assert chosen.spin_us is None
    assert chosen.output_dir == Path.cwd() / "there"


def test_a_timeline_is_asked_for_by_a_path() -> None:
    assert config.load({}).timeline is None
    assert config.load({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None
    chosen = config.load({"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"})
    assert chosen.timeline == Path.cwd() / "t.json" and chosen.timeline_mark_cycles


def test_the_table_names_every_variable() -> None:
    table = config.describe()
    for entry in dataclasses.fields(config.Config):
        assert f"`{config.variable_name(entry.name)}`" in table


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ENGINE_FUSION_THRESHOLD", "17179869184G"),
        ("ENGINE_TIMELINE_LIMIT", "18446744073709551616"),
        ("ENGINE_SHUTDOWN_TIMEOUT", "1e11"),
        ("ENGINE_START_TIMEOUT", "1e10"),
    ],
)
def test_what_overflows_later_is_refused_at_once(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        config.load({variable: text})
