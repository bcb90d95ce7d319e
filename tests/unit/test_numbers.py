"""Numbers of settings, variables and options: what one cannot be is refused in one line that says where and why."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine import config, world
from engine.elastic.worker import gate
from engine.errors import ConfigError
from engine.forms import LARGEST, MOST, Bytes, Number, Whole, bit_rate, short_time
from engine.launch.errors import LaunchError
from engine.launch.options import parse

from ..hostile_numbers import NO_NUMBERS, NO_VALUES

LONGEST_LINE = 600  # characters
NUMBERS = {
    name: each
    for name, each in config.settings().items()
    if each.unit or isinstance(each.parse, (Number, Whole, Bytes))
}
LAUNCHERS = list(world.LAUNCHERS)


def expect_refusal(call: Any, source: str, kind: type[Exception] = ConfigError) -> None:
    """One line, which names the source and what is expected of it, and holds no control character."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert source in text and "\n" not in text and len(text) < LONGEST_LINE and text.isprintable(), text
    assert re.search(r"\d|such as|auto|one of", text.partition("expected")[2]), text  # a range, or an example


def test_the_settings_that_are_numbers_are_known() -> None:
    assert len(NUMBERS) >= 14, sorted(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_of_a_setting_is_refused_from_the_environment_and_from_a_caller(name: str) -> None:
    each = NUMBERS[name]
    for text in NO_NUMBERS:
        for variable in filter(None, (each.variable, each.alias)):
            if text.strip():
                expect_refusal(lambda variable=variable, text=text: config.load({variable: text}), variable)
        expect_refusal(lambda text=text: config.load({}, {name: text}), name)
    for value in NO_VALUES:
        expect_refusal(lambda value=value: config.load({}, {name: value}), name)


@pytest.mark.parametrize(
    "form", [Number(0.5, 9.5), Whole(1, 1000), Whole(0), Whole(0, LARGEST), Bytes(), Bytes(4096, 1 << 20)]
)
def test_a_form_takes_its_limits_and_nothing_beyond(form: Any) -> None:
    step = 0.25 if isinstance(form, Number) else 1
    for good in (form.low, form.low + step, form.high - step, form.high):
        assert form(good) == good and form(str(good)) == good and form(f" {good} ") == good
    for bad in (form.low - step, form.high + step, -form.high, 2 * form.high):
        for value in (bad, str(bad)):
            with pytest.raises(ValueError, match=re.escape(str(form))):
                form(value)


def test_drawn_numbers_are_taken_within_limits_alone() -> None:
    """Numbers of any size, as an int, a float and a text: what is taken is the number itself."""
    dice = random.Random(29)
    for _ in range(20_000):
        low = dice.randrange(-5, 1000)
        high = low + (1 << dice.randrange(61))
        number = dice.choice((low, high, dice.randrange(low, high + 1), 0)) + dice.choice((-1, 0, 0, 1))
        number *= dice.choice((1, 1, 1, -1, 1 << 70))
        form = dice.choice((Whole, Number))(max(low, 0), high)
        value = dice.choice((number, str(number)))
        inside = form.low <= (float(number) if isinstance(form, Number) else number) <= form.high
        try:
            taken = form(value)
        except ValueError:
            taken = None
        assert taken == ((float(number) if isinstance(form, Number) else number) if inside else None), (form, value)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.name)
def test_what_is_no_number_of_a_launcher_is_refused(launcher: Any) -> None:
    variables = {launcher.rank: "0", launcher.size: "2", launcher.local_rank: "0", launcher.local_size: "2"}
    for name in variables:
        for text in NO_NUMBERS:
            expect_refusal(lambda name=name, text=text: world.find_place({**variables, name: text}), name)
        expect_refusal(lambda name=name: world.find_place({**variables, name: str(MOST + 1)}), name)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"])
def test_what_is_no_number_of_slurm_is_refused(name: str) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    for text in NO_NUMBERS:
        expect_refusal(lambda text=text: world.find_place({**variables, name: text}), name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2(x",
        "(x3)",
        "2(x3",
        "2(x-1)",
        "2(x\u0663)",
        "\u0662",
        "1_0",
        "2,,2",
        "9" * 5000,
        "9" * 8,
        "2(x99999999999)",
        "2 3",
    ],
)
def test_what_is_no_list_of_slurms_tasks_is_refused(text: str) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    variables["SLURM_STEP_TASKS_PER_NODE"] = text
    if text:
        expect_refusal(lambda: world.find_place(variables), "SLURM_STEP_TASKS_PER_NODE")
    else:
        assert world.find_place(variables).local_size == 2


def test_a_list_of_slurms_tasks_of_many_nodes_takes_no_memory() -> None:
    """The kind of 2(x999999999): a list of as many numbers would be gigabytes."""
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    variables |= {"SLURM_STEP_TASKS_PER_NODE": "1(x3),2(x999999999)", "SLURM_NODEID": "900000"}
    assert world.find_place(variables).local_size == 2


@pytest.mark.parametrize("text", [each for each in NO_NUMBERS if each not in ("9" * 19, str(1 << 63), str(1 << 64))])
def test_what_is_no_number_of_a_worker_is_refused(text: str) -> None:
    expect_refusal(lambda: gate._number({"ENGINE_WORKER": text}, "ENGINE_WORKER"), "ENGINE_WORKER")


def options() -> Iterator[str]:
    """All options of the launcher that take a number, but for those whose value is a word or a path."""
    yield from (option for each in NUMBERS.values() if each.option is not None for option in each.options[:1])
    yield from ("-np", "--min-np", "--max-np", "--slots", "--reset-limit", "--start-timeout", "--elastic-timeout")
    yield from ("--cpus-per-rank", "-p", "--lease", "--fusion-threshold-mb")


@pytest.mark.parametrize("option", sorted({*options()}))
def test_what_is_no_number_of_an_option_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    beside = [] if option == "-np" else ["-np", "1"]
    for text in NO_NUMBERS:
        try:
            parse([*beside, f"{option}={text}" if option.startswith("--") else f"{option}{text}", "true"])
        except (LaunchError, ConfigError, argparse.ArgumentTypeError) as error:
            told = str(error)
        except SystemExit:
            told = capsys.readouterr().err.strip().splitlines()[-1]
        else:
            raise AssertionError(f"{option} takes {text!r}")
        assert option in told and "\n" not in told and len(told) < LONGEST_LINE and told.isprintable(), told


@pytest.mark.parametrize(
    ("form", "unit"), [(bit_rate, "G"), (bit_rate, " bit/s"), (short_time, "us"), (short_time, "s")]
)
def test_rates_and_times_with_units_are_bounded(form: Any, unit: str) -> None:
    assert form(f"5{unit}") > 0
    for number in NO_NUMBERS:
        with pytest.raises(ValueError, match="with its unit"):
            form(number + unit)
