"""A conda channel of stand-ins: the tests' own Python, and the tools of a build, packed from its environment.

The channel conda-forge cannot be reached where the tests run. The packages have the files that a build of the recipe
uses; the compiler is the machine's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import rattler_build

VERSION = "{}.{}".format(*sys.version_info[:2])
SITE = Path("lib", f"python{VERSION}", "site-packages")
# Name in the channel: project in the environment, and what it depends on.
PROJECTS = {
    "pip": ("pip", ()),
    "packaging": ("packaging", ()),
    "pyproject-metadata": ("pyproject-metadata", ("packaging",)),
    "meson": ("meson", ()),
    "meson-python": ("meson-python", ("packaging", "pyproject-metadata")),
    "ninja": ("ninja", ()),
    "cython": ("Cython", ()),
    "numpy": ("numpy", ()),
}


class Channel:
    """Channel in a directory, for x86-64 alone; `write_index` has to follow the last package."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packages: dict[str, Any] = {}
        (folder / "linux-64").mkdir(parents=True)
        (folder / "noarch").mkdir()

    def pack_files(self, name: str, version: str, files: Path, depends: tuple[str, ...] = ()) -> None:
        """Make a package of a directory with files."""
        build = "0_cpython" if name == "python" else "0"
        rattler_build.assemble_package(
            name=name, version=version, target_platform="linux-64", build_string=build, files_dir=files,
            output_dir=self._folder / "linux-64", depends=depends, license="MIT", compression_level=1,
            detect_prefix=False,
        )  # fmt: skip
        package = self._folder / "linux-64" / f"{name}-{version}-{build}.conda"
        data = package.read_bytes()
        self._packages[package.name] = {
            "name": name, "version": version, "build": build, "build_number": 0, "depends": depends,
            "subdir": "linux-64", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data),
        }  # fmt: skip

    def write_index(self) -> str:
        """Write what a solver reads, and return the address of the channel."""
        for name, packages in (("linux-64", self._packages), ("noarch", {})):
            index = {"info": {"subdir": name}, "packages": {}, "packages.conda": packages, "repodata_version": 1}
            (self._folder / name / "repodata.json").write_text(json.dumps(index))
        return self._folder.as_uri()


def write_channel(folder: Path) -> str:
    """Make the channel with all packages of the recipe, and return its address."""
    channel = Channel(folder / "channel")
    copy_python(folder / "python")
    channel.pack_files("python", "{}.{}.{}".format(*sys.version_info[:3]), folder / "python")
    for name, (project, depends) in PROJECTS.items():
        copy_project(project, folder / name)
        channel.pack_files(name, metadata.version(project), folder / name, ("python", *depends))
    for name, path, text in (
        ("gcc_linux-64", "etc/conda/activate.d/compiler.sh", f"export CC={shutil.which('cc')}\n"),
        ("sysroot_linux-64", "share/sysroot.txt", "that of the machine\n"),
    ):
        (folder / name / path).parent.mkdir(parents=True)
        (folder / name / path).write_text(text)
        channel.pack_files(name, "1", folder / name)
    return channel.write_index()


def copy_python(folder: Path) -> None:
    """Copy this interpreter, its library and its headers, which work from any directory."""
    base = Path(sys.base_prefix)
    unused = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "*.a")
    shutil.copytree(base / "lib" / f"python{VERSION}", folder / SITE.parent, ignore=unused)
    shutil.copytree(base / "include", folder / "include")
    (folder / SITE).mkdir()
    (folder / "bin").mkdir()
    shutil.copy2(base / "bin" / f"python{VERSION}", folder / "bin")
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(f"python{VERSION}")


def copy_project(name: str, folder: Path) -> None:
    """Copy the files of an installed project; its programs then run with the first Python on PATH."""
    for listed in metadata.distribution(name).files or ():
        source = Path(str(listed.locate()))
        if "__pycache__" in listed.parts or not source.exists():
            continue
        outside = listed.parts[0] == ".."
        place = folder.joinpath(*[part for part in listed.parts if part != ".."]) if outside else folder / SITE / listed
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
        if outside and place.read_bytes().startswith(b"#!"):
            place.write_text("#!/usr/bin/env python\n" + place.read_text().partition("\n")[2])
