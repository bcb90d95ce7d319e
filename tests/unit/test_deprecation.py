"""Deprecations: what a warning says and whose line it names, and that what is announced is removed in time."""

from __future__ import annotations

import ast
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.elastic import state
from engine.text.deprecation import find_former_name, warn_deprecated

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "autotune")


def test_a_warning_says_since_when_until_when_and_what_instead_at_the_users_line() -> None:
    def former_function() -> None:
        warn_deprecated("engine.former_function", "0.4", "0.6", "Call engine.present_function.")

    with pytest.warns(FutureWarning) as told:
        former_function()
    assert str(told[0].message) == (
        "engine.former_function: deprecated since version 0.4, and gone from version 0.6 on. "
        "Call engine.present_function."
    )
    assert told[0].filename == __file__
    assert "former_function()" in Path(__file__).read_text().splitlines()[told[0].lineno - 1]


def test_a_pickle_with_a_former_name_loads_with_a_warning_and_another_does_not_warn() -> None:
    present = pickle.dumps(state.LoopProgress(3, 7), protocol=0)  # which has no lengths of names
    former = present.replace(b"LoopProgress", b"Progress")
    assert former != present
    with pytest.warns(FutureWarning, match=r"from before version 0\.1, .* engine\.elastic\.state\.Progress") as told:
        assert pickle.loads(former) == state.LoopProgress(3, 7)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pickle.loads(present) == state.LoopProgress(3, 7)


def test_a_name_that_never_was_is_an_attribute_error_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AttributeError, match=r"module 'engine\.elastic\.state' has no attribute 'Progess'"):
            state.Progess  # noqa: B018
        with pytest.raises(AttributeError):
            find_former_name("a.module", "name", {"other": 1})


def find_removals(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, first version that warns and version of the removal of each deprecation in a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn_deprecated"):
            given = dict(zip(("subject", "since", "removal"), node.args, strict=False))
            given |= {each.arg: each.value for each in node.keywords if each.arg}
            yield node.lineno, ast.literal_eval(given["since"]), ast.literal_eval(given["removal"])


def parse_version(text: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", text).groups()
    return int(major), int(minor)


def find_broken_promises(source: str, version: str) -> list[str]:
    """Return the deprecations of a source whose removal is due in a version, or comes sooner than the policy allows."""
    found = []
    for line, since, removal in find_removals(source):
        (major, minor), (later, last) = parse_version(since), parse_version(removal)
        if later == major and last < minor + 2:
            found.append(f"line {line}: {since} to {removal} is less than two minor versions")
        if parse_version(version) >= (later, last):
            found.append(f"line {line}: to be removed in {removal}, and this is {version}")
    return found


def test_what_was_announced_is_removed_in_time_and_not_sooner_than_promised() -> None:
    """Once the version is that of a removal, this fails until what is deprecated is removed."""
    example = 'warn_deprecated("it", "0.1", removal="0.3", instead="Do.")\n'
    assert find_broken_promises(example, "0.2.9") == []
    assert find_broken_promises(example, "0.3.0.dev0") == ["line 1: to be removed in 0.3, and this is 0.3.0.dev0"]
    assert find_broken_promises(example.replace("0.3", "0.2"), "0.1") == [
        "line 1: 0.1 to 0.2 is less than two minor versions"
    ]
    [version] = re.findall(r"^  version: '(.+)',$", (ROOT / "meson.build").read_text(), re.MULTILINE)
    sources = {str(path): path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    announcing = {path: text for path, text in sources.items() if "warn_deprecated" in text}
    assert sum(len(list(find_removals(text))) for text in announcing.values()) >= 1
    broken = {path: find_broken_promises(text, version) for path, text in announcing.items()}
    assert {path: problems for path, problems in broken.items() if problems} == {}
