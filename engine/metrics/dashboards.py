"""`enginerun dashboards export DIR`: the dashboards, rules and configuration for Prometheus and Grafana, as files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from ..host import machine
from ..text import readable
from .errors import MetricsError

PLACE = "@DIRECTORY@"  # stands in a file for the directory of the files
TARGETS = "runs"  # directory of file_sd files that prometheus.yml reads
PARTS = ("dashboards", "prometheus.yml", "provisioning", "rules")


class ExportError(MetricsError):
    """The files cannot be found or written."""


def main(arguments: Sequence[str]) -> int:
    """Run `enginerun dashboards` with the arguments that follow `dashboards`; return 0, or raise `ExportError`."""
    parser = argparse.ArgumentParser(
        prog="enginerun dashboards",
        description="Grafana dashboards, recording rules, alerts and configuration for Prometheus and Grafana.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="export")
    command = commands.add_parser("export", help="write the files into a directory", allow_abbrev=False)
    command.add_argument("directory", metavar="DIR", type=Path)
    command.add_argument("--force", action="store_true", help="overwrite files that differ")
    given = parser.parse_args(arguments)
    written, same = export(given.directory, force=given.force)
    for path in written:
        readable.print_plain(f"wrote {path}")
    if same:
        readable.print_plain(f"{len(same)} files were there already, and as they should be")
    root = given.directory
    readable.print_plain(f"prometheus --config.file={root / 'prometheus.yml'} --storage.tsdb.path={root / 'data'}")
    readable.print_plain(f"enginerun -np 4 --metrics-port 9400 --metrics-file-sd {root / TARGETS} python train.py")
    return 0


def export(directory: Path, *, force: bool = False) -> tuple[list[Path], list[Path]]:
    """Write the files; return the paths that were written, and those that already had this content.

    The directory is created if needed, and other files in it are left alone. Raises `ExportError` if it is not
    writable, or if a file with other content exists and `force` is not given; then nothing is written.
    """
    try:
        root = machine.absolute_path(directory)
    except FileNotFoundError as error:
        raise ExportError(error.strerror) from None
    if any(character in str(root) for character in '"\\\n$'):
        raise ExportError(f"the name {str(root)!r} has a character that Grafana's configuration cannot hold")
    wanted = {root / name: text.replace(PLACE, str(root)) for name, text in read_dashboards().items()}
    differing: list[Path] = []
    same: list[Path] = []
    try:
        for path, text in wanted.items():
            if path.exists() or path.is_symlink():
                (same if path.is_file() and path.read_bytes() == text.encode() else differing).append(path)
        if differing and not force:
            names = ", ".join(str(path.relative_to(root)) for path in differing)
            raise ExportError(f"{root} has files with other content: {names}; --force writes over them")
        written = [path for path in wanted if path not in same]
        for path in written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        (root / TARGETS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot write {str(error.filename or root)!r}: {error.strerror}") from error
    return written, same


def read_dashboards() -> dict[str, str]:
    """Return the files' texts by their names relative to the directory.

    Raises `ExportError` if this installation lacks the files.
    """
    source = _find_source()
    return {
        name: file.read_text(encoding="utf-8")
        for part in PARTS
        for name, file in _list_dashboard_files(source / part, part)
    }


def _find_source() -> Traversable:
    """Return the directory of the files: beside this module if installed, else in the root of the source tree."""
    installed = resources.files(__package__) / "grafana"
    for found in (installed, Path(__file__).parents[2] / "grafana"):
        if all((found / part).is_file() or (found / part).is_dir() for part in PARTS):
            return found
    raise ExportError("this installation has no dashboards: install enginerun again")


def _list_dashboard_files(place: Traversable, name: str) -> Iterator[tuple[str, Traversable]]:
    if place.is_file():
        yield name, place
        return
    for child in sorted(place.iterdir(), key=lambda child: child.name):
        if child.is_dir() or child.name.endswith((".json", ".yml")):
            yield from _list_dashboard_files(child, f"{name}/{child.name}")
