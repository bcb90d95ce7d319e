"""The command line of `enginerun`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...config import config
from ...config.config import Config
from ...config.forms import LARGEST, Number, Whole, Words, make_argument_type, make_duration_form, parse_truth
from ...config.setting import Option, Setting, read, variable_name
from ...errors import ConfigError
from ...host.python_startup import find_startup_obstacle
from ...text import readable
from ..errors import LaunchError
from ..hosts.host_list import HostRanks
from ..hosts.reach import NO_OPTIONS, Ignored, Reach, add_reach, hosts_of, idle_of, places_of, reach_of
from ..process.plan import MOST_RANKS, PUBLISHING
from . import horovod_options
from .elastic_options import Elastic, add_elastic, elastic_of

COUNT = Whole(1)
MEBIBYTE = 1 << 20
GROUPS = {"autotune": "tuning", "metrics": "metrics", "run": "metrics"}  # first word of a setting -> help group


@dataclass(frozen=True)
class Options:
    """The parsed and validated command line."""

    size: int  # number of ranks
    command: tuple[str, ...]  # program and arguments of every rank
    directory: Path | None  # directory of the job's files; None for a private temporary directory
    settings: dict[str, str]  # engine settings given by options, as text, by environment variable
    binding: bool
    cpus_per_rank: int | None
    grace: float  # seconds between the stages by which a job is ended
    timestamps: bool
    verbose: bool
    quiet: bool
    summary: bool  # whether to print figures of the run at its end
    horovod: bool  # whether `import horovod.torch` gives `engine.torch`, and so for the other frameworks
    torchrun: bool  # whether ranks get torchrun's variables too
    ignored: tuple[str, ...]  # options that were accepted without effect
    memory: int | None = None  # limit of a rank's private memory in bytes; no option sets it, nor the next two
    # GPUs and processes of each worker of a RiseML job; None: CUDA_VISIBLE_DEVICES is left as it is
    gpus: tuple[int, int] | None = None
    enclosed: bytes = b""  # content of a file that every host gets (`remote_files.ENCLOSED`); empty: no file
    # Hosts whose agents start ranks; empty: all ranks start here, or the job is elastic
    places: tuple[HostRanks, ...] = ()
    reach: Reach = NO_OPTIONS  # access to hosts with agents
    idle: tuple[str, ...] = ()  # hosts that were given and get no rank
    elastic: Elastic | None = None  # None: the job is not elastic

    @property
    def most(self) -> int:
        """Largest number of ranks at a time."""
        return self.size if self.elastic is None else self.elastic.max_size


class _Parser(argparse.ArgumentParser):
    settings: Mapping[str, Setting]

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}{self._make_hint(message)} (see 'enginerun --help')")

    def _make_hint(self, message: str) -> str:
        """Return a hint on what the first unknown option may mean; empty if there is none."""
        before, found, rest = message.partition("unrecognized arguments: --")
        if before or not found:
            return ""
        unknown = "--" + rest.split()[0].partition("=")[0]
        setting = self.settings.get(unknown[2:].replace("-", "_"))
        if setting is not None and setting.option is not None:
            return f"; did you mean {setting.options[0]}?"
        if setting is not None:
            return f"; a setting without an option: put {setting.variable}=VALUE into the environment"
        near = difflib.get_close_matches(unknown, self._option_string_actions, 1)
        return f"; did you mean {near[0]}?" if near else ""


class _Set(argparse.Action):
    """Option of a setting: its value is validated at once, and kept as text for the ranks. The last one counts."""

    def __init__(self, setting: Setting, text: Callable[[str], str] = str.strip, **more: Any) -> None:
        super().__init__(**more | {"dest": argparse.SUPPRESS})
        self._setting = setting
        self._text = text

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            text = self._text(self.const or values)
            value = self._setting.read(text, option_string)
        except ConfigError as error:
            raise argparse.ArgumentError(None, str(error)) from None
        # Ranks may work in another directory when they read it.
        text = str(value) if isinstance(value, Path) else text
        namespace.settings = namespace.settings | {self._setting.variable: text}


class _Version(argparse.Action):
    """Option that shows the version, which is looked up only then, because that takes longer than starting a rank."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .check_build import format_version

        readable.print_plain(format_version())
        parser.exit()


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .check_build import format_table

        readable.print_plain(format_table())
        parser.exit()


def parse(arguments: Sequence[str], kind: type[Config] = Config) -> Options:
    """Parse and validate the command line, given without the program's name.

    `kind` is the class of the settings: `Config`, or one that adds some. A `LaunchError` is raised if the command line
    is invalid, and `SystemExit` after `--help`, `--version` and `--check-build`.
    """
    parser = _make_parser(config.list_settings(kind))
    given = parser.parse_args(arguments)
    if given.config_file is not None:
        # The command line overrides the file, because the last one of an option that is given twice counts.
        known = {name for action in parser._actions for name in action.option_strings}
        from_file = horovod_options.arguments_of(given.config_file, known - {"--config-file"})
        given = parser.parse_args([*from_file, *arguments])
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise LaunchError("no command to run: write it after the options, as in 'enginerun -np 4 python train.py'")
    hosts = hosts_of(given)
    elastic = elastic_of(given, hosts)
    size = _size(given, hosts) if elastic is None else elastic.size
    places = () if elastic is not None else places_of(given, hosts, size)
    if given.horovod and (obstacle := find_startup_obstacle(command)):
        raise LaunchError(f"--horovod does not reach this command: {obstacle}")
    return Options(
        size=size,
        command=tuple(command),
        directory=given.output_dir,
        settings=_collect_settings(given),
        binding=given.binding,
        cpus_per_rank=given.cpus_per_rank,
        grace=given.grace_period,
        timestamps=given.prefix_output_with_timestamp,
        verbose=given.verbose,
        quiet=given.quiet,
        summary=given.summary,
        horovod=given.horovod,
        torchrun=not given.horovod if given.torchrun is None else given.torchrun,
        ignored=_select_ignored(given.ignored, places, elastic),
        places=places,
        reach=reach_of(given),
        idle=idle_of(given, hosts, size) if elastic is None else (),
        elastic=elastic,
    )


def _select_ignored(names: Sequence[str], places: Sequence[HostRanks], elastic: Elastic | None) -> tuple[str, ...]:
    """Return those of the given options that have no effect in this job."""
    effective: set[str] = set()
    if places or elastic is not None:
        effective |= horovod_options.FAR.keys()
    if elastic is not None:
        effective |= horovod_options.ELASTIC.keys()
    return tuple(name for name in names if name not in effective)


def load(options: Options, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings given by options or the environment, by name, after the validation that ranks do, too.

    With `--no-metrics` the settings that publish metrics are ignored. If a value is invalid, a `LaunchError` names its
    variable.
    """
    environment = {**environment, **options.settings}
    if options.settings.get(variable_name("metrics")) == "0":
        environment = {name: text for name, text in environment.items() if name not in map(variable_name, PUBLISHING)}
    try:
        return config.read_given(environment)
    except ConfigError as error:
        raise LaunchError(str(error)) from None


def _make_parser(settings: Mapping[str, Setting]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="enginerun",
        usage="enginerun -np N [options] [--] command [arguments]",
        description="Start a command as N ranks on this host or several, show their output line by line, and end them "
        "together.",
        epilog="'enginerun doctor -H a,b' tells what hosts lack; 'enginerun top' watches a running job; 'enginerun "
        "dashboards export DIR' writes dashboards for Grafana and rules for Prometheus; 'enginerun foresee' predicts a "
        "step on more hosts; 'enginerun job' runs a riseml.yml. All have --help.",
        allow_abbrev=False,
    )
    parser.settings = settings
    add = parser.add_argument
    add("-np", "-n", "--num-proc", "--np", type=_parse_ranks, metavar="N", help="number of ranks")
    add("-H", "--hosts", metavar="NAME:SLOTS,..", help="hosts and the ranks that each takes (default: this host)")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="file of hosts, in lines 'NAME slots=N'")
    add("--output-dir", "--output-filename", type=Path, metavar="DIR", help="directory for rank.N/stdout and the like")
    add("--prefix-output-with-timestamp", action="store_true", help="begin each line of output with the time")
    add(
        "--grace-period",
        type=make_argument_type(make_duration_form()),
        default=5.0,
        metavar="S",
        help="seconds from a failure or a signal to SIGTERM, and from there to SIGKILL (default 5)",
    )
    add("--verbose", action="store_true", help="show how each rank is started")
    add("--quiet", "-q", action="store_true", help="print none of enginerun's own lines unless the job fails")
    add("--summary", action="store_true", help="print figures of the run at its end, with advice")
    add("--version", "-v", action=_Version, nargs=0, help="show the version and exit")
    add("--check-build", "-cb", action=_CheckBuild, nargs=0, help="show what this installation can do and exit")
    add(
        "--torchrun-variables",
        dest="torchrun",
        action=argparse.BooleanOptionalAction,
        help="give ranks torchrun's RANK, WORLD_SIZE, MASTER_PORT .. too, by which Trainer and Accelerate wrap a model "
        "in DDP (default: yes, but not with --horovod)",
    )
    add_reach(parser)
    add_elastic(parser)
    _add_placement(parser)
    _add_settings(parser, settings)
    _add_horovods(parser, settings)
    parser.set_defaults(ignored=[], settings={})
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("CPUs")
    group.add_argument("--no-binding", dest="binding", action="store_false", help="let ranks run on any CPU")
    group.add_argument(
        "--cpus-per-rank",
        type=make_argument_type(COUNT),
        metavar="N",
        help="CPUs and threads per rank (default: an equal share)",
    )


def _add_horovods(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    add = parser.add_argument_group("scripts and command lines written for Horovod").add_argument
    add("--horovod", action="store_true", help="make 'import horovod.torch' give engine.torch, and so on")
    add("--config-file", type=Path, metavar="FILE", help="file of more options, as YAML, TOML or JSON")
    add(
        "--fusion-threshold-mb",
        action=_Set,
        setting=settings["fusion_threshold"],
        text=_parse_mebibytes,
        metavar="MB",
        help="the fusion threshold in MiB",
    )
    add("--stall-check", action="store_true", default=None, help="warn of late ranks, then fail (the default)")
    add("--no-stall-check", dest="stall_check", action="store_false", help="wait for late ranks without limit")
    for options, values in (
        (horovod_options.FLAGS, 0),
        (horovod_options.WITH_VALUE, None),
    ):
        for option in options:
            add(option, action=Ignored, nargs=values, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_settings(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Add the options of those settings that have one."""
    groups = {title: parser.add_argument_group(title) for title in ("engine settings", "tuning", "metrics")}
    for each in settings.values():
        if each.option is not None:
            group = groups[GROUPS.get(each.name.partition("_")[0], "engine settings")]
            _add_setting(group, each, each.option)


def _add_setting(group: Any, each: Setting, option: Option) -> None:
    about = (each.doc[0].lower() + each.doc[1:]).rstrip(".").replace("`", "").replace("%", "%%")
    if each.parse is parse_truth:
        form = {"nargs": 0, "const": "1"}
    else:
        words = each.parse.words if isinstance(each.parse, Words) else ()
        form = {"metavar": "{" + ",".join(words) + "}" if words else option.value}
    if option.on:
        group.add_argument(*each.options, action=_Set, setting=each, help=about, **form)
    if option.off is not None:
        names = [f"--no-{name[2:]}" for name in each.options]
        shown = option.off or argparse.SUPPRESS
        text = "0" if each.parse is parse_truth else "off"
        group.add_argument(*names, action=_Set, setting=each, nargs=0, const=text, help=shown)


def _size(given: argparse.Namespace, hosts: Sequence[tuple[str, int]] | None) -> int:
    """Return the number of ranks, from `-np` or the slots of the hosts."""
    slots = None if hosts is None else sum(slots for _, slots in hosts)
    size: int | None = given.num_proc or slots
    if size is None:
        raise LaunchError("the number of ranks is missing: give -np N, as in 'enginerun -np 4 python train.py'")
    if size > MOST_RANKS:
        raise LaunchError(f"{size} ranks are too many: a job has {MOST_RANKS} at most; give -np fewer")
    if slots is not None and size > slots:
        raise LaunchError(f"-np {size} needs more slots than the {slots} of the hosts: give fewer ranks or more slots")
    return size


def _collect_settings(given: argparse.Namespace) -> dict[str, str]:
    """Return the settings given by options, by variable; others are left to the environment and the defaults."""
    settings: dict[str, str] = dict(given.settings)
    if given.stall_check is False:
        settings |= dict.fromkeys((variable_name("stall_warning"), variable_name("stall_limit")), "0")
    known = config.list_settings()
    # A setting whose value means nothing, such as `none`, is not asked for.
    values = {name: each.read(settings[each.variable]) for name, each in known.items() if each.variable in settings}
    log = values.get("autotune_from")
    if log is not None and not log.is_file():
        raise LaunchError(f"--autotune-from: there is no file {str(log)!r}")
    asked = [name for name in PUBLISHING if values.get(name) is not None]
    if asked and settings.get(variable_name("metrics")) == "0":
        raise LaunchError(f"--no-metrics leaves nothing for --{asked[0].replace('_', '-')}: drop one of them")
    return settings


def _parse_ranks(text: str) -> int:
    """Parse a number of ranks. For `-np4` without a blank, argparse passes `p4` as the value of `-n`."""
    return int(make_argument_type(COUNT)(text[1:] if text[:1] == "p" and text[1:].isdigit() else text))


def _parse_mebibytes(text: str) -> str:
    """Convert a number of MiB to bytes, both as text."""
    return str(round(read(Number(0, LARGEST / MEBIBYTE), text, "--fusion-threshold-mb") * MEBIBYTE))
