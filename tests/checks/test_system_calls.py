"""Rules about calls that some systems lack, and about waits without a limit on what may never end."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for room in ("engine", "autotune")
    for path in sorted((ROOT / room).rglob("*.py"))
}
# Where a process that was killed, or has ended, is waited for without a limit: nobody there keeps a lease, but for
# `supervisor` and `spawn`, which ask only when the process has ended.
UNLIMITED = {
    "engine/launch/spawn.py",
    "engine/launch/supervisor.py",
    "engine/runner/function.py",
    "engine/spark/elastic.py",
}


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_calls_that_some_builds_of_python_lack_go_through_host_linux() -> None:
    found = {
        f"{name}:{node.lineno}"
        for name, tree in SOURCES.items()
        if name != "engine/host/linux.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("pidfd_open", "memfd_create")
    }
    assert found == set()


def test_processes_are_waited_for_with_a_limit() -> None:
    """A process in an uninterruptible wait ends neither by SIGKILL nor by anything else."""
    found = {
        name
        for name, tree in SOURCES.items()
        for call in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("wait", "communicate")
        and ast.unparse(call.func.value).endswith(("process", "launcher", "popen", "child"))
        and not call.args
        and not call.keywords
    }
    assert found == UNLIMITED
