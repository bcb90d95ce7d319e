"""Rules for the Cython sources that no linter checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for suffix in ("*.pyx", "*.pxd") for path in (ROOT / "engine_ext").rglob(suffix))
HEADERS = sorted(path for suffix in ("*.h", "*.c") for path in (ROOT / "engine_ext").rglob(suffix))
FORBIDDEN = {"engine", "jax", "keras", "mxnet", "numpy", "tensorflow", "torch"}

# Sources that use a plane which their row of the table does not name.
EXCEPTIONS = {("bindings/gradients", "core"), ("bindings/prepared", "core")}

# Sources that depend on the kind of an operation.
KINDS_ARE_KNOWN_TO = {
    *("shared/names.h", "shared/layout.h", "shared/layout.pxd", "operations/kinds.pyx"),
    *("core.pyx", "bindings/collectives.pyx", "bindings/submit.pyx", "bindings/gradients.pyx"),  # the border
    "bindings/xla_call.c",  # the border of compiled programs
}

# Names that observers keep, and the sources of the observed planes that use them: the hooks and the observers.
OBSERVER = re.compile(
    r"[.](?:counters|counters_page|history|marks|overlap|trace)\b"
    r"|\b(?:counters|lateness|marks|overlap|step_clock|trace|traffic)_\w+[(]|\btally[(]"
)
OBSERVERS_ARE_KNOWN_TO = {
    *("control/observers", "coordinator/lateness"),  # hooks of a rank and of the coordinator
    *("control/trace", "control/overlap", "control/step_clock", "hosts/connections"),
    "bindings/observing",  # the page that counts, and the marks of steps
}

FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(?:\(([^)]*)\)|([^\n]*))", re.MULTILINE)
CLASS = re.compile(r"(?:cdef )?class (\w+)")
DEFINITION = re.compile(r"(    )?(?:cdef|cpdef|def) [^(=]*?(\w+)\(")
PLAIN = re.compile(r"^[ \t]*c?import[ \t]+([^\n]*)", re.MULTILINE)


def imported(path: Path) -> set[str]:
    """Return every dotted name that a source imports or cimports; for `from a cimport b` both `a` and `a.b`."""
    source = re.sub(r"#[^\n]*", "", path.read_text())
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for origin, several, one in FROM.findall(source):
        relative = len(origin) - len(origin.lstrip("."))
        parts = [*package[: len(package) - relative + 1], *filter(None, origin.split("."))] if relative else [origin]
        module = ".".join(parts)
        names |= {module, *(f"{module}.{part.split()[0]}" for part in (several or one).split(",") if part.strip())}
    for listed in PLAIN.findall(source):
        names |= {part.split()[0] for part in listed.split(",") if part.strip()}
    return names


def test_native_sources_import_no_framework_and_nothing_above_them() -> None:
    """import-linter reads Python only; this test holds the same contract for native sources."""
    assert SOURCES
    found = {f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name in imported(path)}
    assert {line for line in found if line.split(": ")[1].partition(".")[0] in FORBIDDEN} == set()


def planes() -> dict[str, set[str]]:
    """Return the planes that each plane uses, from ARCHITECTURE.md's table; the last is the border, which uses all."""
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("| plane |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*) \|", table, re.MULTILINE)
    return {plane: set(re.findall(r"`(\w+)`", uses)) for plane, uses in rows}


def used_planes(path: Path, border: str) -> set[str]:
    """Return the planes of everything that a source cimports or includes; `errors.py` belongs to every plane."""
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("engine_ext.")}
    parts |= set(re.findall(r'"(?:engine_ext/)?(\w+)/\w+\.h"', path.read_text()))
    top = ROOT / "engine_ext"
    return {
        part if (top / part).is_dir() else border
        for part in parts
        if (top / part).is_dir() or (top / f"{part}.pxd").exists()
    }


def test_planes_use_only_what_lies_below_them() -> None:
    table = planes()
    *folders, border = table
    assert set(folders) == {path.parent.name for path in SOURCES} - {"engine_ext"}
    for number, plane in enumerate(folders):
        assert table[plane] <= set(folders[:number]), f"the table has {plane} above what it uses"
    wrong = []
    for path in SOURCES + HEADERS:
        plane, source = path.parent.name, str(path.relative_to(ROOT / "engine_ext").with_suffix(""))
        allowed = {plane, *table.get(plane, {*folders, border})}
        used = used_planes(path, border) - allowed
        wrong += [f"{source} uses {other}" for other in used if (source, other) not in EXCEPTIONS]
    assert wrong == []


def test_kinds_are_asked_for_in_the_table_and_at_the_border_alone() -> None:
    """Everything else that depends on the kind of an operation is in its row."""
    asking = {str(path.relative_to(ROOT / "engine_ext")) for path in SOURCES + HEADERS if "KIND_" in path.read_text()}
    assert asking == KINDS_ARE_KNOWN_TO


def test_threads_sleep_at_doors_alone() -> None:
    """Another way to sleep, as for ranks that also wait for sockets, is then a change of one header."""
    sleeping = re.compile(r"\bfutex_(?:wait|wake)\b|\bSYS_futex\b")
    found = {
        str(path.relative_to(ROOT / "engine_ext")) for path in SOURCES + HEADERS if sleeping.search(path.read_text())
    }
    assert found == {"platform/atomics.h", "platform/doors.h"}


def test_observers_are_reached_through_their_doors_alone() -> None:
    """A new observer is then a change of control/observers only: the protocol does not know who observes."""
    looking = set()
    for path in SOURCES:
        code = FROM.sub("", re.sub(r"#[^\n]*", "", path.read_text()))
        if path.parent.name in {"coordinator", "hosts", "control", "bindings"} and OBSERVER.search(code):
            looking.add(str(path.relative_to(ROOT / "engine_ext").with_suffix("")))
    assert looking == OBSERVERS_ARE_KNOWN_TO


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_build_knows_every_declaration_that_a_source_uses(source: Path) -> None:
    """Cython's dependency scanner does not see the module in `from package cimport module`: stale code would run.

    An edit of the module's .pxd would not rebuild the source. The scanner does see `cimport package.module` and
    `from package.module cimport name`.
    """
    dependencies = pytest.importorskip("Cython.Build.Dependencies")
    tracked = dependencies.create_dependency_tree(quiet=True).immediate_dependencies(str(source))
    used = {path for name in imported(source) if (path := ROOT.joinpath(*name.split(".")).with_suffix(".pxd")).exists()}
    assert {str(path) for path in used - {source}} - {str(Path(path).absolute()) for path in tracked} == set()


def find_repeated_definitions(source: str) -> list[str]:
    """Return the names that a module, or a class in it, defines again; setters of properties may repeat a name."""
    repeated, defined, scope, before = [], set(), "", ""
    for line in source.splitlines():
        if found := CLASS.match(line):
            scope = found[1]
        elif (found := DEFINITION.match(line)) and not before.lstrip().startswith("@"):
            name = f"{scope}.{found[2]}" if found[1] else found[2]
            repeated += [name] * (name in defined)
            defined.add(name)
        before = line
    return repeated


def test_no_class_or_module_defines_a_name_twice() -> None:
    """Cython takes the later one without a word, and calls of the earlier one go there."""
    twice = "cdef class Engine:\n    cdef int enter(self, int at) except -1:\n        pass\n    def enter(self):\n"
    assert find_repeated_definitions(twice) == ["Engine.enter"]
    found = [f"{path.name}: {name}" for path in SOURCES for name in find_repeated_definitions(path.read_text())]
    assert found == []


def test_build_installs_every_module_and_stub() -> None:
    """A wheel has what meson.build lists; the slow tests of packaging look into a wheel."""
    build = (ROOT / "engine_ext/meson.build").read_text()
    block = build.partition("python_sources = {")[2].partition("\n}")[0]
    listed = {
        str(Path(folder, name))
        for folder, names in re.findall(r"'([\w.]+)': \[([^\]]*)\]", block)
        for name in re.findall(r"'([^']+)'", names)
        if name.endswith((".py", ".pyi"))
    }
    there = {
        str(path.relative_to(ROOT / "engine_ext"))
        for path in (ROOT / "engine_ext").rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert listed and listed == there


def test_flags_of_an_operation_are_read_by_the_accessors_alone() -> None:
    """A thread that releases a handle sets a flag at any time (I10); the thread sanitizer rarely sees both meet."""
    plain = re.compile(r"(?<!&)\b(?:op|batch\[\w+\])\.flags[ \t]*&")
    found = [
        f"{path.name}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if plain.search(line)
    ]
    assert found == []


def test_bulk_is_copied_by_the_kernels() -> None:
    """Only what is small and of fixed size may go by memcpy: see `copy` in kernels/kernels_impl.h."""
    bulk = [path for path in SOURCES if path.parent.name in ("data", "operations")]
    bulk += [ROOT / "engine_ext/bindings" / name for name in ("gradients.pyx", "groups.pyx")]
    copies = [call for path in bulk for call in re.findall(r"\bmemcpy\(.*", path.read_text())]
    assert len(copies) >= 3
    assert [call for call in copies if not re.search(r"sizeof\(|, &\w+, item\)", call)] == []


def test_dtypes_of_frozen_passes_are_those_of_the_kernels() -> None:
    """The numbers and widths that Python gives a frozen pass are those of ENGINE_DTYPE_LIST."""
    header = (ROOT / "engine_ext/kernels/kernels.h").read_text()
    listed = header.partition("#define ENGINE_DTYPE_LIST(ROW)")[2].partition("#define ENGINE_DTYPE_NUMBER")[0]
    rows = re.findall(r'ROW\(ENGINE_\w+, "(\w+)", (\d+)\)', listed)
    kernels = {name: (number, int(width)) for number, (name, width) in enumerate(rows)}
    [written] = re.findall(r"^DTYPES = (\{.*\})", (ROOT / "engine/gpu/freezing.py").read_text(), re.MULTILINE)
    frozen = ast.literal_eval(written)
    assert frozen and {name: kernels[name] for name in frozen} == frozen
