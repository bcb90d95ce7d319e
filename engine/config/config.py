"""Settings of the engine: each is one field of `Config` with its default, unit, form, meaning and names.

The launcher's options, the table in `docs/reference/settings.md`, the arguments of `set_knobs`, the tuner's search
space and the gauges of the knobs are derived from the fields. Only this module reads the environment. A setting `name`
is read from `ENGINE_NAME`, or from an alias that existing job scripts use; `engine.init(name=value)` overrides both.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError
from .forms import (
    Bytes,
    Number,
    Whole,
    WordOrFunction,
    Words,
    make_duration_form,
    make_optional,
    parse_cache,
    parse_level,
    parse_path,
    parse_text,
    parse_truth,
    parse_url,
)
from .setting import PREFIX, Knob, Option, Setting, define_setting, read, variable_name

_PROTOCOLS = ("tcp://", "udp://", "sctp://")  # of addresses of Services in Kubernetes

# Variables of Horovod that are not an alias of a setting.
# Switches: setting that the variable changes when it is on, and its value.
SWITCHES = {"HOROVOD_STALL_CHECK_DISABLE": ("stall_warning", 0.0)}
# Variables that are accepted and have no effect.
WITHOUT_EFFECT = (
    *("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "HOROVOD_CACHE_CAPACITY", "HOROVOD_DYNAMIC_PROCESS_SETS"),
    *("HOROVOD_ELASTIC", "HOROVOD_ELASTIC_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_LOG_HIDE_TIME"),
    *("HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_THREAD_AFFINITY"),
    *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME", "HOROVOD_MPI_THREADS_DISABLE"),
    *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_TORUS_ALLREDUCE"),
)


@dataclass(frozen=True)
class Config:
    """Settings of one engine."""

    fusion_threshold: int = define_setting(
        64 << 20,
        "bytes",
        Bytes(),
        "Bytes of ready tensors at which a batch closes; 0: every tensor is a batch of its own.",
        "HOROVOD_FUSION_THRESHOLD",
        option=Option("SIZE"),
        knob=Knob(1 << 16, 1 << 30),
    )
    cycle_time_ms: float = define_setting(
        5.0,
        "milliseconds",
        Number(0, 10_000),
        "Milliseconds for which a batch may wait for more tensors once its first is ready.",
        "HOROVOD_CYCLE_TIME",
        option=Option("MS"),
        knob=Knob(0.05, 50.0, off=0.0),
    )
    stall_warning: float = define_setting(
        60.0,
        "seconds",
        make_duration_form(zero="never"),
        "Seconds after which a warning names the ranks that have not submitted a tensor; 0: never; at most 1e9.",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        option=Option("S", ("--stall-check-warning-time-seconds",)),
    )
    stall_limit: float = define_setting(
        600.0,
        "seconds",
        make_duration_form(zero="never"),
        "Seconds without progress of a rank, or without its submission of a tensor that others wait for, after which "
        "all ranks fail; 0: never; at most 1e9.",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        option=Option("S", ("--stall-check-shutdown-time-seconds",)),
    )
    host_silence: float = define_setting(
        4.0,
        "seconds",
        Number(2.0, 60.0, "a number of seconds"),
        "Seconds without an answer of another host's kernel after which it is lost, and all ranks fail.",
        option=Option("S"),
    )
    start_timeout: float = define_setting(
        60.0,
        "seconds",
        make_duration_form(0.001),
        "Seconds that `init` waits for the other ranks.",
        "HOROVOD_START_TIMEOUT",
        option=Option("S"),
    )
    interface: str | None = define_setting(
        None,
        "",
        make_optional(parse_text, "auto"),
        "Interface of this host, or its address, to which ranks on other hosts connect; auto: the one by which it "
        "reaches rank 0's host.",
        "HOROVOD_GLOO_IFACE",
    )
    shutdown_timeout: float = define_setting(
        10.0,
        "seconds",
        make_duration_form(),
        "Seconds that `shutdown` waits for operations in flight.",
    )
    log_level: str = define_setting(
        "WARNING",
        "",
        parse_level,
        "Lowest level of log records that are shown: trace, debug, info, warning, error, fatal.",
        "HOROVOD_LOG_LEVEL",
        option=Option("LEVEL"),
    )
    stores: str = define_setting(
        "auto",
        "",
        Words("auto", "cached", "streaming"),
        "Store instructions by which reductions write results: cached, streaming (past the caches), or auto: whichever "
        "is faster for the size.",
        option=Option(),
        knob=Knob(host=True),
    )
    chunk_bytes: int = define_setting(
        512 << 10,
        "bytes",
        Bytes(4 << 10, 1 << 20, "512K"),
        "Bytes in one pipeline chunk, in which tensors pass through shared memory (4 KiB to 1 MiB).",
        option=Option("SIZE"),
        knob=Knob(host=True),
    )
    between_hosts: str = define_setting(
        "auto",
        "",
        Words("auto", "direct", "chain", "ring", "mpi"),
        "How large allreduces travel between hosts: direct, from each rank to every host; chain, as sums that pass "
        "from host to host; auto: whichever of these moves less, with equal bits; or, where fusion changes bits: ring, "
        "a chain with a start at every host, and with lanes=mpi also mpi, MPI_Allreduce of float32 and float64 sums.",
        option=Option(),
        knob=Knob(
            words=("auto", "direct", "chain"), host=True
        ),  # others change bits: a user may choose them, not the tuner
    )
    compression: str = define_setting(
        "none",
        "",
        Words("none", "bf16", "fp16", "fp8"),
        "How tensors with `Compression.tuned` and `tuned8` travel; others are not affected.",
        option=Option(),
        knob=Knob(words=("none", "bf16", "fp8")),  # fp16 overflows: a user may choose it, not the tuner
    )
    sockets_per_lane: int = define_setting(
        1,
        "sockets",
        Whole(1, 8),
        "Connections between two ranks on different hosts, equal on all ranks; later the knob says how many of those "
        "that were opened at the start are used.",
        option=Option("N"),
        knob=Knob(host=True),
    )
    lanes: str = define_setting(
        "tcp",
        "",
        WordOrFunction("tcp", "mpi"),
        "What carries large tensors between hosts, equal on all ranks: tcp; mpi, the MPI of `mpirun` by mpi4py; or "
        "module:function, a carrier from outside.",
        option=Option(),
    )
    device_sums: str = define_setting(
        "nccl",
        "",
        Words("nccl", "ordered"),
        "How sums and averages of tensors on GPUs are made, equal on all ranks: nccl, in NCCL's order and rounding; "
        "ordered, rank after rank, with the bits that tensors in the host's memory get.",
        option=Option(),
    )
    mathematical_gradients: bool = define_setting(
        False,
        "",
        parse_truth,
        "Gradients through a framework's collectives are those of the sum of all ranks' losses, instead of Horovod's.",
    )
    tensorflow_native: bool = define_setting(
        True,
        "",
        parse_truth,
        "Whether collectives in TensorFlow's programs are native ops, where that is possible, or calls of Python; read "
        "when `engine.tensorflow` is imported.",
    )
    kernels: str = define_setting(
        "auto",
        "",
        Words("auto", "plain", "avx2", "avx512"),
        "Instruction set of the reduction kernels; auto: the widest that the processors of all hosts have. Results are "
        "bitwise equal.",
    )
    cuda_library: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "auto"),
        "File of the CUDA driver, for GPUs; auto: libcuda.so.1, as the system finds it.",
    )
    nccl_library: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "auto"),
        "File of NCCL, for GPUs; auto: the one that is in the process "
        "already, such as PyTorch's, or else that of the package nvidia-nccl-cu12 or nvidia-nccl-cu13, or else the "
        "system's libnccl.so.2.",
    )
    spin_us: float | None = define_setting(
        None,
        "microseconds",
        make_optional(Number(0, 1000), "auto"),
        "Microseconds that a waiting thread spins before it sleeps; auto: 25, or 0 with more ranks than processors, "
        "where small operations yield instead.",
    )
    output_dir: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "auto"),
        "Directory of failure reports and flight records, in rank.N for each rank; auto: a new temporary directory.",
    )
    timeline: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "dynamic"),
        "Path of a timeline that is recorded from `init` on: a directory, or NAME.json for a NAME.rankN.json of each "
        "rank; dynamic: none until `start_timeline`.",
        "HOROVOD_TIMELINE",
        none="dynamic",
        option=Option("PATH", ("--timeline", "--timeline-filename")),
    )
    timeline_mark_cycles: bool = define_setting(
        False,
        "",
        parse_truth,
        "Mark in the timeline when each batch closes.",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        option=Option(off=""),
    )
    timeline_limit: int = define_setting(
        256 << 20,
        "bytes",
        Bytes(),
        "Largest size of one rank's timeline; later events are left out.",
    )
    metrics: bool = define_setting(
        False,
        "",
        parse_truth,
        "Count events of the engine, for `enginerun top`, Prometheus and the summary; enginerun switches it on.",
        option=Option(off="count nothing", on=False),
    )
    metrics_port: int | None = define_setting(
        None,
        "",
        make_optional(Whole(0, 65535), "none"),
        "Port on which Prometheus scrapes the ranks of this host; 0: any free one, none: no endpoint.",
        none="none",
        option=Option("PORT"),
    )
    metrics_address: str = define_setting(
        "127.0.0.1",
        "",
        parse_text,
        "Address on which the metrics endpoint listens.",
        option=Option("ADDRESS"),
    )
    metrics_file_sd: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "none"),
        "File *.json, or directory for RUN.json, from which Prometheus's file_sd learns of the metrics endpoint.",
        none="none",
        option=Option("PATH"),
    )
    metrics_textfile: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "none"),
        "File to which metrics are written, for node_exporter's textfile collector.",
        none="none",
        option=Option("FILE"),
    )
    metrics_otlp: str | None = define_setting(
        None,
        "",
        make_optional(parse_url, "none"),
        "Address of an OpenTelemetry collector, which is sent metrics and spans of steps: OTLP over HTTP.",
        none="none",
        option=Option("URL"),
    )
    metrics_linger: float = define_setting(
        15.0,
        "seconds",
        make_duration_form(),
        "Seconds that enginerun goes on serving metrics after the failure of a job that has been scraped.",
        option=Option("S"),
    )
    run_name: str | None = define_setting(
        None,
        "",
        make_optional(parse_text, "auto"),
        "Label `run` of all metrics; auto: SCRIPT-PID, of the launcher or else of rank 0.",
        option=Option("NAME"),
    )
    autotune: bool = define_setting(
        False,
        "",
        parse_truth,
        "Search for faster knobs while training.",
        "HOROVOD_AUTOTUNE",
        option=Option(off=""),
    )
    autotune_log: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "none"),
        "File of the tuner's log; none: autotune.jsonl in the output directory of enginerun, if one is given.",
        "HOROVOD_AUTOTUNE_LOG",
        none="none",
        option=Option("FILE", ("--autotune-log-file",)),
    )
    autotune_from: Path | None = define_setting(
        None,
        "",
        make_optional(parse_path, "none"),
        "Log of an earlier search whose knobs are used from the start; with `autotune`, they are tried first.",
        none="none",
        option=Option("LOG"),
    )
    autotune_cache: Path | Literal[False] | None = define_setting(
        None,
        "",
        parse_cache,
        "Directory of results that the tuner keeps across jobs; auto: in the user's cache directory, off: none.",
        option=Option("DIR", off="keep and recall nothing"),
    )
    autotune_warmup: int = define_setting(
        1,
        "trials",
        Whole(0, 10_000),
        "Warm-up before the first trial, in trials' worth of steps.",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
        option=Option("N", ("--autotune-warmup-samples",)),
    )
    autotune_steps: int = define_setting(
        20,
        "steps",
        Whole(1, 10_000),
        "Fewest steps by which a trial is measured.",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
        option=Option("N", ("--autotune-steps-per-sample",)),
    )
    autotune_trials: int = define_setting(
        30,
        "trials",
        Whole(1, 1000),
        "Most trials in one search.",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        option=Option("N", ("--autotune-bayes-opt-max-samples",)),
    )


def read_environment() -> dict[str, str]:
    """Return a copy of the process's environment."""
    return dict(os.environ)


def list_settings(kind: type[Config] = Config) -> dict[str, Setting]:
    """Return all settings by name, in the order of their fields. `kind` may be a subclass that adds some."""
    return {entry.name: Setting(entry.name, entry.default, **entry.metadata) for entry in fields(kind)}


def list_knobs(kind: type[Config] = Config) -> dict[str, Setting]:
    """Return the settings that can be changed while the engine runs, by name."""
    return {name: each for name, each in list_settings(kind).items() if each.knob is not None}


def check_knobs(changes: Mapping[str, Any], kind: type[Config] = Config) -> dict[str, Any]:
    """Check and parse changes of knobs, by name; None leaves a knob unchanged.

    A value that is invalid, or a name that is not that of a knob, is a ConfigError.
    """
    known = list_knobs(kind)
    return {
        name: _find_setting(name, known, "knob").read(value) for name, value in changes.items() if value is not None
    }


def _find_setting(name: str, known: Mapping[str, Setting], what: str) -> Setting:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean {near[0]!r}? There are" if near else "there are"
        raise ConfigError(f"there is no {what} {name!r}; {meant}: {', '.join(known)}")
    return known[name]


def load(environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None, kind: type[Config] = Config) -> Config:
    """Load the settings from the environment, with overrides of the caller by setting name.

    `environ` is a result of `read_environment()`, in which an empty value counts as not set. `kind` is `Config`, or a
    class that adds settings. An invalid value, and an override of a setting that does not exist, is a ConfigError.
    """
    return kind(**read_given(environ, overrides, kind))


def read_given(
    environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None, kind: type[Config] = Config
) -> dict[str, Any]:
    """Return the settings that the environment or the caller sets. Parameters and errors are those of `load`."""
    known = list_settings(kind)
    found: dict[str, Any] = {}
    links = service_links(environ)
    environ = {name: value for name, value in environ.items() if value and name not in links}
    for source, (name, value) in SWITCHES.items():
        if source in environ and variable_name(name) not in environ and read(parse_truth, environ[source], source):
            found[name] = value
    for each in known.values():
        sources = [source for source in (each.variable, each.alias) if source in environ]
        if sources and each.name not in found:
            found[each.name] = each.read(environ[sources[0]], sources[0])
    for name, value in (overrides or {}).items():
        found[name] = _find_setting(name, known, "setting").read(value)
    return found


def service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Find the engine's variables that Kubernetes has set, and nobody has chosen as settings.

    For each Service of a namespace, its containers get `NAME_PORT=tcp://ADDRESS:PORT`. So a Service called
    `engine-metrics` sets `ENGINE_METRICS_PORT`.
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name.endswith("_PORT") and value.strip().lower().startswith(_PROTOCOLS)
    }


def without_effect(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of Horovod that are set and have no effect here."""
    return [name for name in WITHOUT_EFFECT if environ.get(name)]


def find_misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like a misspelt variable of a setting, with the variable that is meant."""
    known = [each.variable for each in list_settings().values()]
    near = {name: difflib.get_close_matches(name, known, 1, 0.9) for name in environ if name.startswith(PREFIX)}
    return {name: meant[0] for name, meant in near.items() if meant and name not in known}


def describe(kind: type[Config] = Config) -> str:
    """Return the settings as a table in Markdown, for the documentation."""
    rows = ["| setting | variable | option | unit | default | meaning |", "|---|---|---|---|---|---|"]
    for each in list_settings(kind).values():
        default = each.none if each.default is None else each.default
        off = "no-" if each.option is not None and not each.option.on else ""
        option = "" if each.option is None else f"`--{off}{each.options[0].removeprefix('--')}`"
        rows.append(f"| `{each.name}` | `{each.variable}` | {option} | {each.unit} | {default} | {each.doc} |")
    return "\n".join(rows)
