"""Every setting of the engine, once: name, unit, default, environment variable, parser and meaning.

The one place that reads the environment. A setting `name` is read from `ENGINE_NAME`, or from an alias that existing
job scripts use; `engine.init(name=value)` overrides both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError
from .host.kubernetes import service_links
from .host.patience import LONGEST

PREFIX = "ENGINE_"
_LEVELS = {"trace": "DEBUG", "fatal": "CRITICAL", "warn": "WARNING"}
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LARGEST = 1 << 60  # bytes

# Horovod's variables that are no other name of a setting (those are given with the setting, as its alias).
# A switch: the setting that it decides when it is on, and the value.
SWITCHES = {"HOROVOD_STALL_CHECK_DISABLE": ("stall_warning", 0.0)}
# Nothing here to set.
WITHOUT_EFFECT = (
    *("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS"),
    *("HOROVOD_ELASTIC", "HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_LOG_HIDE_TIME"),
    *("HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_THREAD_AFFINITY"),
)

Parser = Callable[[Any], Any]


def number(low: float, high: float, form: str = "a number from {low:g} to {high:g}") -> Parser:
    """A parser of numbers in [low, high]."""
    expected = form.format(low=low, high=high)

    def parse(value: Any) -> float:
        if isinstance(value, bool):
            raise ValueError(expected)
        try:
            result = float(value)
        except (TypeError, ValueError):
            raise ValueError(expected) from None
        if not low <= result <= high:
            raise ValueError(expected)
        return result

    return parse


def seconds(low: float = 0.0, zero: str = "") -> Parser:
    """A parser of durations from `low` to `LONGEST`; `zero` says what 0 means, where it is no duration."""
    return number(low, LONGEST, "a number of seconds from {low:g} to {high:g}" + (f"; 0 is {zero}" if zero else ""))


def whole(low: int, high: int) -> Parser:
    """A parser of whole numbers in [low, high]."""

    def parse(value: Any) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def size(value: Any) -> int:
    """Bytes: a whole number, with k, M or G (powers of 1024, an optional i and B) when written as text."""
    expected = "a number of bytes from 0 to 2^60, such as 67108864 or 64M"
    text = str(value).strip().lower()
    for ending in ("b", "i"):
        text = text.removesuffix(ending)
    suffix = text[-1:] if text[-1:] in ("k", "m", "g") else ""
    digits = text.removesuffix(suffix).strip()
    if isinstance(value, bool) or not (digits.isascii() and digits.isdigit()):
        raise ValueError(expected)
    if len(digits) > len(str(LARGEST)) or int(digits) * _SUFFIXES[suffix] > LARGEST:
        raise ValueError(expected)
    return int(digits) * _SUFFIXES[suffix]


def choice(*words: str) -> Parser:
    """A parser of one of `words`, in any case."""

    def parse(value: Any) -> str:
        text = str(value).strip().lower()
        if text not in words:
            raise ValueError("one of " + ", ".join(words))
        return text

    return parse


def chunk(value: Any) -> int:
    """Bytes that fit into a slot."""
    if not 4096 <= size(value) <= 1 << 20:
        raise ValueError("4096 to 1048576 bytes, such as 512K")
    return size(value)


def level(value: Any) -> str:
    """A level of the `logging` module, by name."""
    text = str(value).strip().lower()
    text = _LEVELS.get(text, text.upper())
    if text not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("one of trace, debug, info, warning, error, fatal")
    return text


def truth(value: Any) -> bool:
    """A switch."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    text = str(value).strip().lower()
    if text not in words:
        raise ValueError("1 or 0")
    return words[text]


def text(value: Any) -> str:
    """Some text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value.strip()


def path(value: Any) -> Path:
    """A path, made absolute."""
    if not isinstance(value, str | os.PathLike) or not str(value).strip() or "\0" in str(value):
        raise ValueError("a path")
    return Path(os.path.abspath(os.path.expanduser(value)))


def cache(value: Any) -> Path | Literal[False] | None:
    """A directory; None where the engine decides; False for nowhere."""
    text = "auto" if value is None else str(value).strip().lower()
    if text in ("auto", "none"):
        return None if text == "auto" else False
    try:
        return None if truth(text) else False
    except ValueError:
        pass
    try:
        return path(value)
    except ValueError as error:
        raise ValueError(f"auto, off, or {error}") from None


def _optional(parse: Parser, word: str) -> Parser:
    """`parse`, except that None and `word` mean None: the engine decides."""

    def parse_optional(value: Any) -> Any:
        if value is None or str(value).strip().lower() == word:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{word}, or {error}") from None

    return parse_optional


def setting(default: Any, unit: str, parse: Parser, doc: str, alias: str | None = None, none: str = "auto") -> Any:
    """A field of `Config`. `alias`: another variable that is read when ours is not set. `none`: the word for None."""
    return field(default=default, metadata={"unit": unit, "parse": parse, "doc": doc, "alias": alias, "none": none})


@dataclass(frozen=True)
class Config:
    """The settings of one engine."""

    fusion_threshold: int = setting(
        64 << 20,
        "bytes",
        size,
        "Close a batch when this much is ready; 0 sends every tensor alone.",
        "HOROVOD_FUSION_THRESHOLD",
    )
    cycle_time_ms: float = setting(
        5.0,
        "milliseconds",
        number(0, 10_000),
        "Close a batch when its first tensor has been ready for this long.",
        "HOROVOD_CYCLE_TIME",
    )
    stall_warning: float = setting(
        60.0,
        "seconds",
        seconds(zero="never"),
        "Report tensors that some ranks have not brought for this long; 0 is never, 1e9 the most.",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
    )
    stall_limit: float = setting(
        600.0,
        "seconds",
        seconds(zero="never"),
        "Fail the world when a rank stands still, or withholds a tensor, for this long; 0 is never, 1e9 the most.",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    )
    start_timeout: float = setting(
        60.0,
        "seconds",
        seconds(0.001),
        "How long `init` waits for the other ranks.",
        "HOROVOD_START_TIMEOUT",
    )
    shutdown_timeout: float = setting(
        10.0,
        "seconds",
        seconds(),
        "How long `shutdown` lets operations in flight finish.",
    )
    log_level: str = setting("WARNING", "", level, "Least level of the engine's log records.", "HOROVOD_LOG_LEVEL")
    stores: str = setting(
        "auto",
        "",
        choice("auto", "cached", "streaming"),
        "How a reduction writes results: cached, for whoever reads them next, or streaming, past the caches; auto "
        "measures.",
    )
    chunk_bytes: int = setting(512 << 10, "bytes", chunk, "What goes through a slot at a time.")
    compression: str = setting(
        "none",
        "",
        choice("none", "bf16", "fp16"),
        "What tensors with `Compression.tuned` travel as; no others.",
    )
    mathematical_gradients: bool = setting(
        False,
        "",
        truth,
        "In torch, gradients through collectives are those of the sum of all ranks' losses, not Horovod's averages.",
    )
    kernels: str = setting(
        "auto",
        "",
        choice("auto", "plain", "avx2", "avx512"),
        "Instruction set of the reduction kernels; the results have equal bits.",
    )
    spin_us: float | None = setting(
        None,
        "microseconds",
        _optional(number(0, 1000), "auto"),
        "How long a waiting thread spins before it sleeps; auto is 25, or 0 with more ranks than processors, "
        "where it yields in small operations instead.",
    )
    output_dir: Path | None = setting(
        None,
        "",
        _optional(path, "auto"),
        "Where failure reports and flight records go, in rank.N below it; auto is a new temporary directory.",
    )
    timeline: Path | None = setting(
        None,
        "",
        _optional(path, "dynamic"),
        "Record a timeline from `init` on: a directory, or NAME.json for NAME.rankN.json; dynamic: not yet.",
        "HOROVOD_TIMELINE",
        none="dynamic",
    )
    timeline_mark_cycles: bool = setting(
        False,
        "",
        truth,
        "Show in the timeline when each batch was closed.",
        "HOROVOD_TIMELINE_MARK_CYCLES",
    )
    timeline_limit: int = setting(
        256 << 20,
        "bytes",
        size,
        "What a rank's timeline may grow to.",
    )
    metrics: bool = setting(
        False,
        "",
        truth,
        "Count what the engine does, for `enginerun top`, Prometheus and the summary; enginerun switches it on.",
    )
    metrics_port: int | None = setting(
        None,
        "",
        _optional(whole(0, 65535), "none"),
        "Serve metrics of this host's ranks to Prometheus there; 0 is any free port.",
        none="none",
    )
    metrics_address: str = setting(
        "127.0.0.1",
        "",
        text,
        "The address on which they are served.",
    )
    metrics_file_sd: Path | None = setting(
        None,
        "",
        _optional(path, "none"),
        "Tell Prometheus there, in a file or a directory, where they are served.",
        none="none",
    )
    metrics_textfile: Path | None = setting(
        None,
        "",
        _optional(path, "none"),
        "Write metrics to this file, for node_exporter's textfile collector.",
        none="none",
    )
    run_name: str | None = setting(
        None,
        "",
        _optional(text, "auto"),
        "What metrics call the run; auto is made of the program's name and a process's number.",
    )
    autotune: bool = setting(
        False,
        "",
        truth,
        "Look for better knobs while training.",
        "HOROVOD_AUTOTUNE",
    )
    autotune_log: Path | None = setting(
        None,
        "",
        _optional(path, "none"),
        "Where the tuner writes its log.",
        "HOROVOD_AUTOTUNE_LOG",
        none="none",
    )
    autotune_from: Path | None = setting(
        None,
        "",
        _optional(path, "none"),
        "A log whose knobs to begin with; with `autotune`, to try first.",
        none="none",
    )
    autotune_cache: Path | Literal[False] | None = setting(
        None,
        "",
        cache,
        "Where the tuner keeps what it finds, for later jobs; auto is in the user's cache directory, off nowhere.",
    )
    autotune_warmup: int = setting(
        1,
        "trials",
        whole(0, 10_000),
        "What passes, in steps of so many trials, before the first one.",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    )
    autotune_steps: int = setting(
        20,
        "steps",
        whole(1, 10_000),
        "Steps that a trial is measured by, at least.",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    )
    autotune_trials: int = setting(
        30,
        "trials",
        whole(1, 1000),
        "Trials of a search, at most.",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    )


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def environment() -> dict[str, str]:
    """A copy of the process's environment."""
    return dict(os.environ)


def parse(name: str, value: Any, source: str | None = None) -> Any:
    """Check one value.

    Parameters
    ----------
    name : str
        A field of `Config`.
    value : Any
        Text from the environment, or what a caller gave.
    source : str, optional
        What to call it in an error; the setting's name by default.

    Raises
    ------
    ConfigError
        Naming the source, the value and the expected form.
    """
    for entry in fields(Config):
        if entry.name == name:
            return _parsed(entry.metadata["parse"], value, source or name)
    known = ", ".join(entry.name for entry in fields(Config))
    raise ConfigError(f"there is no setting {name!r}; there are: {known}")


def _parsed(parser: Parser, value: Any, source: str) -> Any:
    try:
        return parser(value)
    except ValueError as error:
        raise ConfigError(f"{source} is {value!r}; expected {error}") from None


def load(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> Config:
    """Settings from the environment, then from the caller.

    Parameters
    ----------
    environ : mapping
        As from `environment()`. An empty value counts as not set.
    overrides : mapping, optional
        Values by setting name.

    Raises
    ------
    ConfigError
        A value that cannot be, or an override of a setting that does not exist.
    """
    return Config(**given(environ, overrides))


def given(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Those settings that somebody has chosen; the parameters and errors are those of `load`."""
    values: dict[str, Any] = {}
    environ = {name: value for name, value in environ.items() if name not in service_links(environ)}
    for source, (name, value) in SWITCHES.items():
        if environ.get(source) and not environ.get(variable(name)) and _parsed(truth, environ[source], source):
            values[name] = value
    for entry in fields(Config):
        if entry.name in values:
            continue
        for source in (variable(entry.name), entry.metadata["alias"]):
            if source is not None and environ.get(source):
                values[entry.name] = parse(entry.name, environ[source], source)
                break
    for name, value in (overrides or {}).items():
        values[name] = parse(name, value)
    return values


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """The variables of Horovod that are set and have nothing to set here."""
    return [name for name in WITHOUT_EFFECT if environ.get(name)]


def describe() -> str:
    """The settings as a table in Markdown, for the documentation."""
    rows = ["| setting | variable | unit | default | meaning |", "|---|---|---|---|---|"]
    for entry in fields(Config):
        about = entry.metadata
        default = about["none"] if entry.default is None else entry.default
        rows.append(f"| `{entry.name}` | `{variable(entry.name)}` | {about['unit']} | {default} | {about['doc']} |")
    return "\n".join(rows)
