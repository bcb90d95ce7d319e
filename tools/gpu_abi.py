"""Check engine_ext/gpu/cuda.h and nccl.h against the headers of the wheels: values, sizes, offsets, function types.

    python -m tools.gpu_abi [--include DIRECTORY ...] [--download build/gpu-abi]

A compiler checks every line of the lists as a `_Static_assert`. With `--include` nothing is downloaded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.wheels import unpack_wheel

ROOT = Path(__file__).parents[1]
WHEELS = ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-cccl-cu12", "nvidia-nccl-cu12")

CUDA = r"""
#include <cuda.h>
#include "engine_ext/gpu/cuda.h"
#define X(name, value) _Static_assert(name == value, #name);
CUDA_VALUES(X)
#undef X
#define X(name, parameters) \
  _Static_assert(__builtin_types_compatible_p(__typeof__(&name), CUresult(*) parameters), "parameters of " #name);
CUDA_FUNCTIONS(X)
#undef X
_Static_assert(sizeof(CUresult) == sizeof(unsigned) && sizeof(CUjit_option) == sizeof(unsigned), "enumerations");
_Static_assert(sizeof(CUstreamCaptureMode) == sizeof(unsigned), "enumerations");
_Static_assert(sizeof(CUstreamCaptureStatus) == sizeof(unsigned), "enumerations");
_Static_assert(sizeof(CUdevice) == sizeof(int) && sizeof(CUdeviceptr) == sizeof(unsigned long long), "handles");
_Static_assert(sizeof(CUuuid) == 16, "CUuuid");
"""

NCCL = r"""
#include <cuda.h>
#include <nccl.h>
#include "engine_ext/gpu/nccl.h"
#define X(name, value) _Static_assert(name == value, #name);
NCCL_VALUES(X)
#undef X
#define X(name, parameters, since) \
  _Static_assert(__builtin_types_compatible_p(__typeof__(&name), ncclResult_t(*) parameters), "parameters of " #name);
NCCL_FUNCTIONS(X)
#undef X
#define X(name, parameters, since) \
  _Static_assert(__builtin_types_compatible_p(__typeof__(&name), const char *(*) parameters), "parameters of " #name);
NCCL_TEXTS(X)
#undef X
_Static_assert(NCCL_CONFIG_UNDEF_INT == INT_MIN && NCCL_API_MAGIC == 0xcafebeef, "marks of the configuration");
_Static_assert(sizeof(ncclUniqueId) == 128 && sizeof(ncclResult_t) == sizeof(unsigned), "sizes");
_Static_assert(sizeof(cudaStream_t) == sizeof(CUstream), "streams");
_Static_assert(sizeof(struct nccl_config) <= sizeof(ncclConfig_t), "a configuration of 2.17 is part of theirs");
#define X(field) _Static_assert(offsetof(struct nccl_config, field) == offsetof(ncclConfig_t, field), #field);
X(size) X(magic) X(version) X(blocking) X(cgaClusterSize) X(minCTAs) X(maxCTAs) X(netName) X(splitShare)
"""


def fetch_headers(where: Path) -> list[Path]:
    """Unpack the wheels, and return the include directories."""
    return [path for wheel in WHEELS for path in unpack_wheel(wheel, where).glob("nvidia/**/include") if path.is_dir()]


def check(name: str, source: str, includes: list[Path], compiler: str) -> bool:
    """Compile one source, print the result, and return whether it succeeded."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, f"{name}.c")
        file.write_text(source)
        options = [option for path in includes for option in ("-isystem", str(path))]
        command = [compiler, "-std=gnu11", "-fsyntax-only", f"-I{ROOT}", *options, str(file)]
        run = subprocess.run(command, text=True, capture_output=True)
    print(f"{name}.h: {'as theirs' if run.returncode == 0 else 'differs'}{chr(10) * bool(run.stderr)}{run.stderr}")
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", type=Path, action="append", help="a directory that has cuda.h or nccl.h")
    parser.add_argument("--download", type=Path, default=ROOT / "build/gpu-abi", help="where the wheels go")
    parser.add_argument("--compiler", default="cc")
    parser.add_argument("--only", choices=("cuda", "nccl"))
    options = parser.parse_args()
    includes = options.include or fetch_headers(options.download)
    sources = {"cuda": CUDA, "nccl": NCCL}
    chosen = [options.only] if options.only else list(sources)
    return 0 if all([check(name, sources[name], includes, options.compiler) for name in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
