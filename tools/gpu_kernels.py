"""Generate the shipped engine_ext/gpu/kernels.ptx from kernels.cu. Needs PyPI and x86-64; installs nothing.

    python -m tools.gpu_kernels BUILD_DIRECTORY

The compiler is NVIDIA's NVRTC, which needs no GPU. Its PTX is for the oldest GPU, and its `.version` states the driver
that it needs. The text uses no newer features, so it is rewritten to an older `.version`, which every driver since
CUDA 9.0 accepts. Three assemblers verify that for GPUs from Pascal to Blackwell: each refuses features that the
version or the GPU lacks. A disassembler verifies that memory is accessed by 16 bytes.

The text begins with two digests: of source and options, and of the text. A test compares them without a download.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.wheels import unpack_wheel

SOURCE = Path(__file__).parents[1] / "engine_ext" / "gpu" / "kernels.cu"
TEXT = SOURCE.with_suffix(".ptx")

OPTIONS = ["--gpu-architecture=compute_60", "--fmad=false", "--std=c++17"]
VERSION = "6.0"  # of the PTX language: CUDA 9.0
COMPILER = "nvidia-cuda-nvrtc-cu12==12.9.86"
ASSEMBLERS = {  # the oldest, a middle and the newest version, with the GPUs that each supports
    "nvidia-cuda-nvcc-cu11==11.8.89": ["sm_60", "sm_70", "sm_80", "sm_86", "sm_90"],
    "nvidia-cuda-nvcc-cu12==12.9.86": ["sm_60", "sm_75", "sm_90", "sm_100", "sm_121"],
    "nvidia-cuda-nvcc==13.5.37": ["sm_75", "sm_90", "sm_121"],
}
DISASSEMBLER = "nvidia-cuda-nvdisasm==13.5.37"

HEAD = """\
// What the GPU plane runs on the device: kernels.cu, by {compiler} {options}. Made by `make gpu-kernels`; do not edit.
// source and options: {source}
// text below: {text}
"""


def digest_of_source() -> str:
    """Return the digest of everything that determines the text."""
    what = [SOURCE.read_text(), COMPILER, VERSION, *OPTIONS]
    return hashlib.sha256("\0".join(what).encode()).hexdigest()


def add_digests(text: str) -> str:
    """Return the text with its digests at the beginning."""
    return HEAD.format(
        compiler=COMPILER.replace("==", " "),
        options=" ".join(OPTIONS),
        source=digest_of_source(),
        text=hashlib.sha256(text.encode()).hexdigest(),
    ) + text  # fmt: skip


def describe_staleness(shipped: str) -> str | None:
    """Describe what is wrong with a shipped text; None if it is up to date."""
    head, text = shipped.split("\n")[:3], "\n".join(shipped.split("\n")[3:])
    if head[1:2] != [f"// source and options: {digest_of_source()}"]:
        return "kernels.ptx was not made of this kernels.cu with these options: make gpu-kernels"
    return None if shipped == add_digests(text) else "kernels.ptx was edited: make gpu-kernels"


def find_program(name: str, requirement: str, build: Path) -> Path:
    """Return an executable of a wheel."""
    (path,) = unpack_wheel(requirement, build).rglob(f"bin/{name}")
    path.chmod(0o755)
    return path


def compile_source(source: str, library: Path) -> str:
    """Compile to PTX, with a library that needs neither a GPU nor a driver."""
    nvrtc = ctypes.CDLL(str(library))
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()

    def get_text(kind: str) -> str:
        getattr(nvrtc, f"nvrtcGet{kind}Size")(handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{kind}")(handle, buffer)
        return buffer.value.decode()

    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    nvrtc.nvrtcCreateProgram(ctypes.byref(handle), source.encode(), b"kernels.cu", 0, None, None)
    if nvrtc.nvrtcCompileProgram(handle, len(options), options):
        sys.exit(get_text("ProgramLog"))
    return get_text("PTX")


def lower_version(ptx: str) -> str:
    """Lower the version of PTX for older drivers, and remove empty comments and lines."""
    ptx, versions = re.subn(r"^\.version \S+$", f".version {VERSION}", ptx, flags=re.MULTILINE)
    if versions != 1:
        sys.exit("the compiler's text does not say its version once")
    noise = re.compile(r"\s*(?://(?: begin inline asm| end inline asm| \.globl.*)?)?\s*")
    return "".join(f"{line}\n" for line in ptx.split("\n") if not noise.fullmatch(line))


def check_assembly(ptxas: Path, wheel: str, architecture: str, text: Path) -> str | None:
    """Assemble the text and describe the problem; None if there is none."""
    output = text.with_name(f"{wheel}-{architecture}.cubin")
    command = [str(ptxas), "-v", f"-arch={architecture}", str(text), "-o", str(output)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        return f"ptxas of {wheel} refuses it for {architecture}:\n{done.stdout}"
    if set(re.findall(r"(\d+) bytes (?:stack frame|spill)", done.stdout)) != {"0"}:
        return f"ptxas of {wheel} spills registers for {architecture}:\n{done.stdout}"
    used = [int(registers) for registers in re.findall(r"Used (\d+) registers", done.stdout)]
    print(f"{wheel} {architecture}: {len(used)} kernels, {min(used)} to {max(used)} registers, no spills", flush=True)
    return None


def narrow_accesses(nvdisasm: Path, cubin: Path) -> list[str]:
    """Return kernels without accesses of 16 bytes, or with generic ones, which first determine the kind of memory.

    In conversions between dtypes, only accesses of the wider dtype have 16 bytes.
    """
    listing = subprocess.run([nvdisasm, cubin], text=True, capture_output=True, check=True).stdout
    kernels = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)[1:]
    found = []
    for name, code in zip(kernels[::2], kernels[1::2], strict=True):
        wide = [bool(re.search(rf"\b{access}\.E\.128\b", code)) for access in ("LDG", "STG")]
        converts = re.fullmatch(r"(?:un)?pack_(\w+64|\w+32)_(?:b?float16)", name)
        enough = any(wide) if converts else all(wide)
        if not enough or re.search(r"\b(?:LD|ST|LDL|STL)(?:\.E)?\b[. ]", code):
            found.append(name)
    return found


def main() -> None:
    """Compile, lower and verify the text, then write it."""
    build = Path(sys.argv[1])
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda wheel: unpack_wheel(wheel, build), [COMPILER, *ASSEMBLERS, DISASSEMBLER]))
    (library,) = unpack_wheel(COMPILER, build).rglob("libnvrtc.so.*")
    text = lower_version(compile_source(SOURCE.read_text(), library))
    if lower_version(compile_source(SOURCE.read_text(), library)) != text:
        sys.exit("the compiler gives another text each time")
    draft = build / "kernels.ptx"
    draft.write_text(add_digests(text))
    runs = [
        (find_program("ptxas", wheel, build), wheel, gpu, draft) for wheel, gpus in ASSEMBLERS.items() for gpu in gpus
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [problem for problem in pool.map(lambda run: check_assembly(*run), runs) if problem]
    if wrong:
        sys.exit("\n".join(wrong))
    for wheel in ASSEMBLERS:
        if narrow := narrow_accesses(find_program("nvdisasm", DISASSEMBLER, build), build / f"{wheel}-sm_90.cubin"):
            sys.exit(f"{wheel}: these kernels do not access memory by 16 bytes throughout: {', '.join(narrow)}")
    TEXT.write_text(draft.read_text())
    print(f"{TEXT.name}: {len(draft.read_bytes()):,} bytes")


if __name__ == "__main__":
    main()
