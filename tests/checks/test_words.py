"""Rules about words: docstrings are whole thoughts, functions have two words, commit subjects say what was done.

The counts only go down: a commit that lowers one writes the new number here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from .syntax import list_nodes, parse_rooms

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "engine_ext", "autotune", "benchmarks", "grafana", "tools", "tests")
# A docstring or a description that begins so is half a sentence.
HALF = re.compile(
    r"(Of|That|By|Whose|What|Whether|How|Whoever|All that|Where|Who|Which|As|With|From|In|On|For|To|At)\b"
)
# Docstrings of Cython, which stand at the beginning of a line, and comments of C.
NATIVE_TEXT = {
    ".pyx": re.compile(r'^[ ]*"""(.*?)"""', re.MULTILINE | re.DOTALL),
    ".h": re.compile(r"/\*[\s*]*(.*?)\*/", re.DOTALL),
}
NATIVE_TEXT |= {".pxd": NATIVE_TEXT[".pyx"], ".c": NATIVE_TEXT[".h"], ".cu": NATIVE_TEXT[".h"]}
FIELD = re.compile(r"^\S[^\n]* : [^\n]*\n    (\S+(?: that)?)", re.MULTILINE)
# Functions of one word that the field uses for exactly that.
ONE_WORD = frozenset(
    """
    abort accept acquire add allgather allreduce alltoall append attach backward barrier broadcast cancel cast check
    clear close collect compile connect copy decode describe destroy detach done drain dump encode end enter error
    exit export extend feed fileno finish flush format forward freeze gather get handle init insert install is items
    join keys kill length listen load lock log main make map merge name next notify open parse pause peek pending
    pin plan poll pop predict prepare put queue rank read receive record recv reduce reducescatter register release
    remove render replace reset resize resolve restore resume run save scatter seek send serve set setup shutdown
    size skip sort split start state step stop store submit sum suspend swap sync synchronize teardown tell test
    then truncate unfreeze unlock unregister unwrap update validate values view wait wake warn wrap write
    """.split()
)
# Functions of one word whose names others fixed: a library that calls them, Horovod, pickles or native code that name
# them, and this project's own public API. Each with its class or module.
FIXED = frozenset(
    """
    BaseDataLoader._iterate BroadcastGlobalVariablesHook.begin CastCompressor.compress CastCompressor.decompress
    Compressor.compress Compressor.decompress DeviceBackend.reconfigure DeviceBackend.shrink
    Distributed.communication PowerSGD.accepts PowerSGD.rounds EngineProcessGroup.shrink
    EngineWork.exception EngineWork.result ProcessSet.included RayExecutor.execute Reducer.separate Scheme.accepts
    Scheme.rounds State.commit SyncBatchNormalization._moments TorchReducer.separate
    _DistributedKerasOptimizer.apply _DistributedKerasOptimizer.build _DistributedTape.gradient
    _DistributedTape.jacobian _Fallback.emit _Rank.filter batches.loop caller.place errors.of optax.distributed
    optimizer._plain run.leave
    """.split()
)
COPY = "autotune/bounded_reader.py"  # equal to the engine's by another check, as autotune imports no engine
SUBJECT = re.compile(r"[A-Za-z0-9_./, -]+: [A-Z][a-z]+ .+|Revert \".+")
MOST_SUBJECT = 72  # characters

MOST = {
    "half sentences that begin a docstring": 0,
    "half sentences that describe a field or parameter": 0,
    "half sentences that begin a docstring of Cython or a comment of C": 0,
    "functions of one word": 15,
    "class names of several classes": 3,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Places of what is counted, by its name in `MOST`."""
    docstrings, fields, functions = [], [], []
    classes: dict[str, list[str]] = defaultdict(list)
    for name, tree in parse_rooms(*ROOMS).items():
        module = name.removesuffix("/__init__.py").removesuffix(".py").rpartition("/")[2]
        owners = {each: node.name for node in list_nodes(tree) if isinstance(node, ast.ClassDef) for each in node.body}
        for node in list_nodes(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text, place = ast.get_docstring(node) or "", f"{name}:{getattr(node, 'lineno', 1)}"
                docstrings += [place] if HALF.match(text) else []
                begins = [match[1] for match in FIELD.finditer(text)]
                fields += [place for word in begins if HALF.match(word) and not word.startswith("Whether")]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not name.startswith("tests/"):
                functions += [f"{name}:{node.lineno}"] if is_one_word(node, owners.get(node, module)) else []
            if isinstance(node, ast.ClassDef) and not name.startswith(("tests/", COPY)):
                classes[node.name].append(f"{name}:{node.lineno}")
    shared = [" ".join([name, *places]) for name, places in classes.items() if len(places) > 1]
    return dict(zip(MOST, (docstrings, fields, list(find_native_halves()), functions, shared), strict=True))


def find_native_halves() -> Iterator[str]:
    """Yield the place of each text of a native source that begins as half a sentence."""
    for path in sorted((ROOT / "engine_ext").rglob("*")):
        text = path.read_text() if path.suffix in NATIVE_TEXT else ""
        for found in NATIVE_TEXT[path.suffix].finditer(text) if text else ():
            if HALF.match(found[1]):
                yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start(1)) + 1}"


def is_one_word(function: ast.FunctionDef | ast.AsyncFunctionDef, owner: str = "") -> bool:
    """Return whether a function's name is one word that is neither an established nor a fixed one.

    `owner` is the class or module that it belongs to. Properties are nouns. A name in CamelCase is one of an API that
    others fixed: Horovod's `DistributedOptimizer`, or the `getHistory` of Spark.
    """
    decorators = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
    word = function.name.strip("_")
    if function.name.startswith("__") or decorators & {"property", "cached_property", "setter"}:
        return False
    fixed = f"{owner}.{function.name}" in FIXED or re.search("[a-z][A-Z]", word) is not None
    return "_" not in word and word not in ONE_WORD and not fixed


@pytest.mark.parametrize("kind", MOST)
def test_what_a_stranger_stumbles_over_becomes_less(found: dict[str, list[str]], kind: str) -> None:
    """A smaller count is an error, too, until it stands in `MOST`."""
    places = found[kind]
    assert len(places) == MOST[kind], "\n".join(places[-20:])


def test_commit_subjects_say_what_was_done_and_where() -> None:
    """Subjects have the form `area: Verb object`."""
    introduced = git_log("--diff-filter=A", "--format=%H", "--", "tests/checks/test_words.py")
    if not introduced:
        pytest.skip("needs the history of the repository")
    subjects = git_log("--no-merges", "--format=%s", f"{introduced[-1]}..HEAD")
    assert [line for line in subjects if len(line) > MOST_SUBJECT or not SUBJECT.fullmatch(line)] == []


def git_log(*arguments: str) -> list[str]:
    """Return the lines of `git log`; none outside of a repository."""
    command = ["git", "log", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines()
