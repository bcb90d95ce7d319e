"""Options of `horovodrun` that `enginerun` accepts without effect, and the settings file of `--config-file`."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors.formatting import exception_text
from ...text import bounded_reader
from ..errors import LaunchError
from . import yaml_files

_NO_NETWORK = "all ranks are on this host"
_ONE_TRANSPORT = "shared memory on one host, TCP between hosts"
_ONE_ALGORITHM = "the ranks of a host always share memory"
_NOT_ELASTIC = "of elastic jobs, see --min-np"
_NOISE_IS_LEARNED = "the tuner learns how noisy steps are"
_ALWAYS_TIMED = "log lines have the time"

# Options that are accepted without effect, with the reason that is shown.
FLAGS = {
    "--disable-cache": "nothing is checked over the network",
    **dict.fromkeys(("--hierarchical-allreduce", "--no-hierarchical-allreduce"), _ONE_ALGORITHM),
    **dict.fromkeys(("--hierarchical-allgather", "--no-hierarchical-allgather"), _ONE_ALGORITHM),
    **dict.fromkeys(("--torus-allreduce", "--no-torus-allreduce"), _ONE_ALGORITHM),
    **dict.fromkeys(("--mpi-threads-disable", "--no-mpi-threads-disable"), _ONE_TRANSPORT),
    **dict.fromkeys(("--tcp", "--gloo", "--mpi", "--jsrun"), _ONE_TRANSPORT),
    **dict.fromkeys(("--log-with-timestamp", "--log-without-timestamp", "--log-hide-timestamp"), _ALWAYS_TIMED),
}
WITH_VALUE = {
    "--cache-capacity": "what ranks have agreed on is always kept",
    "--autotune-gaussian-process-noise": _NOISE_IS_LEARNED,
    **dict.fromkeys(("--mpi-args", "--binding-args", "--gloo-timeout-seconds"), _ONE_TRANSPORT),
    "--num-nccl-streams": "the work of a GPU goes to one stream of the engine's own",
    "--thread-affinity": "ranks are bound to CPUs, see --cpus-per-rank",
}
# Options for other hosts, which have no effect if all ranks are on this host.
FAR = dict.fromkeys(
    (
        *("-p", "--ssh-port", "-i", "--ssh-identity-file", "--ssh-options", "--launch-agent", "--remote-python"),
        *("--remote-directory", "--network-interface", "--network-interfaces"),
    ),
    _NO_NETWORK,
)
# Options of elastic jobs, which have no effect in other jobs.
ELASTIC = dict.fromkeys(
    (
        *("--slots-per-host", "--slots", "--elastic-timeout", "--reset-limit", "--blacklist-cooldown-range"),
        *("--np-multiple", "--slow-limit", "--slow-time", "--lease"),
    ),
    _NOT_ELASTIC,
)

# Sections of a settings file, with the prefix of the options for their keys; the key `enabled` is the section itself.
_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}


def without_effect(options: Iterable[str]) -> str:
    """Return one line on the options that were accepted without effect, with the reasons.

    They are keys of the tables above, in the order given.
    """
    reasons = FLAGS | WITH_VALUE | FAR | ELASTIC
    groups: dict[str, list[str]] = {}
    for option in dict.fromkeys(options):
        groups.setdefault(reasons[option], []).append(option)
    return "without effect: " + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in groups.items())


def arguments_of(path: Path, options: Collection[str]) -> list[str]:
    """Convert a settings file of `--config-file` into options, which must be among `options` of the command line.

    The file is JSON or TOML by its suffix, else YAML. It holds sections `params`, `autotune`, `timeline`,
    `stall_check`, `library_options` and `logging`, and options outside of them. A `LaunchError` is raised if it cannot
    be read, or a key stands for no option.
    """
    content = _read(path)
    if not isinstance(content, dict):
        raise LaunchError(f"--config-file: {str(path)!r} holds no settings by name, such as 'params: ...'")
    found = []
    for key, option, value in _list_entries(content):
        negated = f"--no-{option[2:]}"
        if option not in options or isinstance(value, dict | list):
            key = bounded_reader.shorten_text(key)
            raise LaunchError(f"--config-file: {str(path)!r} has {key!r}, which stands for no option of enginerun")
        if value is True:
            found.append(option)
        elif value is False:
            found += [negated] if negated in options else []
        elif value is not None:
            found.append(f"{option}={value}")
    return found


def _list_entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each setting of the file: its name there, its option and its value."""
    for name, value in content.items():
        section = str(name).replace("_", "-")
        if section not in _SECTIONS or not isinstance(value, dict):
            yield str(name), f"--{section}", value
            continue
        for key, setting in value.items():
            word = str(key).replace("_", "-")
            yield f"{name}.{key}", f"--{section}" if word == "enabled" else f"--{_SECTIONS[section]}{word}", setting


def _read(path: Path) -> Any:
    try:
        text = bounded_reader.read_text(path, yaml_files.LARGEST)
        if path.suffix == ".json":
            return bounded_reader.parse_json(text)
        if path.suffix == ".toml":
            return tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:  # errors of both formats, and of files that are no text
        raise LaunchError(f"--config-file: cannot read {str(path)!r}: {_one_line(error)}") from error
    try:
        return yaml_files.load(text)
    except ModuleNotFoundError:
        raise LaunchError(
            f"--config-file: {str(path)!r} is taken for YAML, which needs PyYAML: 'pip install pyyaml', or write it as "
            "a .toml or .json file"
        ) from None
    except yaml_files.YAMLFileError as error:
        place = "" if error.line is None else f", line {error.line}"
        raise LaunchError(f"--config-file: cannot read {str(path)!r}{place}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(exception_text(error).split())
