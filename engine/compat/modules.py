"""Modules of Horovod, assembled from names of the engine: a table, and the finder that provides them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from ..collectives.bindings import BOUND

ROOT = "horovod"
SEE = "docs/reference/horovod-modules.md says what there is"

# Modules, and where their names come from.
MODULES: dict[str, tuple[str, ...]] = {
    "horovod": (".package",),
    "horovod.common": (),
    "horovod.common.basics": (".basics",),
    "horovod.common.exceptions": (".exceptions",),
    "horovod.common.process_sets": ("..",),
    "horovod.common.util": (".util",),
    "horovod.data": ("..data",),
    "horovod.data.data_loader_base": ("..data",),
    "horovod.ray": ("..ray",),
    "horovod.ray.elastic": ("..ray",),
    "horovod.ray.ray_logger": ("..ray.ray_logger",),
    "horovod.ray.runner": ("..ray",),
    "horovod.run": (".package",),
    "horovod.runner": (".package",),
    "horovod.version": (".package",),
}
# Jobs in Spark, and estimators there.
for _name, _source in (
    ("", "..spark"),
    (".common", "..spark.store"),
    (".common.backend", "..spark.backend"),
    (".common.store", "..spark.store"),
    (".keras", "..spark.keras"),
    (".torch", "..spark.torch"),
):
    MODULES[f"horovod.spark{_name}"] = (_source,)
for _each in BOUND.values():
    for _module in () if _each.modules is None else ("", *_each.modules.split()):
        MODULES[f"horovod.{_each.package}.{_module}".rstrip(".")] = (f"..{_each.package}",)

# The names of Keras' binding are found under both module names.
for _name in ("horovod.keras", "horovod.tensorflow.keras"):
    MODULES[_name] = ("..keras",)
    MODULES[f"{_name}.callbacks"] = ("..keras.callbacks",)
    MODULES[f"{_name}.elastic"] = ("..keras.elastic",)
MODULES["horovod.tensorflow"] = ("..tensorflow", ".util")  # which has `gpu_available`
MODULES["horovod.tensorflow.elastic"] = ("..tensorflow.elastic",)
for _name in ("mxnet", "tensorflow", "torch"):
    MODULES[f"horovod.{_name}.mpi_ops"] += (".basics",)
for _name in ("", ".sampler", ".state"):
    MODULES[f"horovod.torch.elastic{_name}"] = ("..torch.elastic",)

# Modules of scripts that may be written for Keras 2.
WITH_KERAS = ("horovod.keras", "horovod.spark.keras", "horovod.tensorflow")

# Packages that are refused, with the reason.
ABSENT = {
    "horovod.runner.elastic": "the driver is another: enginerun starts elastic jobs",
    "horovod.runner.launch": "the launcher is another: use enginerun, or horovod.run for a function",
    "horovod.ray.elastic_v2": "use horovod.ray.RayExecutor with min_workers, or ElasticRayExecutor",
    "horovod.ray.strategy": "Ray's placement groups are made by RayExecutor: give num_workers, or num_hosts",
    "horovod.ray.worker": "ranks are actors of RayExecutor alone: use its run and execute",
    "horovod.spark.conf": "Spark starts lost tasks of run_elastic again as it is configured itself",
    "horovod.spark.driver": "the driver is another: use horovod.spark.run, or run_elastic",
    "horovod.spark.gloo_run": "there is no Gloo: use horovod.spark.run",
    "horovod.spark.mpi_run": "ranks in Spark need no MPI: use horovod.spark.run",
    "horovod.spark.runner": "the driver is another: use horovod.spark.run, or run_elastic",
    "horovod.spark.task": "ranks are no tasks of Spark: they choose a GPU by local_rank()",
    "horovod.spark.lightning": "there are estimators of PyTorch, in horovod.spark.torch, and of Keras, in .keras",
    "horovod.tensorflow.data": "there is no service that computes data; tf.data works on each rank",
}


class Module(ModuleType):
    """Module that exposes the names of other modules."""

    shown: Sequence[ModuleType] = ()

    def __getattr__(self, name: str) -> Any:
        for module in self.shown:
            if hasattr(module, name):
                return getattr(module, name)
        whole = f"{self.__name__}.{name}"
        if self.__name__ != ROOT and whole in MODULES:  # In Horovod, packages import the modules below them.
            with suppress(ImportError):
                return import_module(whole)
        reason = ABSENT.get(whole, SEE)
        raise AttributeError(f"module {self.__name__!r} has no {name!r}: {reason}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for module in self.shown for name in module.__all__)})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the module by name, as cloudpickle does with ordinary ones: functions of a main script refer to it."""
        return _import_unpickled, (self.__name__,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `horovod.run`, once a module, later a function, and both here; other modules are not callable."""
        if self.__name__ != "horovod.run":
            raise TypeError(f"module {self.__name__!r} is not callable")
        return self.run(*args, **kwargs)


def _import_unpickled(name: str) -> ModuleType:
    """Import a module that was pickled in another process of the job; install the switch first if it is not on yet."""
    install()
    return import_module(name)


class Finder(MetaPathFinder, Loader):
    """Finder of all modules of Horovod, which explains missing ones. It ignores all other modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Look a module up in the table.

        Raises ModuleNotFoundError for a module of Horovod that is not provided: another package's module of that name
        must not be found instead.
        """
        if name.partition(".")[0] != ROOT:
            return None
        if name in MODULES:
            # Each is a package, so that this finder also reports missing modules below it.
            return spec_from_loader(name, self, is_package=True)
        for absent, reason in ABSENT.items():
            if f"{name}.".startswith(f"{absent}."):
                raise ModuleNotFoundError(f"no module {name!r}: {reason} ({SEE})", name=name)
        raise ModuleNotFoundError(f"no module {name!r} behind the compatibility switch: {SEE}", name=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module that the import system will execute."""
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its names."""
        assert isinstance(module, Module)
        module.shown = [import_module(name, __package__) for name in MODULES[module.__name__]]
        if module.__name__ == ROOT:
            _tell_of_another()
        if module.__name__.startswith(WITH_KERAS):
            import_module("..keras.keras2", __package__).accept_old_spellings()


def is_installed() -> bool:
    """Return whether the switch is on in this process."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def install() -> Finder:
    """Switch this process on, and return the finder, first in `sys.meta_path`. Further calls do nothing.

    Raises ImportError if another `horovod` was imported already.
    """
    for finder in sys.meta_path:
        if isinstance(finder, Finder):
            return finder
    if ROOT in sys.modules:
        raise ImportError("horovod has been imported already: call engine.compat.install() before that", name=ROOT)
    made = Finder()
    sys.meta_path.insert(0, made)
    return made


def _tell_of_another() -> None:
    """Warn once per job that the installed Horovod is not the one that runs."""
    found = PathFinder.find_spec(ROOT)
    if found is None or found.origin is None:
        return
    from ..config import config, world
    from ..errors import ConfigError
    from ..text import logs

    try:
        first = world.find_place(config.read_environment()).rank == 0
    except ConfigError:  # `init` will report it
        first = True
    if first:
        logs.logger.warning("the compatibility switch is on: horovod is this engine, not %s", found.origin)
