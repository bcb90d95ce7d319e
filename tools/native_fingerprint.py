"""Write the header with the fingerprint of the native sources: `python tools/native_fingerprint.py DIRECTORY HEADER`.

Ranks compare it when they meet: two builds of one version may differ in the meaning of a word in shared memory, or in
the bits of a sum.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

SUFFIXES = (".c", ".h", ".ptx", ".pxd", ".pyx")


def compute_fingerprint(directory: Path) -> str:
    """Return the digest of the names and contents of all native sources below a directory: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.suffix in SUFFIXES and not (path.suffix == ".c" and path.with_suffix(".pyx").exists()):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(directory).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def main() -> None:
    """Write the header."""
    directory, header = map(Path, sys.argv[1:])
    header.write_text(f'#define ENGINE_SOURCES "{compute_fingerprint(directory)}"\n', encoding="utf-8")


if __name__ == "__main__":
    main()
