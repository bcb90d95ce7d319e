"""Wheels of PyPI as files for inspection: downloaded and unpacked, not installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def unpack_wheel(requirement: str, build: Path) -> Path:
    """Download a wheel once, and return the directory of its files.

    The requirement is in pip's syntax. Without a version, the newest is taken, and kept as long as `build` exists,
    which gets a subdirectory for each requirement. Raises CalledProcessError, whose output gives pip's reason, if there
    is no wheel for this machine.
    """
    folder = build / requirement.replace("==", "-")
    if not (folder / "whole").exists():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps"]
        subprocess.run([*command, "--only-binary=:all:", "--dest", folder, requirement], check=True)
        (wheel,) = folder.glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        wheel.unlink()
        (folder / "whole").touch()
    return folder
