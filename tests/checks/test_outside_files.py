"""Rules about files from other programs: one reader reads them, with limits."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .syntax import list_calls, parse_rooms

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "autotune")
# Other files that read whole files or parse JSON, by the origin of what they read.
OWN = {
    # from the kernel, this process, or the package itself
    "autotune/journal.py", "engine/gpu/plane.py", "engine/host/machine.py", "engine/host/network.py",
    "engine/host/processes.py", "engine/launch/hosts/dead_workers.py", "engine/metrics/dashboards.py",
    "engine/metrics/export/files.py", "engine/metrics/report/find_jobs.py", "engine/ray/node_agent.py",
    # from ranks of the same job, which have proven the secret, or in a directory made for the job alone
    "engine/launch/hosts/remote_files.py", "engine/ray/elastic.py",
    "engine/runner/function.py", "engine/runner/job.py", "engine/runner/rank.py",
    "engine/spark/elastic.py", "engine/spark/launcher.py", "engine/spark/record.py",
    "engine/spark/writer.py", "engine/tensorflow/variables.py", "engine/tuning/journals.py",
    # from a store whose pickles are loaded, too, or the user's own program and model
    "engine/keras/models.py", "engine/launch/cli/hidden_package.py", "engine/spark/estimator.py",
    "engine/spark/manifest.py",
}  # fmt: skip


def test_engine_and_tuner_have_the_same_reader() -> None:
    """The engine and the tuner may not import each other, so each has its copy of the reader."""
    assert (ROOT / "engine/text/bounded_reader.py").read_bytes() == (ROOT / "autotune/bounded_reader.py").read_bytes()


def _reads(node: ast.AST) -> bool:
    """Return whether a call reads a whole file without a limit, or parses JSON without one."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    of_json = isinstance(node.func.value, ast.Name) and node.func.value.id == "json"
    return node.func.attr in ("read_text", "read_bytes") or (of_json and node.func.attr in ("load", "loads"))


# Files where `int` or `float` takes a field by its name, and the origin of the field.
OWN_NUMBERS = {
    "engine/launch/job.py": "a setting, which was checked",
    "engine/ray/elastic.py": "an argument, which was checked",
    "engine/ray/slots.py": "free resources, as Ray counts them",
    "engine/spark/columns.py": "a column's bound, which Spark has computed",
    "engine/trace/summary.py": "a row of the summary itself",
    "engine/tuning/trial_loop.py": "the engine's own knobs",
}
# Files with a pattern that captures digits without a bound, and what bounds them later.
BOUNDED_LATER = {"engine/launch/hosts/host_list.py": "`_parse_count`, which reads any number of them as the most"}
UNBOUNDED = re.compile(r"\((?:\?P<\w+>)?(?:\\d|\[0-9\])[+*]\)")  # a group that captures any number of digits


def _takes_field(node: ast.AST) -> bool:
    """Return whether a call makes a number of a field: `int(told["rank"])`, `float(told.get("age", 0))`."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("int", "float"):
        return False
    return any(
        (isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant) and type(inner.slice.value) is str)
        or (isinstance(inner, ast.Call) and ast.unparse(inner.func).endswith(".get"))
        for argument in node.args
        for inner in ast.walk(argument)
    )


def test_numbers_in_messages_files_and_variables_are_read_within_limits() -> None:
    """`whole`, `number`, a `Message` or a form reads them: `int` and `float` accept texts, `nan` and bools."""
    sources = {str(path.relative_to(ROOT)): path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    found = {name for name, tree in parse_rooms(*ROOMS).items() if any(map(_takes_field, list_calls(tree)))}
    assert found == OWN_NUMBERS.keys()
    assert {name for name, text in sources.items() if UNBOUNDED.search(text)} == BOUNDED_LATER.keys()


def test_an_unbounded_number_is_known_as_one() -> None:
    for text in ('int(told["rank"])', 'float(told.get("age", 0))', 'int(os.environ["X"], 16)', 'int(str(a.b["c"]))'):
        assert _takes_field(ast.parse(text, mode="eval").body), text
    for text in ("int(told[0])", 'whole(told, "rank")', "int(text)"):
        assert not _takes_field(ast.parse(text, mode="eval").body), text
    assert all(map(UNBOUNDED.search, (r"rank (\d+)", r"(?P<slots>\d+)", r"x([0-9]+)")))
    assert not any(map(UNBOUNDED.search, (r"rank ([0-9]{1,9})", r"rank \d+", r"(\w+)")))


def test_files_of_others_are_read_within_limits() -> None:
    found = {
        name
        for name, tree in parse_rooms(*ROOMS).items()
        if not name.endswith("/bounded_reader.py")
        for call in list_calls(tree)
        if _reads(call) and "bounded_reader" not in ast.unparse(call)
    }
    assert found == OWN
