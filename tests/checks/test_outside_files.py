"""Rules about files that others wrote: one reader, with limits, reads them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What else reads whole files or parses JSON, and of whom it is.
OWN = {
    # of the kernel, of this process, or of the package itself
    "autotune/journal.py", "engine/gpu/plane.py", "engine/host/machine.py", "engine/host/network.py",
    "engine/host/processes.py", "engine/launch/witness.py", "engine/metrics/dashboards.py",
    "engine/metrics/export/atomic_file.py", "engine/metrics/report/find_jobs.py", "engine/ray/porter.py",
    # of ranks of the same job, which have proven the secret; its own directory, made for it alone
    "engine/launch/remote_files.py", "engine/ray/elastic.py", "engine/rendezvous/by_mpi.py",
    "engine/rendezvous/set_links.py", "engine/runner/function.py", "engine/runner/job.py", "engine/runner/rank.py",
    "engine/spark/elastic.py", "engine/spark/launcher.py", "engine/spark/places.py", "engine/spark/record.py",
    "engine/spark/writer.py", "engine/tensorflow/variables.py", "engine/tuning/journals.py",
    # of a store, whose pickles are loaded, too; the user's own program and model
    "engine/keras/models.py", "engine/launch/shadow.py", "engine/spark/estimator.py", "engine/spark/manifest.py",
}  # fmt: skip


def test_engine_and_tuner_have_the_same_reader() -> None:
    """Neither may import the other."""
    assert (ROOT / "engine/bounded_reader.py").read_bytes() == (ROOT / "autotune/bounded_reader.py").read_bytes()


def _reads(node: ast.AST) -> bool:
    """Whether a call reads a whole file without a limit, or parses JSON without one."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    of_json = isinstance(node.func.value, ast.Name) and node.func.value.id == "json"
    return node.func.attr in ("read_text", "read_bytes") or (of_json and node.func.attr in ("load", "loads"))


def test_files_of_others_are_read_within_limits() -> None:
    sources = [path for room in ("engine", "autotune") for path in (ROOT / room).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in sources
        if path.name != "bounded_reader.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if _reads(node) and "bounded_reader" not in ast.unparse(node)
    }
    assert found == OWN
