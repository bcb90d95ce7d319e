"""Bill of materials of a wheel in CycloneDX's format: its binaries, what they link and what they were made with."""

from __future__ import annotations

import hashlib
import json
import uuid
import zipfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from pyproject_metadata import StandardMetadata

from .elf import read_libraries
from .headers import Headers

_TOOLS = ("ziglang", "Cython", "meson", "ninja")


def describe_materials(wheel: Path, metadata: StandardMetadata, headers: Headers, commit: str, epoch: int) -> str:
    """Return the bill of materials as JSON; equal wheels have equal ones.

    `headers` are those with which the wheel was compiled. `commit` is the revision of the sources, and `epoch` its
    time: seconds since 1970.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    itself = {
        "type": "library", "bom-ref": "wheel", "name": metadata.name, "version": str(metadata.version),
        "purl": f"pkg:pypi/{metadata.canonical_name}@{metadata.version}?file_name={wheel.name}",
        "licenses": [{"license": {"id": str(metadata.license)}}],
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "properties": [{"name": "git:commit", "value": commit}],
    }  # fmt: skip
    linked, packages = _describe_linked(wheel), _describe_packages(metadata)
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": _describe_tools(headers)},
            "component": itself,
        },
        "components": [*_describe_binaries(wheel), *linked, *packages],
        "dependencies": [{"ref": "wheel", "dependsOn": [each["bom-ref"] for each in (*linked, *packages)]}],
    }
    return json.dumps(document, indent=2) + "\n"


def _describe_binaries(wheel: Path) -> list[dict[str, Any]]:
    """Describe each file that is no text of Python: the shared libraries, and the kernels for GPUs."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith((".so", ".ptx"))]
        digests = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}
    return [
        {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for name, digest in digests.items()
    ]


def _describe_linked(wheel: Path) -> list[dict[str, Any]]:
    """Describe the libraries of the system that the wheel's own link. Nothing of them is in the wheel."""
    libraries = read_libraries(wheel)
    names = sorted({name for each in libraries for name in each.needed})
    newest = ".".join(map(str, max(each.glibc for each in libraries)))
    wanted = [{"name": "glibc:newest-symbol", "value": f"GLIBC_{newest}"}]
    return [
        {"type": "library", "bom-ref": f"linked:{name}", "name": name, "scope": "required", "properties": wanted,
         "description": "part of the GNU C library; found on the machine"}
        for name in names
    ]  # fmt: skip


def _describe_packages(metadata: StandardMetadata) -> list[dict[str, Any]]:
    """Describe the packages that pip installs with the wheel."""
    needed: list[Requirement] = list(metadata.dependencies)
    return [
        {"type": "library", "bom-ref": f"pypi:{each.name}", "name": each.name, "purl": f"pkg:pypi/{each.name}",
         "scope": "required", "description": f"installed beside it: {each}"}
        for each in needed
    ]  # fmt: skip


def _describe_tools(headers: Headers) -> list[dict[str, Any]]:
    """Describe what the wheel was made with. It contains Cython's helpers and inline functions of Python's headers."""
    tools = [
        {"type": "application", "name": name, "version": number, "purl": f"pkg:pypi/{name.lower()}@{number}"}
        for name, number in ((name, version(name)) for name in _TOOLS)
    ]
    origin = [{"name": "origin", "value": headers.origin}]
    return [*tools, {"type": "library", "name": "CPython's headers", "version": headers.version, "properties": origin}]
