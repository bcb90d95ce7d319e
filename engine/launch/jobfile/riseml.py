"""Parser of RiseML's descriptions of experiments, `riseml.yml`; errors name file, line and key."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...config.forms import LARGEST, Form, Whole
from ...text import bounded_reader
from ..cli import yaml_files
from ..errors import LaunchError

FRAMEWORKS = {"keras": "keras", "mxnet": "mxnet", "pytorch": "torch", "tensorflow": "tensorflow"}  # -> their packages
COUNT = Whole(1)
LONGEST_KEY = 100  # characters of an unknown key that are shown
_SHELL = set("$`|&;<>()*?[]{}~#!\n")  # characters with a meaning in a shell
_BUILTINS = frozenset(  # builtins of a POSIX shell, most of which are no programs
    ": . alias bg break cd command continue eval exec exit export fc fg getopts hash jobs read readonly return set "
    "shift times trap type ulimit umask unalias unset wait".split()
)
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Told:
    """A value of the file, and its place there, such as `riseml.yml:7: train.resources.cpus`."""

    value: Any
    place: str


@dataclass(frozen=True)
class Description:
    """An experiment. `gpus`, `cpus` and `mem` are the resources of each worker."""

    project: str
    framework: str  # one of `FRAMEWORKS`
    version: Told | None  # version of the framework; None if the file names none
    distributed: bool  # whether there is a section `horovod`
    workers: int
    processes: int  # number of processes of each worker
    gpus: Told | None
    cpus: Told | None
    mem: Told | None  # memory in MiB
    run: tuple[str, ...]  # lines that each process executes, one after another

    @property
    def size(self) -> int:
        """Number of all processes: the ranks."""
        return self.workers * self.processes


class _Section:
    """A section of the file; unknown keys are refused. `name` is its path of keys, from the outermost one."""

    def __init__(self, file: str, node: Any, name: str, allowed: Sequence[str]) -> None:
        self._file, self._node, self._name = file, node, name
        self._allowed = f"allowed {f'in {name}' if name else 'at the top'}: {', '.join(allowed)}"
        self._keys: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        if not hasattr(node, "value") or node.id != "mapping":
            self.raise_error(node, name, f"it is a section, with keys below it; {self._allowed}")
        for key, value in node.value:
            known = key.value if key.id == "scalar" else ""
            if known not in allowed:
                self.raise_error(key, self.join_path(known[:LONGEST_KEY]), f"not known; {self._allowed}")
            if known in self._values:
                self.raise_error(key, self.join_path(known), "it stands here twice: leave one out")
            self._keys[known], self._values[known] = key, value

    def join_path(self, key: str) -> str:
        """Return the full path of a key of this section."""
        return f"{self._name}.{key}" if self._name else key

    def raise_error(self, node: Any, key: str, why: str) -> NoReturn:
        """Raise a `LaunchError` about a node, or about the whole file if the node is None."""
        raise LaunchError(f"{self._format_place(node)}: {f'{key}: ' if key else ''}{why}")

    def _format_place(self, node: Any) -> str:
        return self._file if node is None else f"{self._file}:{node.start_mark.line + 1}"

    def has_key(self, key: str) -> bool:
        """Return whether a key is there, with a value or without."""
        return key in self._values

    def require_keys(self, *keys: str) -> None:
        """Raise a `LaunchError` if the section lacks one of these keys."""
        for key in keys:
            if key not in self._values:
                self.raise_error(self._node, self.join_path(key), f"it is missing; {self._allowed}")

    def refuse_key(self, key: str, why: str) -> NoReturn:
        """Raise a `LaunchError` about a key that is there."""
        self.raise_error(self._keys[key], self.join_path(key), why)

    def read_section(self, key: str, *allowed: str) -> _Section:
        """Return the section at a key of this one."""
        return _Section(self._file, self._values[key], self.join_path(key), allowed)

    def is_section(self, key: str) -> bool:
        """Return whether a key has keys below it."""
        return bool(self._values[key].id == "mapping")

    def read(self, key: str, form: Form) -> Told | None:
        """Return the value of a key, parsed by `form`; None if the key is missing."""
        if key not in self._values:
            return None
        node = self._values[key]
        if node.id != "scalar" or node.tag == _NULL:
            self.raise_error(
                node, self.join_path(key), f"it takes {_describe_form(form)}, and nothing or a section stands here"
            )
        try:
            return Told(form(node.value), f"{self._format_place(node)}: {self.join_path(key)}")
        except ValueError as error:
            self.raise_error(node, self.join_path(key), f"{bounded_reader.shorten_text(node.value)!r} is not {error}")

    def read_required(self, key: str, form: Form) -> Any:
        """Return the value of a key that must be there, parsed by `form`."""
        self.require_keys(key)
        told = self.read(key, form)
        return None if told is None else told.value

    def read_lines(self, key: str) -> tuple[str, ...]:
        """Return the lines of a key, whose value is a line or a list of lines."""
        node = self._values[key]
        nodes = node.value if node.id == "sequence" else [node]
        for each in nodes:
            if each.id != "scalar" or each.tag == _NULL or not each.value.strip():
                self.raise_error(
                    each, self.join_path(key), "it takes a list of command lines, such as '- python train.py'"
                )
        if not nodes:
            self.raise_error(node, self.join_path(key), "the list is empty: write '- python train.py' below it")
        return tuple(each.value.strip() for each in nodes)


def _describe_form(form: Form) -> str:
    """Return the text by which a form describes its values."""
    try:
        form("")
    except ValueError as error:
        return str(error)
    return "a text"


def _parse_text(value: str) -> str:
    if not value.strip():
        raise ValueError("a text that is not blank")
    return value.strip()


def _parse_framework(value: str) -> str:
    if value not in FRAMEWORKS:
        raise ValueError(f"one of {', '.join(FRAMEWORKS)}")
    return value


def describe(path: Path) -> Description:
    """Read a description of an experiment.

    If the file cannot be read, or is invalid, a `LaunchError` names file, line and key, and what is allowed there.
    """
    file = str(path)
    top = _Section(file, _parse_file(path), "", ("project", "train"))
    top.require_keys("train")
    project = top.read("project", _parse_text)
    train = top.read_section("train", "framework", "resources", "run", *FRAMEWORKS)
    train.require_keys("framework", "run")
    framework = train.read_required("framework", _parse_framework)
    for other in FRAMEWORKS:
        if other != framework and train.has_key(other):
            train.refuse_key(other, f"the framework is {framework}: rename this section, or the framework")
    version, distributed, workers, processes = None, False, 1, None
    if train.has_key(framework):
        own = train.read_section(framework, "horovod", "version")
        version = own.read("version", _parse_text)
        distributed = own.has_key("horovod")
        if distributed:
            workers, processes = _read_workers(own.read_section("horovod", "workers"))
    gpus = cpus = mem = None
    if train.has_key("resources"):
        resources = train.read_section("resources", "cpus", "gpus", "mem")
        gpus, cpus, mem = (
            resources.read(key, form) for key, form in (("gpus", Whole(0)), ("cpus", COUNT), ("mem", Whole(1, LARGEST)))
        )
    if processes is None:
        processes = max(1, gpus.value) if gpus is not None and distributed else 1
    return Description(
        project="" if project is None else project.value,
        framework=framework,
        version=version,
        distributed=distributed,
        workers=workers,
        processes=processes,
        gpus=gpus,
        cpus=cpus,
        mem=mem,
        run=train.read_lines("run"),
    )


def _read_workers(horovod: _Section) -> tuple[int, int | None]:
    """Return the number of workers, and of processes of each worker; None if the file does not say the latter."""
    horovod.require_keys("workers")
    if not horovod.is_section("workers"):
        return horovod.read_required("workers", COUNT), None
    workers = horovod.read_section("workers", "count", "processes")
    processes = workers.read("processes", COUNT)
    return workers.read_required("count", COUNT), None if processes is None else processes.value


def _parse_file(path: Path) -> Any:
    """Parse the file into YAML nodes, which have line numbers."""
    try:
        return yaml_files.parse_nodes(bounded_reader.read_text(path, yaml_files.LARGEST))
    except ModuleNotFoundError:
        raise LaunchError(f"{str(path)!r} is YAML, which needs PyYAML: 'pip install pyyaml'") from None
    except (OSError, bounded_reader.ReadError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"cannot read {str(path)!r}: {why}; write 'enginerun job FILE'") from error
    except yaml_files.YAMLFileError as error:
        place = str(path) if error.line is None else f"{path}:{error.line}"
        raise LaunchError(f"{place}: no YAML: {error}") from error


def command_of(line: str) -> tuple[str, ...]:
    """Return program and arguments of a line; a line that needs a shell is run by `sh -c`.

    A `LaunchError` is raised if a quotation is not closed.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise LaunchError(f"train.run: {line!r}: {error}") from None
    if _SHELL & set(line) or not words or "=" in words[0] or words[0] in _BUILTINS:
        return ("sh", "-c", line)
    return tuple(words)
