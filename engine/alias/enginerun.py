"""`import enginerun`: another name of the package `engine`, for scripts that have an `engine.py` of their own.

Installed beside the package, not in it. Where `engine` is this package, both names give the same modules:
`enginerun.torch is engine.torch`. Where `engine` is somebody else's, the package is loaded under the name `enginerun`
alone, and `import engine` goes on giving theirs; the package's own imports are relative, so it works under either name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_NAME = "enginerun"
_PACKAGE = "engine"


class _SameModules(MetaPathFinder, Loader):
    """Finds `enginerun.x`: the module `engine.x` itself, not a second copy of it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}."):
            return None
        real = find_spec(_resolve_name(name))
        if real is None:
            return None
        return spec_from_loader(name, self, origin=real.origin, is_package=real.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Give the module itself: another thread may take what `sys.modules` holds during the import."""
        module = import_module(_resolve_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, in place of which the import system has put that of its other name."""
        if module.__spec__ is not None and module.__spec__.loader is self:
            module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> CodeType | None:
        """Give `python -m enginerun.launch` what `python -m engine.launch` runs."""
        real = find_spec(_resolve_name(name))
        loader = None if real is None else real.loader
        return loader.get_code(_resolve_name(name)) if isinstance(loader, InspectLoader) else None


def _resolve_name(name: str) -> str:
    return _PACKAGE + name.removeprefix(_NAME)


def _find_directory() -> Path:
    """Return the directory of the package: beside this file, or around it in an editable installation."""
    here = Path(__file__).resolve()
    beside = here.parent / _PACKAGE
    return beside if beside.is_dir() else here.parents[1]


def _owner_of_the_short_name(directory: Path) -> ModuleType | None:
    """The package under the name `engine`, if that name is its own in this process."""
    known = sys.modules.get(_PACKAGE)
    origin = getattr(known, "__file__", None)
    if _PACKAGE not in sys.modules:
        found = find_spec(_PACKAGE)
        origin = None if found is None else found.origin
    if origin is None or Path(origin).resolve() != (directory / "__init__.py").resolve():
        return None
    return known or import_module(_PACKAGE)


def _load(directory: Path) -> ModuleType:
    """Load the package under the name `enginerun`."""
    spec = spec_from_file_location(_NAME, directory / "__init__.py", submodule_search_locations=[str(directory)])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"the package {_PACKAGE!r} is not at {directory}: install enginerun anew", name=_NAME)
    module = sys.modules[_NAME] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name: str) -> Any:
    """Serve a thread that was given this file's own module, because another one was importing it at the same time."""
    package = sys.modules[_NAME]
    if vars(package) is globals():
        raise AttributeError(f"module {_NAME!r} is still being imported, and has no attribute {name!r} yet", name=name)
    return getattr(package, name)


_found = _owner_of_the_short_name(_find_directory())
if _found is None:
    _load(_find_directory())
else:
    sys.meta_path.insert(0, _SameModules())
    sys.modules[_NAME] = _found
