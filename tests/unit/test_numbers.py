"""Numbers of settings, variables and options: an invalid one is refused in one line with its place and the reason."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from autotune import horovod_csv, policies
from autotune.journal import JournalError
from autotune.trials import PolicyError
from engine.config import config, world
from engine.config.forms import LARGEST, MOST, Bytes, Number, Whole, bit_rate, short_time
from engine.elastic.worker import gate
from engine.errors import ConfigError
from engine.launch.cli.options import parse
from engine.launch.elastic import worker_messages
from engine.launch.errors import LaunchError
from engine.launch.hosts import dead_workers
from engine.launch.hosts.channel import CODES, PIDS, ChannelError, Message
from engine.net.rendezvous import messages
from engine.text import bounded_reader
from engine.text.bounded_reader import ReadError

from ..hostile_numbers import NO_NUMBERS, NO_VALUES

LONGEST_LINE = 600  # characters
NUMBERS = {
    name: each
    for name, each in config.list_settings().items()
    if each.unit or isinstance(each.parse, (Number, Whole, Bytes))
}
LAUNCHERS = list(world.LAUNCHERS)


def expect_refusal(call: Any, source: str, kind: type[Exception] = ConfigError) -> None:
    """Check that the error is one printable line that names the source and the expected values."""
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
    """Numbers of any size, as an int, a float and a text: the parsed value is the number itself."""
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
    """A list such as 2(x999999999), written out, would take gigabytes."""
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    variables |= {"SLURM_STEP_TASKS_PER_NODE": "1(x3),2(x999999999)", "SLURM_NODEID": "900000"}
    assert world.find_place(variables).local_size == 2


@pytest.mark.parametrize("text", [each for each in NO_NUMBERS if each not in ("9" * 19, str(1 << 63), str(1 << 64))])
def test_what_is_no_number_of_a_worker_is_refused(text: str) -> None:
    expect_refusal(lambda: gate._read_number({"ENGINE_WORKER": text}, "ENGINE_WORKER"), "ENGINE_WORKER")


def options() -> Iterator[str]:
    """Options of the launcher that take a number, except those whose value is a word or a path."""
    yield from (option for each in NUMBERS.values() if each.option is not None for option in each.options[:1])
    yield from ("-np", "--min-np", "--max-np", "--slots", "--reset-limit", "--start-timeout", "--elastic-timeout")
    yield from ("--cpus-per-rank", "-p", "--lease", "--fusion-threshold-mb")


@pytest.mark.sample(8)
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


# ---- numbers of peers, which JSON has brought

NO_FIELDS = (-1, 1 << 62, 1 << 200, 1.5, 1.0, 1e300, float("nan"), float("inf"), True, "1", "1_0", None, [], {}, [1])
"""Fields of a message that are no number of anything."""


@pytest.mark.parametrize("value", NO_FIELDS, ids=lambda value: str(value)[:20])
def test_what_is_no_number_of_a_message_is_refused(value: Any) -> None:
    message = Message("kind", {"it": value, "list": [3, value], "self": value})
    for limits in ((), PIDS, CODES):
        if (value, limits) != (-1, CODES):  # killed by SIGHUP
            with pytest.raises(ChannelError, match="it = "):
                message.get_number("it", *limits)
    with pytest.raises(ChannelError, match="list"):
        message.get_numbers("list")
    with pytest.raises(ChannelError, match="absent"):
        message.get_number("absent")
    if not isinstance(value, float | int) or isinstance(value, bool) or not -1e18 <= value <= 1e18:
        with pytest.raises(ChannelError):
            message.get_seconds("it")


def test_numbers_of_messages_are_taken_up_to_their_limits() -> None:
    message = Message("kind", {"it": 5, "list": [0, 5], "code": -9, "age": 0.25})
    assert message.get_number("it", 5, 5) == 5 and message.get_numbers("list") == [0, 5]
    assert message.get_number("code", *CODES) == -9 and message.get_seconds("age", 0, 1) == 0.25
    for least, most in ((6, 9), (0, 4)):
        with pytest.raises(ChannelError, match=f"from {least} to {most}"):
            message.get_number("it", least, most)


def welcome() -> dict[str, Any]:
    """Message of a leader to a rank of a world of 3 on two hosts, with two sockets for each lane."""
    return {
        "pids": [11, 12, 13],
        "processors": [[0], [1, 2], []],
        "hosts": [0, 0, 1],
        "host": 0,
        "kernels": None,
        "generation": 4,
        "crew": [0, 1],
        "trunks": [2],
        "lanes": [2],
        "sockets": 2,
        "descriptors": 7,
    }


@pytest.mark.parametrize("name", welcome())
def test_what_no_leader_tells_is_refused(name: str) -> None:
    messages.expect_welcome(welcome(), 3)
    others = {"kernels": [1, [], True], "generation": [-1, 1.5, None, "4"]}
    lists = ([3], [-1], [0, 0], [1.5], ["0"], [True], {}, None, [[-1], [1], [0]], [[1 << 20], [0], [0]], [11, 12])
    for value in others.get(name, (*NO_FIELDS, *lists)):
        if value not in ([], [1]) or name not in ("crew", "trunks", "lanes", "hosts"):
            with pytest.raises((ValueError, TypeError)):
                messages.expect_welcome({**welcome(), name: value}, 3)
    if name != "kernels":
        with pytest.raises((ValueError, TypeError)):
            messages.expect_welcome({each: value for each, value in welcome().items() if each != name}, 3)


@pytest.mark.parametrize("digits", ["", "-1", "0x1", "1_0", "G", "\u0661", "+1", " 1", "f" * 1025, 1, None, b"1"])
def test_what_is_no_mask_of_processors_is_refused(digits: Any) -> None:
    told = messages.Hello(0, 1, 5, [0, 3], {"version": 1}, []).to_message()
    assert messages.Hello.read(told).processors == [0, 3]
    with pytest.raises(ValueError, match="not a hello"):
        messages.Hello.read({**told, "processors": digits})


def place() -> dict[str, Any]:
    """Message of an agent that gives a worker its place in a world."""
    return {
        "world": 3,
        "rank": 1,
        "size": 2,
        "local_rank": 0,
        "local_size": 1,
        "cross_rank": 1,
        "cross_size": 2,
        "slot": ["b", 0],
    }


@pytest.mark.parametrize("name", place())
def test_what_is_no_place_of_a_worker_is_refused(name: str) -> None:
    assert gate._place_of(place()).rank == 1
    for value in (*NO_FIELDS, ["b", "0"], ["b"], ["b", 0, 1]):
        if name != "world" or value != 1 << 62:
            with pytest.raises(ReadError):
                gate._place_of({**place(), name: value})


def test_lists_of_a_world_have_an_entry_for_each_rank() -> None:
    good = {"members": [4, 7], "hosts": ["a", "b"]}
    assert gate._lists_of(good, 2) == {"members": (4, 7), "hosts": ("a", "b")}
    for name, value in (("members", [4]), ("members", [4, "7"]), ("members", None), ("hosts", ["a", 1]), ("hosts", {})):
        with pytest.raises(ReadError, match=name):
            gate._lists_of({**good, name: value}, 2)


@pytest.mark.parametrize("told", [[0, 5], [-1, 5], [1 << 40, 5], [7, -5], ["7", 5], [7.0, 5], [7], 7, None, [True, 5]])
def test_what_is_no_process_is_not_killed(told: Any) -> None:
    """A pid of -1 stands for every process of the user."""
    assert dead_workers._parse_process([7, 5]) == (7, 5)
    with pytest.raises(ChannelError, match="which is no process"):
        dead_workers._parse_process(told)


def test_numbers_of_workers_at_the_gate_are_bounded() -> None:
    said = {"kind": "committed", "world": 1, "commit": 2}
    assert worker_messages.check(said) == said
    for value in (-1, 1 << 62, 1 << 200, 1.5, True, "1", None):
        for name in ("world", "commit"):
            with pytest.raises(worker_messages.WorkerMessageError, match=name):
                worker_messages.check({**said, name: value})


# ---- numbers of files


@pytest.mark.parametrize("text", [*NO_NUMBERS, "1e999", "0x1p3", "", "1.2.3"])
def test_what_is_no_number_in_a_file_is_none(text: str) -> None:
    if text not in ("-1", "-0.5", "9" * 19, str(1 << 63), str(1 << 64)):
        assert bounded_reader.parse_decimal(text) is None
    assert bounded_reader.parse_natural(text) is None


def test_numbers_in_a_file_are_what_they_are() -> None:
    for text in ("0", "5", "5.", ".5", "-5.25", "+1e3", "1E-3", "9" * 18):
        assert bounded_reader.parse_decimal(text) == float(text)
    assert bounded_reader.parse_decimal("5", 4) is None and bounded_reader.parse_decimal("-5", 4) is None


@pytest.mark.parametrize("name", ["cycle_time_ms", "tensor_fusion_threshold", "score"])
def test_what_is_no_number_of_horovods_log_is_refused_with_its_line(name: str, tmp_path: Any) -> None:
    log = tmp_path / "log.csv"
    row = dict.fromkeys(horovod_csv.HEADER.split(","), "1")
    for text in NO_NUMBERS:
        if "," not in text and "\0" not in text:
            log.write_text(f"{horovod_csv.HEADER}\n{','.join((row | {name: text}).values())}\n")
            with pytest.raises(JournalError, match="line 2: expected a number in each column"):
                horovod_csv.read(log)
    log.write_text(f"{horovod_csv.HEADER}\n{','.join(row.values())}\n")
    assert horovod_csv.read(log)[0].knobs == {"fusion_threshold": 1 << 20, "cycle_time_ms": 1.0}


@pytest.mark.parametrize("name", ["seed", "max_trials", "horizon", "regret_budget", "proof"])
def test_what_is_no_number_of_a_replay_is_refused(name: str) -> None:
    row = {"seed": 1, "max_trials": 4, "settings": {}}
    for text in NO_NUMBERS:
        if name != "seed" or text != "9" * 19:
            with pytest.raises(PolicyError, match=f"--set {name} takes a"):
                policies.apply_changes(row, [f"{name}={text}"], "tuner")
    changed = policies.apply_changes(row, [f"{name}=7"], "tuner")
    assert 7 in (changed.get(name), changed["settings"].get(name))
