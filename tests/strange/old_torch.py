"""Run the tests of the torch binding with the oldest supported torch, 2.2.2, in an environment of its own.

The wheel of PyPI is a CUDA build of 720 MiB, whose libraries are 2 GiB more. Without a GPU none of them is ever
called, so stand-ins replace them: libraries of the same names and versions, each of whose functions fails. They
are made from the symbols that torch's own libraries look for.

    python -m tests.strange.old_torch [--work build/old-torch] [--size 2]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.2.2"
PACKAGES = (
    "numpy<2",
    "filelock",
    "typing_extensions",
    "sympy",
    "networkx",
    "jinja2",
    "fsspec",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
)
TOOLS = ("Cython>=3.3,<3.4", "meson>=1.5", "meson-python>=0.18", "ninja>=1.11")
LIBRARIES = re.compile(r"lib(cu[a-zA-Z]+|nccl|nvrtc|nvshmem_host|nvToolsExt)\.so\.\d+")  # of NVIDIA
THEIRS = re.compile(
    r"(__cuda|cuda|cu[A-Z]|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|cupti|nccl|nvrtc|nvshmem|nvtx)\w+"
)
# Functions called when torch is imported; all others fail with 100, "no device".
CALLED = """
void **__cudaRegisterFatBinary(void *binary) { static void *handle; (void)binary; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
int cudaGetDeviceCount(int *count) { *count = 0; return 100; }
int cudaGetLastError(void) { return 0; }
const char *cudaGetErrorString(int error) { (void)error; return "no device"; }
int cudaDriverGetVersion(int *version) { *version = 0; return 0; }
"""

# Cases that torch 2.2 itself cannot pass, and why.
CANNOT = {
    "test_gradient_scaler_skips_a_step_on_all_ranks": "there is no torch.amp.GradScaler",
    "test_a_scaler_on_a_rank_without_a_backward": "there is no torch.amp.GradScaler",
    "test_schedulers_made_before_and_after": "a test before it has compiled something: schedulers come after that",
    "test_equals_one_process_with_the_whole_batch": "Adam(fused=True) works on GPUs only there",
    "test_what_horovod_scripts_say_around_gradient_scaling": "there is no torch.amp.GradScaler",
    "test_compiled_models_keep_the_overlap": "a compiler does not see through the function that takes the mark",
}


def run(*command: object, **options: object) -> None:
    """Run a command; exit if it fails."""
    subprocess.run([str(each) for each in command], check=True, **options)  # type: ignore[call-overload]


def missing_libraries(libraries: Path) -> dict[str, set[str]]:
    """CUDA's libraries that torch's own libraries need, with the versions of symbols that they want of each."""
    found: dict[str, set[str]] = {}
    for library in libraries.glob("*.so"):
        told = subprocess.run(["readelf", "-d", "-V", library], check=True, capture_output=True, text=True).stdout
        for name in filter(LIBRARIES.fullmatch, re.findall(r"\(NEEDED\).*\[(.+)\]", told)):
            found.setdefault(name, set())
        name = ""
        for file, version in re.findall(r"File: (\S+)|Name: (\S+)  Flags", told):
            name = file or name
            if version and name in found:
                found[name].add(version)
    return found


def missing_symbols(libraries: Path) -> list[str]:
    """CUDA functions that torch's own libraries look for."""
    found = set()
    for library in libraries.glob("*.so"):
        lines = subprocess.run(["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True)
        found |= {line.split()[-1].partition("@")[0] for line in lines.stdout.splitlines() if line.strip()}
    return sorted(name for name in found if THEIRS.fullmatch(name))


def stand_ins(work: Path, libraries: Path) -> Path:
    """Directory of libraries that replace CUDA's."""
    directory = work / "stand-ins"
    directory.mkdir(exist_ok=True, parents=True)
    source, script = directory / "functions.c", directory / "version.map"
    others = [name for name in missing_symbols(libraries) if f"{name}(" not in CALLED]
    source.write_text(CALLED + "".join(f"int {name}(void) {{ return 100; }}\n" for name in others))
    for name, versions in missing_libraries(libraries).items():
        first, *rest = sorted(versions) or [name]
        script.write_text(f"{first} {{ global: *; }};\n" + "".join(f"{each} {{ }};\n" for each in rest))
        flags = "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"
        run("cc", *flags, "-o", directory / name, source)
    return directory


def prepare(work: Path) -> tuple[Path, Path]:
    """Interpreter of an environment with this torch and this project, and the directory of the stand-ins."""
    work.mkdir(parents=True, exist_ok=True)
    python = work / "environment" / "bin" / "python"
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    if not python.exists():
        run(sys.executable, "-m", "venv", work / "environment")
        run(*pip, "--no-deps", f"torch=={TORCH}")
        run(*pip, *PACKAGES, *TOOLS)
    (libraries,) = (work / "environment").glob("lib/python*/site-packages/torch/lib")
    path = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    run(
        *pip, "--no-deps", "--no-build-isolation", "--force-reinstall", f"-Cbuild-dir={work / 'native'}", ROOT, env=path
    )
    return python, stand_ins(work, libraries)


def run_cases(python: Path, work: Path, size: int, known: dict[str, str], libraries: Path | None = None) -> int:
    """Run the cases with the torch of a Python, which has this project, too; return the exit code.

    The working directory `work` is not the sources, which would hide the installation. `known` holds the cases that
    cannot pass, with the reasons. The dynamic linker searches `libraries` first.
    """
    environment = {**os.environ, **({} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)})}
    options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=600", "-m", "on_ranks", "--only-ranks", str(size)]
    command = [python, "-P", "-m", "pytest", *options, ROOT / "tests" / "frameworks"]
    done = subprocess.run(command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    for name in sorted(set(failed)):
        print(f"{'cannot be' if name in known else 'FAILED'}: {name}: {known.get(name, 'see above')}")
    passed = sum(map(int, re.findall(r"\b(\d+) passed", done.stdout)))
    print(f"{passed} of {passed + len(failed)} cases pass")
    return int(done.returncode not in (0, 1) or not passed or any(name not in known for name in failed))


def main() -> int:
    """Run everything; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "old-torch", help="the environment's directory")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    given = parser.parse_args()
    work = given.work.resolve()
    python, libraries = prepare(work)
    return run_cases(python, work, given.size, CANNOT, libraries)


if __name__ == "__main__":
    sys.exit(main())
