"""Runs of the benchmark of the bindings: all contenders stay alive and take turns in short blocks."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import binding, environment, progress, records
from benchmarks.common.processes import DisagreementError, Group, Launcher

PARTS = ("calls", "fit")
CALLERS = ("tensorflow", "jax", "torch")
BACKENDS = ("tensorflow", "torch", "jax")
MODELS = ("large", "small")
FIT, LOOP = ("fit_floor", "fit", "bare"), ("loop_floor", "loop")
STRATEGY = ("loop_floor", "loop_strategy")
_QUIET = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True)
class FrameworkSettings:
    """Measurements to make, and their duration."""

    parts: tuple[str, ...] = PARTS
    frameworks: tuple[str, ...] = BACKENDS
    models: tuple[str, ...] = MODELS
    ranks: int = 2
    rounds: int = 10
    block_seconds: float = 0.15
    fit_block_seconds: float = 0.8
    most: int = 30
    strategy: bool = True


def run(settings: FrameworkSettings, console: Console, merge: bool = False) -> Path:
    """Measure, and write `out/frameworks.json`; with `merge`, keep results of the last run that are not measured now.

    The file is written after each measurement, so that its results survive a later failure.
    """
    before = environment.record()
    begun = time.perf_counter()
    results = {_make_key(each): each for each in (records.read("frameworks") or {}).get("results", [])} if merge else {}

    def write() -> Path:
        content = {"results": list(results.values()), "seconds": round(time.perf_counter() - begun, 1)}
        return records.write("frameworks", asdict(settings), before, content)

    for measured in _measure_parts(settings, console):
        results[_make_key(measured)] = measured | {"date": before["date"], "revision": before["revision"]}
        write()
    return write()


def _measure_parts(settings: FrameworkSettings, console: Console) -> Iterator[dict[str, Any]]:
    """Measure each part of each framework, and each of Keras' models."""
    if "calls" in settings.parts:
        yield from (_measure_calls(settings, name, console) for name in CALLERS if name in settings.frameworks)
    if "fit" in settings.parts:
        yield from (
            _measure_fit(settings, name, model, console) for name in settings.frameworks for model in settings.models
        )


def _make_key(result: dict[str, Any]) -> tuple[str, str, str]:
    return result["part"], result["framework"], result.get("model", "")


def _measure_calls(settings: FrameworkSettings, framework: str, console: Console) -> dict[str, Any]:
    """Measure the calls of one framework beside the bare ones."""
    module, arguments = "benchmarks.frameworks.calls", ["--framework", framework]
    with Group(
        f"calls-{framework}", settings.ranks, module, arguments, "engine", binding.list_processors(), _QUIET
    ) as group:
        cases: list[str] = group.ask_ranks({"do": "cases"})[0]
        with progress.show_progress(console, f"calls, {framework}", len(cases) * (settings.rounds + 1)) as advance:
            counts = {}
            for case in cases:
                group.ask_ranks({"do": "first", "case": case})
                start = time.perf_counter()
                _measure_block(group, case, 0, 5)
                each = (time.perf_counter() - start) / 5
                counts[case] = int(min(400, max(5, settings.block_seconds / each)))
                advance(case)
            rounds: dict[str, list[float]] = {case: [] for case in cases}
            for number, case in _take_turns(settings.rounds, cases):
                rounds[case].append(statistics.median(_measure_block(group, case, 2, counts[case])))
                advance(f"{case}, round {number + 1}")
    return {"part": "calls", "framework": framework, "rounds": rounds}


def _measure_block(group: Group, case: str, warmup: int, iterations: int) -> list[float]:
    """Return the seconds of each call: the maximum over the ranks."""
    answers = group.ask_ranks({"do": "block", "case": case, "warmup": warmup, "iterations": iterations})
    return [max(ranks) for ranks in zip(*answers, strict=True)]


def _take_turns(rounds: int, names: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield each name once per round; each round begins with another one."""
    for number in range(rounds):
        for k in range(len(names)):
            yield number, names[(k + number) % len(names)]


def _measure_fit(settings: FrameworkSettings, framework: str, model: str, console: Console) -> dict[str, Any]:
    """Measure the steps of one model on one backend, and those of the strategy if it is TensorFlow's."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_start_trainers(settings, framework, ""))
        keys = [("engine", variant) for variant in (*FIT, *(LOOP if framework == "tensorflow" else ()))]
        groups = {"engine": ours}
        if framework == "tensorflow" and settings.strategy:
            groups["strategy"] = stack.enter_context(
                _start_trainers(settings, framework, _find_free_ports(settings.ranks))
            )
            keys += [("strategy", variant) for variant in STRATEGY]
        with progress.show_progress(
            console, f"fit, {framework}, {model}", len(keys) * (settings.rounds + 1)
        ) as advance:
            parameters: dict[str, int] = {}
            steps = 0
            for name, variant in keys:
                parameters = groups[name].ask_ranks({"do": "build", "model": model, "variant": variant})[0]
                seconds = _measure_steps(groups[name], variant, 3)
                steps = steps or int(min(settings.most, max(3, settings.fit_block_seconds / seconds)))
                advance(f"{variant}, warm-up")
            rounds: dict[str, list[float]] = {f"{name}.{variant}": [] for name, variant in keys}
            for _, (name, variant) in _take_turns(settings.rounds, keys):
                rounds[f"{name}.{variant}"].append(_measure_steps(groups[name], variant, steps))
                advance(variant)
        for name, variant in keys:
            digests = groups[name].ask_ranks({"do": "digest", "variant": variant})
            if not variant.endswith("floor") and len(set(digests)) != 1:
                raise DisagreementError(f"{framework}, {model}: the ranks' parameters of {variant} differ: {digests}")
    return {"part": "fit", "framework": framework, "model": model, **parameters, "steps": steps, "rounds": rounds}


def _start_trainers(settings: FrameworkSettings, framework: str, ports: str) -> Group:
    """Start the ranks that train on one backend; with `ports`, under the strategy, which has its own processes."""
    variables = {**_QUIET, "KERAS_BACKEND": framework}
    launcher: Launcher = "plain" if ports else "engine"
    name, arguments = ("strategy", ["--strategy", ports]) if ports else (f"fit-{framework}", [])
    module = "benchmarks.frameworks.fit"
    return Group(name, settings.ranks, module, arguments, launcher, binding.list_processors(), variables)


def _measure_steps(group: Group, variant: str, steps: int) -> float:
    """Return the mean over the ranks of the median of their steps, in seconds."""
    answers = group.ask_ranks({"do": "block", "variant": variant, "warmup": 2, "steps": steps})
    return statistics.fmean(statistics.median(seconds) for seconds in answers)


def _find_free_ports(count: int) -> str:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ",".join(str(each.getsockname()[1]) for each in sockets)
