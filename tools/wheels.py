"""Wheels of PyPI as files to look at: downloaded and unpacked, not installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def unpacked(requirement: str, build: Path) -> Path:
    """The files of a wheel, downloaded once.

    Parameters
    ----------
    requirement : str
        As pip reads it. Without a version the newest is taken, and kept while `build` is.
    build : Path
        The directory gets one folder for each requirement.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    subprocess.CalledProcessError
        pip found no wheel for this machine; it has said why.
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
