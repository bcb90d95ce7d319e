"""Run Cython once for each module of a commit: `python transpile.py CACHE CYTHON [ARGUMENT ...]`.

Its C code is the same for every Python and machine, and making it takes two thirds of a build. The arguments are those
that meson passes: the output follows `-o`, and `-M` writes a list of what it was made from beside it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Copy the output from the cache, or make it; return Cython's exit code."""
    cache, cython, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if "-o" not in arguments or "-M" not in arguments:  # `--version`, and the first trial
        return subprocess.run([cython, *arguments], check=False).returncode
    place = arguments.index("-o") + 1
    output, others = arguments[place], [*arguments[:place], *arguments[place + 1 :]]
    kept = cache / hashlib.sha256("\0".join(others).encode()).hexdigest()
    if not (kept / "whole").exists():
        done = subprocess.run([cython, *arguments], check=False)
        if done.returncode:
            return done.returncode
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(output, kept / "output.c")
        (kept / "dependencies").write_text(Path(output + ".dep").read_text().replace(output, "@OUTPUT@"))
        (kept / "whole").touch()
        return 0
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    shutil.copyfile(kept / "output.c", output)
    Path(output + ".dep").write_text((kept / "dependencies").read_text().replace("@OUTPUT@", output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
