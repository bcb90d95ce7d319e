"""Every block of code of the README and of docs/: commands parse, programs compile, and the names they use exist.

Whole programs run in the tests of their pages: test_readme.py, test_recipes.py, tests/ray, tests/spark, `make recipes`.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import subprocess
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import docs_python
from tools.docs_reference import COMMANDS, capture_parser

from ..documents import DOCS, FENCE, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]
LANGUAGES = {"diff", "json", "python", "sh", "text", "yaml"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# What scripts import as `hvd` where an earlier block of the page does not say.
USUAL = {"hvd": "engine.torch", "engine": "engine", "autotune": "autotune"}


def find_blocks(*languages: str) -> list[Any]:
    """Return the blocks in these languages, as parameters: page and text."""
    found = []
    for page in PAGES:
        for indent, language, code in FENCE.findall(page.read_text()):
            if language in languages:
                text = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
                found.append(pytest.param(page, text, id=f"{page.stem}:{text.strip().partition(chr(10))[0][:40]}"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_says_its_language(page: Path) -> None:
    assert {language for _, language, _ in FENCE.findall(page.read_text())} <= LANGUAGES
    assert page.read_text().count("```") == 2 * len(FENCE.findall(page.read_text()))


@pytest.mark.parametrize(("page", "code"), find_blocks("json", "yaml"))
def test_data_can_be_read(page: Path, code: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    assert isinstance(json.loads(code) if code.startswith("{") else yaml.safe_load(code), dict)


@pytest.mark.parametrize(("page", "code"), find_blocks("diff"))
def test_lines_of_a_diff_are_marked(page: Path, code: str) -> None:
    assert {line[:1] or " " for line in code.splitlines()} <= {"+", "-", " "}


# Programs


def resolve(module: str, names: list[str]) -> bool:
    """Return whether a chain of names leads from a module of ours to something that exists, as far as sources tell."""
    while names:
        name, *names = names
        if docs_python.find_file(f"{module}.{name}") is not None and not docs_python.find_definition(module, name):
            module = f"{module}.{name}"
            continue
        found = docs_python.find_definition(module, name) or docs_python.find_in_package(module, name)
        if found is None:
            return name in docs_python.list_names(module)
        if isinstance(found.node, ast.ClassDef) and names and not found.node.bases:
            members = {each.name for each in found.node.body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
            members |= {ast.unparse(target) for each in found.node.body for target in targets_of(each)}
            return names[0] in members
        return True
    return True


def targets_of(node: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns to."""
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []


def read_imports(tree: ast.AST) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each import of our modules: the name that it binds, the module, and the names that it takes from there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ("engine", "autotune"):
                    yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else "engine", []
                    yield "", alias.name, []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("engine", "autotune"):
            for alias in node.names:
                yield "", node.module or "", [alias.name]


def find_unknown_names(code: str, bound: dict[str, str]) -> list[str]:
    """Return the names of our modules in a program that do not exist; `bound` learns what the program imports."""
    tree = ast.parse(code)
    unknown = []
    for name, module, taken in read_imports(tree):
        if docs_python.find_file(module) is None or not resolve(module, taken):
            unknown.append(f"import of {module} {taken}")
        if name:
            bound[name] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *names = ast.unparse(node).split(".")
            if root in bound and all(each.isidentifier() for each in names) and not resolve(bound[root], names):
                unknown.append(ast.unparse(node))
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_programs_compile_and_use_names_that_exist(page: Path) -> None:
    bound = dict(USUAL)
    for _, language, code in FENCE.findall(page.read_text()):
        if language == "python":
            code = code if not code.startswith(" ") else re.sub(r"^  ", "", code, flags=re.MULTILINE)
            compile(code, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            assert find_unknown_names(code, bound) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    program = "import engine.torch as hvd\nhvd.init()\nhvd.allreduse(1)\nhvd.elastic.TorchStat()\nhvd.Compression.fp17"
    unknown = {"hvd.allreduse", "hvd.Compression.fp17", "hvd.elastic.TorchStat"}
    assert set(find_unknown_names(program, {})) == unknown


# Commands


@functools.cache
def parser_of(command: str) -> ArgumentParser:
    """Return the parser of one of our commands."""
    return capture_parser(command)


def read_commands(code: str) -> Iterator[list[str]]:
    """Yield the commands of a shell's block as words, without the variables before them."""
    for line in code.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words:
                    yield words[: words.index(">")] if ">" in words else words
                words = []
            elif words or not re.match(r"[A-Z_]+=", word):
                words.append(word)


def find_mistake(words: list[str]) -> str | None:
    """Return what is wrong with a command, where it is one of ours."""
    name, *rest = words
    if name == "make":
        return None if {word for word in rest if "=" not in word} <= TARGETS else "no such target"
    if "pip" in name and (extras := re.search(r"\[([\w,]+)\]", " ".join(rest))):
        return None if set(extras[1].split(",")) <= EXTRAS.keys() else "no such extra"
    if name.startswith("python") and rest[:1] == ["-m"]:
        module = rest[1].split(".")[0]
        return None if module in ("venv", "http") or docs_python.find_file(rest[1]) is not None else "no such module"
    if name == "enginerun" and rest[:1] == ["job"]:
        words = ["enginerun", *[word for word in rest[1:] if word != "--check" and not word.endswith(".yml")], "true"]
        name, *rest = words
    command = f"enginerun {rest[0]}" if name == "enginerun" and f"enginerun {rest[0]}" in COMMANDS else name
    if command not in COMMANDS:
        return None
    try:
        parser_of(command).parse_args(rest if command == name else rest[1:])
    except (Exception, SystemExit) as error:
        return repr(error)
    return None


@pytest.mark.parametrize(("page", "code"), find_blocks("sh"))
def test_commands_can_be_given(page: Path, code: str) -> None:
    code = re.sub(r"\[(-[^\]]*)\]", r"\1", code)  # options that may be left out
    done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert [(words, wrong) for words in read_commands(code) if (wrong := find_mistake(words)) is not None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_in_sentences_exist(page: Path) -> None:
    """Options in code that begins with `enginerun` or `autotune` are options of that command."""
    prose = FENCE.sub("", page.read_text())
    for text in re.findall(r"`((?:enginerun|autotune) [^`]+)`", prose):
        words = text.split()
        command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        known = {name for parser in all_parsers(command) for name in parser._option_string_actions}
        own = text.split(" python ")[0]
        assert {word.partition("=")[0] for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", own)} <= known | {
            "--check"
        }, text


def all_parsers(command: str) -> list[ArgumentParser]:
    """Return the parser of a command, and those of its subcommands."""
    parser = parser_of(command)
    subs = [each.choices for each in parser._actions if isinstance(each.choices, dict)]
    return [parser, *(sub for choices in subs for sub in choices.values())]


def test_a_command_that_cannot_be_given_is_found() -> None:
    for command in (
        "enginerun -np 4 --summry python train.py",
        "make tets",
        "autotune shw log",
        "enginerun top --onse",
    ):
        assert find_mistake(shlex.split(command)) is not None, command
