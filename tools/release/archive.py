"""Wheel files: equal bytes from equal contents, whoever packs them, where and when."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import time
import tomllib
import zipfile
from pathlib import Path

from packaging.version import Version
from pyproject_metadata import StandardMetadata

from .targets import Target

_OLDEST = 315532800  # 1980, where the clock of zip files begins; in seconds since 1970
_WHEEL = """\
Wheel-Version: 1.0
Generator: enginerun.tools.release
Root-Is-Purelib: false
Tag: {tag}
"""


def read_metadata(source: Path) -> StandardMetadata:
    """Return the metadata of `pyproject.toml`, with the version of `meson.build`."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    metadata = StandardMetadata.from_pyproject(project, source)
    found = re.search(r"^  version: '([^']+)'", (source / "meson.build").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError("meson.build names no version")
    metadata.version = Version(found[1])
    return metadata


def pack_wheel(site: Path, source: Path, target: Target, folder: Path, epoch: int) -> Path:
    """Pack what was installed into a wheel in `folder`, and return it.

    `site` holds what belongs into `site-packages`, and `source`, a copy of the sources, the metadata and the license.
    All files have the time stamp `epoch`: seconds since 1970.
    """
    metadata = read_metadata(source)
    prefix = f"{metadata.name.replace('-', '_')}-{metadata.version}"
    information = f"{prefix}.dist-info"
    files = {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    files |= {
        f"{information}/METADATA": bytes(metadata.as_rfc822()),
        f"{information}/WHEEL": _WHEEL.format(tag=target.tag).encode(),
        f"{information}/entry_points.txt": _format_entry_points(metadata).encode(),
    }
    for path in metadata.license_files or ():
        files[f"{information}/licenses/{path.as_posix()}"] = (source / path).read_bytes()
    files[f"{information}/RECORD"] = _format_record(files, f"{information}/RECORD").encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{prefix}-{target.tag}.whl"
    moment = time.gmtime(max(epoch, _OLDEST))[:6]
    # The metadata comes last, as PEP 427 advises.
    names = sorted(files, key=lambda name: (name.startswith(information), name))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, moment)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, files[name], compresslevel=9)
    return wheel


def compute_record_hash(data: bytes) -> str:
    """Return the digest of a file as RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _format_record(files: dict[str, bytes], itself: str) -> str:
    text = io.StringIO()
    rows = [(name, compute_record_hash(data), len(data)) for name, data in sorted(files.items())]
    csv.writer(text, lineterminator="\n").writerows([*rows, (itself, "", "")])
    return text.getvalue()


def _format_entry_points(metadata: StandardMetadata) -> str:
    groups = {"console_scripts": metadata.scripts, **metadata.entrypoints}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items()), ""]
    return "\n".join(lines)
