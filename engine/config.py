"""Every setting of the engine, once: a field of `Config` says all that there is to say of it.

The launcher's options, the table in the README, what `set_knobs` takes, the space that the tuner searches and the
gauges of the knobs follow from the fields. This is the one place that reads the environment: a setting `name` is read
from `ENGINE_NAME`, or from an alias that existing job scripts use; `engine.init(name=value)` overrides both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError
from .forms import Bytes, Number, Whole, Words, cache, level, optional, path, seconds, text, truth
from .host.kubernetes import service_links
from .setting import Knob, Option, Setting, read, setting, variable

# Horovod's variables that are no other name of a setting (those are given with the setting, as its alias).
# A switch: the setting that it decides when it is on, and the value.
SWITCHES = {"HOROVOD_STALL_CHECK_DISABLE": ("stall_warning", 0.0)}
# Nothing here to set.
WITHOUT_EFFECT = (
    *("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS"),
    *("HOROVOD_ELASTIC", "HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_LOG_HIDE_TIME"),
    *("HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_THREAD_AFFINITY"),
)


@dataclass(frozen=True)
class Config:
    """The settings of one engine."""

    fusion_threshold: int = setting(
        64 << 20,
        "bytes",
        Bytes(),
        "Close a batch when this much is ready; 0 sends every tensor alone.",
        "HOROVOD_FUSION_THRESHOLD",
        option=Option("SIZE"),
        knob=Knob(1 << 16, 1 << 30),
    )
    cycle_time_ms: float = setting(
        5.0,
        "milliseconds",
        Number(0, 10_000),
        "Close a batch when its first tensor has been ready for this long.",
        "HOROVOD_CYCLE_TIME",
        option=Option("MS"),
        knob=Knob(0.05, 50.0, off=0.0),
    )
    stall_warning: float = setting(
        60.0,
        "seconds",
        seconds(zero="never"),
        "Report tensors that some ranks have not brought for this long; 0 is never, 1e9 the most.",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        option=Option("S", ("--stall-check-warning-time-seconds",)),
    )
    stall_limit: float = setting(
        600.0,
        "seconds",
        seconds(zero="never"),
        "Fail the world when a rank stands still, or withholds a tensor, for this long; 0 is never, 1e9 the most.",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        option=Option("S", ("--stall-check-shutdown-time-seconds",)),
    )
    start_timeout: float = setting(
        60.0,
        "seconds",
        seconds(0.001),
        "How long `init` waits for the other ranks.",
        "HOROVOD_START_TIMEOUT",
        option=Option("S"),
    )
    shutdown_timeout: float = setting(
        10.0,
        "seconds",
        seconds(),
        "How long `shutdown` lets operations in flight finish.",
    )
    log_level: str = setting(
        "WARNING",
        "",
        level,
        "Least level of the engine's log records: trace, debug, info, warning, error, fatal.",
        "HOROVOD_LOG_LEVEL",
        option=Option("LEVEL"),
    )
    stores: str = setting(
        "auto",
        "",
        Words("auto", "cached", "streaming"),
        "How a reduction writes results: cached, for whoever reads them next, or streaming, past the caches; auto "
        "measures.",
        option=Option(),
        knob=Knob(),
    )
    chunk_bytes: int = setting(
        512 << 10,
        "bytes",
        Bytes(4 << 10, 1 << 20, "512K"),
        "Size of a chunk, the part of a tensor that goes through shared memory at a time: 4 KiB to 1 MiB.",
        option=Option("SIZE"),
        knob=Knob(),
    )
    compression: str = setting(
        "none",
        "",
        Words("none", "bf16", "fp16"),
        "What tensors with `Compression.tuned` travel as; no others.",
        option=Option(),
        knob=Knob(words=("none", "bf16")),  # fp16 overflows: a user may choose it, not the tuner
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
        Words("auto", "plain", "avx2", "avx512"),
        "Instruction set of the reduction kernels; the results have equal bits.",
    )
    spin_us: float | None = setting(
        None,
        "microseconds",
        optional(Number(0, 1000), "auto"),
        "How long a waiting thread spins before it sleeps; auto is 25, or 0 with more ranks than processors, "
        "where it yields in small operations instead.",
    )
    output_dir: Path | None = setting(
        None,
        "",
        optional(path, "auto"),
        "Where failure reports and flight records go, in rank.N below it; auto is a new temporary directory.",
    )
    timeline: Path | None = setting(
        None,
        "",
        optional(path, "dynamic"),
        "Record a timeline from `init` on: a directory, or NAME.json for NAME.rankN.json; dynamic: not yet.",
        "HOROVOD_TIMELINE",
        none="dynamic",
        option=Option("PATH", ("--timeline", "--timeline-filename")),
    )
    timeline_mark_cycles: bool = setting(
        False,
        "",
        truth,
        "Show in the timeline when each batch was closed.",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        option=Option(off=""),
    )
    timeline_limit: int = setting(
        256 << 20,
        "bytes",
        Bytes(),
        "What a rank's timeline may grow to.",
    )
    metrics: bool = setting(
        False,
        "",
        truth,
        "Count what the engine does, for `enginerun top`, Prometheus and the summary; enginerun switches it on.",
        option=Option(off="count nothing", on=False),
    )
    metrics_port: int | None = setting(
        None,
        "",
        optional(Whole(0, 65535), "none"),
        "Serve metrics of this host's ranks to Prometheus there; 0 is any free port.",
        none="none",
        option=Option("PORT"),
    )
    metrics_address: str = setting(
        "127.0.0.1",
        "",
        text,
        "The address on which they are served.",
        option=Option("ADDRESS"),
    )
    metrics_file_sd: Path | None = setting(
        None,
        "",
        optional(path, "none"),
        "Tell Prometheus there, in a file or a directory, where they are served.",
        none="none",
        option=Option("PATH"),
    )
    metrics_textfile: Path | None = setting(
        None,
        "",
        optional(path, "none"),
        "Write metrics to this file, for node_exporter's textfile collector.",
        none="none",
        option=Option("FILE"),
    )
    metrics_linger: float = setting(
        15.0,
        "seconds",
        seconds(),
        "How long a failed job of enginerun can still be scraped, if somebody has scraped it before.",
        option=Option("S"),
    )
    run_name: str | None = setting(
        None,
        "",
        optional(text, "auto"),
        "What metrics call the run; auto is made of the program's name and a process's number.",
        option=Option("NAME"),
    )
    autotune: bool = setting(
        False,
        "",
        truth,
        "Look for better knobs while training.",
        "HOROVOD_AUTOTUNE",
        option=Option(off=""),
    )
    autotune_log: Path | None = setting(
        None,
        "",
        optional(path, "none"),
        "Where the tuner writes its log; enginerun keeps it in its output directory, if that is given.",
        "HOROVOD_AUTOTUNE_LOG",
        none="none",
        option=Option("FILE", ("--autotune-log-file",)),
    )
    autotune_from: Path | None = setting(
        None,
        "",
        optional(path, "none"),
        "A log whose knobs to begin with; with `autotune`, to try first.",
        none="none",
        option=Option("LOG"),
    )
    autotune_cache: Path | Literal[False] | None = setting(
        None,
        "",
        cache,
        "Directory where the tuner keeps what it finds, for later jobs; auto is the user's cache directory, off none.",
        option=Option("DIR", off="keep and recall nothing"),
    )
    autotune_warmup: int = setting(
        1,
        "trials",
        Whole(0, 10_000),
        "Warm-up before the first trial: the steps of so many trials pass unmeasured.",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        option=Option("N", ("--autotune-warmup-samples",)),
    )
    autotune_steps: int = setting(
        20,
        "steps",
        Whole(1, 10_000),
        "Steps that a trial is measured by, at least.",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        option=Option("N", ("--autotune-steps-per-sample",)),
    )
    autotune_trials: int = setting(
        30,
        "trials",
        Whole(1, 1000),
        "Trials of a search, at most.",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        option=Option("N", ("--autotune-bayes-opt-max-samples",)),
    )


def environment() -> dict[str, str]:
    """A copy of the process's environment."""
    return dict(os.environ)


def settings(kind: type[Config] = Config) -> dict[str, Setting]:
    """All settings by name, in the order of their fields. `kind` may be a class that adds some."""
    return {entry.name: Setting(entry.name, entry.default, **entry.metadata) for entry in fields(kind)}


def knobs(kind: type[Config] = Config) -> dict[str, Setting]:
    """Those that can be changed while the engine runs."""
    return {name: each for name, each in settings(kind).items() if each.knob is not None}


def check_knobs(changes: Mapping[str, Any], kind: type[Config] = Config) -> dict[str, Any]:
    """Check changes of knobs, by name; None leaves a knob as it is.

    Raises
    ------
    ConfigError
        A value that cannot be, or what is no knob.
    """
    known = knobs(kind)
    return {name: _named(name, known, "knob").read(value) for name, value in changes.items() if value is not None}


def _named(name: str, known: Mapping[str, Setting], what: str) -> Setting:
    if name not in known:
        raise ConfigError(f"there is no {what} {name!r}; there are: {', '.join(known)}")
    return known[name]


def load(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None, kind: type[Config] = Config) -> Config:
    """Settings from the environment, then from the caller.

    Parameters
    ----------
    environ : mapping
        As from `environment()`. An empty value counts as not set.
    overrides : mapping, optional
        Values by setting name.
    kind : type
        `Config`, or a class that adds settings.

    Raises
    ------
    ConfigError
        A value that cannot be, or an override of a setting that does not exist.
    """
    return kind(**given(environ, overrides, kind))


def given(
    environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None, kind: type[Config] = Config
) -> dict[str, Any]:
    """Those settings that somebody has chosen; the parameters and errors are those of `load`."""
    known = settings(kind)
    found: dict[str, Any] = {}
    links = service_links(environ)
    environ = {name: value for name, value in environ.items() if value and name not in links}
    for source, (name, value) in SWITCHES.items():
        if source in environ and variable(name) not in environ and read(truth, environ[source], source):
            found[name] = value
    for each in known.values():
        sources = [source for source in (each.variable, each.alias) if source in environ]
        if sources and each.name not in found:
            found[each.name] = each.read(environ[sources[0]], sources[0])
    for name, value in (overrides or {}).items():
        found[name] = _named(name, known, "setting").read(value)
    return found


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """The variables of Horovod that are set and have nothing to set here."""
    return [name for name in WITHOUT_EFFECT if environ.get(name)]


def describe(kind: type[Config] = Config) -> str:
    """The settings as a table in Markdown, for the documentation."""
    rows = ["| setting | variable | unit | default | meaning |", "|---|---|---|---|---|"]
    for each in settings(kind).values():
        default = each.none if each.default is None else each.default
        rows.append(f"| `{each.name}` | `{each.variable}` | {each.unit} | {default} | {each.doc} |")
    return "\n".join(rows)
