"""The command line of `enginerun`."""

from __future__ import annotations

import argparse
import math
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..compat import switch
from ..host.patience import LONGEST
from . import horovod_options
from .check_build import table
from .errors import LaunchError
from .hosts import read_hostfile, slots_here

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
STORES = ("auto", "cached", "streaming")
COMPRESSIONS = ("none", "bf16", "fp16")
MEBIBYTE = 1 << 20
MOST_RANKS = 256  # of a host; the shared words of the engine have room for so many (engine_ext/control/layout.h)


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes
    ----------
    size : int
        Number of ranks.
    command : tuple of str
        Program and arguments of every rank.
    directory : Path or None
        Where the job's files go; None for a private temporary directory.
    settings : dict of str to str
        Engine settings, by variable.
    metrics : dict of str to str
        Settings of the metrics, by variable: the launcher acts on them.
    binding : bool
    cpus_per_rank : int or None
    grace : float
        Seconds between the stages of an ending.
    timestamps, verbose, quiet : bool
    summary : bool
        Say at the end what the run was like.
    horovod : bool
        `import horovod.torch` gives `engine.torch`.
    torchrun : bool
        Ranks are given torchrun's variables too.
    ignored : tuple of str
        Options that were accepted and do nothing.
    """

    size: int
    command: tuple[str, ...]
    directory: Path | None
    settings: dict[str, str]
    metrics: dict[str, str]
    binding: bool
    cpus_per_rank: int | None
    grace: float
    timestamps: bool
    verbose: bool
    quiet: bool
    summary: bool
    horovod: bool
    torchrun: bool
    ignored: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message} (see 'enginerun --help')")


class _Ignored(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


class _Version(argparse.Action):
    """Look the version up only when asked: it takes longer than starting a rank."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            known = version(parser.prog)
        except PackageNotFoundError:
            known = "(a source tree that was never installed)"
        print(parser.prog, known)
        parser.exit()


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(table())
        parser.exit()


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Parameters
    ----------
    arguments : sequence of str
        Without the program's name.

    Returns
    -------
    Options

    Raises
    ------
    LaunchError
        If it makes no sense.
    SystemExit
        After `--help`, `--version` and `--check-build`.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.config_file is not None:
        # The command line goes before the file: of an option that is given twice, the last counts.
        known = {name for action in parser._actions for name in action.option_strings}
        from_file = horovod_options.arguments_of(given.config_file, known - {"--config-file"})
        given = parser.parse_args([*from_file, *arguments])
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise LaunchError("no command to run: write it after the options, as in 'enginerun -np 4 python train.py'")
    size = _size(given)
    horovod_options.check_static(size, given.min_np, given.max_np, given.host_discovery_script)
    if given.horovod and (obstacle := switch.obstacle(command)):
        raise LaunchError(f"--horovod does not reach this command: {obstacle}")
    return Options(
        size=size,
        command=tuple(command),
        directory=given.output_dir,
        settings=_settings(given),
        metrics=_metrics(given),
        binding=given.binding,
        cpus_per_rank=given.cpus_per_rank,
        grace=given.grace_period,
        timestamps=given.prefix_output_with_timestamp,
        verbose=given.verbose,
        quiet=given.quiet,
        summary=given.summary,
        horovod=given.horovod,
        torchrun=not given.horovod if given.torchrun is None else given.torchrun,
        ignored=tuple(given.ignored),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="enginerun",
        usage="enginerun -np N [options] [--] command [arguments]",
        description="Start a command as N ranks on this host, show their output line by line, and end them together.",
        epilog="'enginerun top' watches a running job; 'enginerun dashboards export DIR' writes dashboards for Grafana "
        "and rules for Prometheus. Both have --help.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", "--np", type=_ranks, metavar="N", help="number of ranks")
    add("-H", "--hosts", metavar="NAME:SLOTS", help="hosts and their slots; so far this host only")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="the same from a file of lines 'NAME slots=N'")
    add("--output-dir", "--output-filename", type=Path, metavar="DIR", help="keep rank.N/stdout and rank.N/stderr here")
    add("--prefix-output-with-timestamp", action="store_true", help="put the time in front of each line")
    add(
        "--grace-period",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds from a failure or a signal to SIGTERM, and on to SIGKILL (default 5)",
    )
    add("--verbose", action="store_true", help="say what is started")
    add("--quiet", "-q", action="store_true", help="print nothing of its own unless something fails")
    add("--summary", action="store_true", help="say at the end what the run was like, and what to change")
    add("--version", "-v", action=_Version, nargs=0, help="show the version and exit")
    add("--check-build", "-cb", action=_CheckBuild, nargs=0, help="show what this installation can do and exit")
    add(
        "--torchrun-variables",
        dest="torchrun",
        action=argparse.BooleanOptionalAction,
        help="give ranks torchrun's RANK, WORLD_SIZE, MASTER_PORT .. too, by which Trainer and Accelerate wrap a model "
        "in DDP (default: yes, but not with --horovod)",
    )
    _add_placement(parser)
    _add_settings(parser)
    _add_tuning(parser)
    _add_metrics(parser)
    _add_horovods(parser)
    parser.set_defaults(ignored=[])
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("CPUs")
    group.add_argument("--no-binding", dest="binding", action="store_false", help="leave ranks free to run on any CPU")
    group.add_argument(
        "--cpus-per-rank", type=_count, metavar="N", help="threads and CPUs of a rank (default: an equal share)"
    )


def _add_horovods(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("scripts and command lines written for Horovod").add_argument
    add("--horovod", action="store_true", help="make 'import horovod.torch' give engine.torch")
    add("--config-file", type=Path, metavar="FILE", help="more options, in YAML, TOML or JSON")
    add("--min-np", "--min-num-proc", type=_count, metavar="N", help="must be the number of ranks")
    add("--max-np", "--max-num-proc", type=_count, metavar="N", help="must be the number of ranks")
    add("--host-discovery-script", metavar="FILE", help=argparse.SUPPRESS)
    for options, values in (
        (horovod_options.FLAGS, 0),
        (horovod_options.WITH_VALUE, None),
        (horovod_options.WITH_TWO_VALUES, 2),
    ):
        for option in options:
            add(option, action=_Ignored, nargs=values, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine settings").add_argument
    add("--start-timeout", type=_positive_seconds, metavar="S", help="seconds for all ranks to find each other")
    add("--fusion-threshold", type=_size_text, metavar="SIZE", help="fusion threshold: bytes, or with a unit, as 64M")
    add("--fusion-threshold-mb", dest="fusion_threshold", type=_mebibytes, metavar="MB", help="the same, in MiB")
    add("--cycle-time-ms", type=_amount, metavar="MS", help="cycle time, in ms")
    add("--stores", choices=STORES, help="how a reduction writes its result: " + ", ".join(STORES))
    add("--chunk-bytes", type=_size_text, metavar="SIZE", help="what goes through a slot at a time, 4K to 1M")
    add("--compression", choices=COMPRESSIONS, help="what tensors with Compression.tuned travel as")
    add("--stall-check-warning-time-seconds", type=_seconds, metavar="S", help="warn of a rank that is late this long")
    add("--stall-check-shutdown-time-seconds", type=_seconds, metavar="S", help="fail when a rank is late this long")
    add("--stall-check", action="store_true", default=None, help="look for late ranks (the default)")
    add("--no-stall-check", dest="stall_check", action="store_false", help="wait for late ranks for ever")
    add(
        "--timeline",
        "--timeline-filename",
        type=_path,
        metavar="PATH",
        help="record NAME.rankN.json, or into a directory",
    )
    add("--timeline-mark-cycles", action="store_true", default=None, help="show in it when each batch was closed")
    add("--no-timeline-mark-cycles", dest="timeline_mark_cycles", action="store_false", help=argparse.SUPPRESS)
    add("--log-level", type=str.lower, choices=LOG_LEVELS, metavar="LEVEL", help=", ".join(LOG_LEVELS))


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tuning").add_argument
    add("--autotune", action="store_true", default=None, help="look for better knobs while training")
    add("--no-autotune", dest="autotune", action="store_false", help=argparse.SUPPRESS)
    add("--autotune-log-file", type=Path, metavar="FILE", help="the tuner's log (default: in --output-dir, if given)")
    add(
        "--autotune-from",
        type=Path,
        metavar="LOG",
        help="begin with the knobs of a log; with --autotune try them first",
    )
    add("--autotune-cache", metavar="DIR", type=Path, help="where it keeps what it finds, for later jobs")
    add("--no-autotune-cache", dest="autotune_cache", action="store_false", help="keep and recall nothing")
    add("--autotune-warmup-samples", type=_count_or_none, metavar="N", help="let the steps of N trials pass first")
    add("--autotune-steps-per-sample", type=_count, metavar="N", help="steps of a trial")
    add("--autotune-bayes-opt-max-samples", type=_count, metavar="N", help="trials of a search, at most")


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("metrics").add_argument
    add("--metrics-port", type=_port, metavar="PORT", help="serve them to Prometheus here; 0: any free port")
    add("--metrics-address", type=_word, metavar="ADDRESS", help="the address to serve them on (default 127.0.0.1)")
    add("--metrics-file-sd", type=_path, metavar="PATH", help="tell Prometheus where, in a file *.json or a directory")
    add("--metrics-textfile", type=_path, metavar="FILE", help="write them to FILE.prom for node_exporter")
    add("--run-name", type=_word, metavar="NAME", help="what they call the run (default: SCRIPT-PID)")
    add("--no-metrics", dest="metrics", action="store_false", help="count nothing")


def _metrics(given: argparse.Namespace) -> dict[str, str]:
    """The settings of the metrics that were given, by variable."""
    found = {
        f"ENGINE_{name.upper()}": str(value)
        for name in ("metrics_port", "metrics_address", "metrics_file_sd", "metrics_textfile", "run_name")
        if (value := getattr(given, name)) is not None
    }
    if not given.metrics:
        asked = [name for name in ("port", "file_sd", "textfile") if f"ENGINE_METRICS_{name.upper()}" in found]
        if asked:
            raise LaunchError(
                f"--no-metrics leaves nothing for --metrics-{asked[0].replace('_', '-')}: drop one of them"
            )
        found["ENGINE_METRICS"] = "0"
    return found


def _size(given: argparse.Namespace) -> int:
    """Find the number of ranks from `-np` and the hosts."""
    hosts: str | None = given.hosts
    if given.hostfile is not None:
        try:
            hosts = read_hostfile(given.hostfile.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"--hostfile: cannot read {str(given.hostfile)!r}: {error}") from error
    slots = None if hosts is None else slots_here(hosts, {socket.gethostname(), socket.getfqdn()})
    size: int | None = given.num_proc or slots
    if size is None:
        raise LaunchError("the number of ranks is missing: give -np N, as in 'enginerun -np 4 python train.py'")
    if size > MOST_RANKS:
        raise LaunchError(f"{size} ranks are too many: a host carries {MOST_RANKS} at most; give -np fewer")
    if slots is not None and size > slots:
        raise LaunchError(f"-np {size} needs more slots than the {slots} of the hosts: give fewer ranks or more slots")
    return size


def _settings(given: argparse.Namespace) -> dict[str, str]:
    """Turn options into the engine's variables; what is not given is left to the environment and the defaults."""
    numbers: dict[str, float | None] = {
        "ENGINE_START_TIMEOUT": given.start_timeout,
        "ENGINE_CYCLE_TIME_MS": given.cycle_time_ms,
        "ENGINE_STALL_WARNING": given.stall_check_warning_time_seconds,
        "ENGINE_STALL_LIMIT": given.stall_check_shutdown_time_seconds,
        "ENGINE_AUTOTUNE": given.autotune,
        "ENGINE_AUTOTUNE_WARMUP": given.autotune_warmup_samples,
        "ENGINE_AUTOTUNE_STEPS": given.autotune_steps_per_sample,
        "ENGINE_AUTOTUNE_TRIALS": given.autotune_bayes_opt_max_samples,
    }
    if given.stall_check is False:
        numbers["ENGINE_STALL_WARNING"] = numbers["ENGINE_STALL_LIMIT"] = 0
    settings = {name: _plain(number) for name, number in numbers.items() if number is not None}
    words: dict[str, str | None] = {
        "ENGINE_FUSION_THRESHOLD": given.fusion_threshold,
        "ENGINE_STORES": given.stores,
        "ENGINE_CHUNK_BYTES": given.chunk_bytes,
        "ENGINE_COMPRESSION": given.compression,
        "ENGINE_LOG_LEVEL": given.log_level,
    }
    settings |= {name: word for name, word in words.items() if word is not None}
    paths: dict[str, Path | None] = {
        "ENGINE_TIMELINE": given.timeline,
        "ENGINE_AUTOTUNE_LOG": given.autotune_log_file,
        "ENGINE_AUTOTUNE_FROM": given.autotune_from,
        "ENGINE_AUTOTUNE_CACHE": given.autotune_cache or None,
    }
    if given.autotune_from is not None and not given.autotune_from.is_file():
        raise LaunchError(f"--autotune-from: there is no file {str(given.autotune_from)!r}")
    settings |= {name: str(path.absolute()) for name, path in paths.items() if path is not None}
    if given.autotune_cache is False:
        settings["ENGINE_AUTOTUNE_CACHE"] = "off"
    if given.timeline_mark_cycles is not None:
        settings["ENGINE_TIMELINE_MARK_CYCLES"] = str(int(given.timeline_mark_cycles))
    return settings


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)


def _number(
    kind: str, lowest: float, read: Callable[[str], float], most: float = sys.float_info.max
) -> Callable[[str], float]:
    """Make a reader of numbers that says what it wants."""

    def parse_number(text: str) -> float:
        try:
            number = read(text)
        except ValueError:
            number = math.nan
        if not lowest <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
        return number

    return parse_number


_count_or_none = _number("a whole number, 0 or more", 0, int)
_count = _number("a whole number of at least 1", 1, int)
_seconds = _number(f"a number of seconds from 0 to {LONGEST:g}", 0, float, LONGEST)
_positive_seconds = _number(f"a number of seconds above 0, up to {LONGEST:g}", 0.001, float, LONGEST)
_amount = _number("a number, 0 or more", 0, float)


def _ranks(text: str) -> float:
    """A number of ranks. Of `-np4`, written without a blank, argparse takes `p4` for the value of `-n`."""
    return _count(text[1:] if text[:1] == "p" and text[1:].isdigit() else text)


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def _word(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text.strip()


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _mebibytes(text: str) -> str:
    return str(round(_amount(text) * MEBIBYTE))


def _size_text(text: str) -> str:
    """A size as the engine reads it."""
    if not re.fullmatch(r"[0-9]+ ?([kmg]i?)?b?", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 67108864 or 64M")
    return text
