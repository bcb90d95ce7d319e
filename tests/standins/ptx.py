"""Stand-in for a GPU's processor: turn PTX into C, one function for each kernel, which is run once for each thread.

    python -m tests.standins.ptx kernels.ptx kernels.c        # kernels.c wants -Iengine_ext -fwrapv -ffp-contract=off

Each function has the signature

    void kernel(void **arguments, const unsigned grid[3], const unsigned block[3],
                const unsigned block_index[3], const unsigned thread_index[3]);

with the argument list of `cuLaunchKernel`. It is called for every thread of the grid in any order, and from several
host threads at once if `ptx_ranges` is not used. All functions are in the table

    extern const struct ptx_kernel { const char *name; ptx_function *function; unsigned arguments; } ptx_kernels[];

which ends with a null name. The C source also exports:

- `long ptx_distance`, which is added to every address where an executor maps device memory elsewhere.
- `int ptx_launch(function, arguments, grid, block)` runs all threads, block by block; `ptx_block` those of one block,
  whose index is the last argument. -1: a thread failed, as on a device; `ptx_error` gives the reason. The thread's
  other stores took place, so that its output is meaningless.
- `void ptx_ranges(ranges, count)` restricts accesses to these ranges, sorted by their start; count 0 allows all.

Only barrier-free kernels without shared, local or constant memory are supported, since each thread runs to its end
alone. Any unknown instruction, operand or directive is an `UnknownError`: its meaning is not guessed. Arithmetic
without a rounding mode (`add.f32`) is unknown on purpose: a device may fuse it.

This cannot show speed, interactions of threads' accesses (coalescing, races), and the output of the driver's compiler.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=gnu11", "-O1", "-fwrapv", "-ffp-contract=off", "-fPIC", "-w", f"-I{ROOT / 'engine_ext'}"]


class UnknownError(Exception):
    """The PTX contains a construct that the translator does not know."""


# Registers hold bits. In a rule, `a`, `b`, `c`, `d` are operands as values of the instruction's type, and `A` to `D`
# are their bits; the expression's value has the named type, and is cut to the register's width.
INTEGERS = "s16 s32 s64 u16 u32 u64"
BITS = "b16 b32 b64"
FLOATS = "f32 f64"
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
C_TYPES = {
    f"{kind}{width}": f"{'u' if kind in 'ub' else ''}int{width}_t" for kind in "sub" for width in (8, 16, 32, 64)
}
C_TYPES |= {"f32": "float", "f64": "double", "pred": "_Bool"}
WIDTHS = {name: int(name[1:]) for name in C_TYPES if name != "pred"} | {"pred": 1}
SPECIAL = {
    "%tid.x": "thread_index[0]", "%ntid.x": "block[0]", "%ctaid.x": "block_index[0]", "%nctaid.x": "grid[0]"
}  # fmt: skip


def rules() -> dict[str, tuple[str, str, str]]:
    """Operand type, expression and result type of each opcode."""
    known: dict[str, tuple[str, str, str]] = {}

    def rule(opcodes: str, types: str, expression: str, result: str = "{t}") -> None:
        for opcode in opcodes.split():
            for t in types.split():
                known[f"{opcode}.{t}"] = (t, expression.replace("{w}", str(WIDTHS[t])), result.replace("{t}", t))

    rule("add", INTEGERS, "a + b")
    rule("sub", INTEGERS, "a - b")
    rule("neg", "s16 s32 s64", "-a")
    rule("mul.lo", INTEGERS, "(uint64_t)a * (uint64_t)b")
    rule("mul.wide", "u32", "(uint64_t)a * b", "u64")
    rule("mul.wide", "s32", "(int64_t)a * b", "s64")
    rule("div", "u32 u64", "a / b")
    rule("div", "s32 s64", "b == -1 ? -a : a / b")
    rule("min", INTEGERS, "a < b ? a : b")
    rule("max", INTEGERS, "a > b ? a : b")
    rule("and", f"{BITS} pred", "a & b")
    rule("or", f"{BITS} pred", "a | b")
    rule("xor", f"{BITS} pred", "a ^ b")
    rule("not", BITS, "~a")
    rule("not", "pred", "!a")
    rule("shl", BITS, "(uint32_t)B < {w} ? a << (uint32_t)B : 0")
    rule("shr", "b16 b32 b64 u16 u32 u64", "(uint32_t)B < {w} ? a >> (uint32_t)B : 0")
    rule("shr", "s16 s32 s64", "a >> ((uint32_t)B < {w} ? (uint32_t)B : {w} - 1)")
    rule("bfe", "u32 u64", "field_of(a, B, C, {w})")
    rule("bfi", "b32 b64", "with_field(B, A, C, D, {w})")
    rule("prmt", "b32", "permuted(A, B, C)")
    rule("mov", f"{INTEGERS} {BITS} {FLOATS} pred", "a")
    rule("selp", f"{INTEGERS} {BITS} {FLOATS}", "C ? a : b")
    rule("add.rn", FLOATS, "a + b")
    rule("sub.rn", FLOATS, "a - b")
    rule("mul.rn", FLOATS, "a * b")
    rule("div.rn", FLOATS, "a / b")
    rule("min", FLOATS, "a < b || b != b ? a : b")  # of a NaN and a number, the number
    rule("max", FLOATS, "a > b || b != b ? a : b")
    for name, sign in COMPARISONS.items():
        rule(f"setp.{name}", INTEGERS, f"a {sign} b", "pred")
        rule(f"setp.{name}", FLOATS, f"a == a && b == b && a {sign} b", "pred")
        rule(f"setp.{name}u", FLOATS, f"a != a || b != b || a {sign} b", "pred")
    rule("setp.eq", BITS, "a == b", "pred")
    rule("setp.ne", BITS, "a != b", "pred")
    rule("setp.nan", FLOATS, "a != a || b != b", "pred")
    rule("setp.num", FLOATS, "a == a && b == b", "pred")
    whole = [f"{kind}{width}" for kind in "su" for width in (8, 16, 32, 64)]
    for to in whole:
        rule(f"cvt.{to}", " ".join(whole), "a", to)
    for to in FLOATS.split():
        rule(f"cvt.rn.{to}", " ".join(whole), "a", to)
    rule("cvt.rn.f32", "f64", "a", "f32")
    rule("cvt.f64", "f32", "a", "f64")
    rule("cvt.rzi.s64", FLOATS, "to_s64(a)", "s64")
    known["cvt.rn.f16.f32"] = ("f32", "store_f16(a)", "b16")
    known["cvt.f32.f16"] = ("b16", "load_f16(a)", "f32")
    return known


RULES = rules()
PRELUDE = r"""/* Made from PTX by tests/standins/ptx.py. */
#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#undef __x86_64__ /* for the header's portable part alone: that of vectors takes the compiler long */
#include "kernels/kernels_numbers.h"

typedef const unsigned three[3];
typedef void ptx_function(void **arguments, three grid, three block, three block_index, three thread_index);
uint64_t ptx_at(uint64_t address, unsigned bytes, int write, const char *kernel);

static inline float as_f32(uint64_t bits) { uint32_t low = bits; float x; memcpy(&x, &low, 4); return x; }
static inline double as_f64(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static inline uint64_t of_f32(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline uint64_t of_f64(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }

static inline uint64_t ones(unsigned bits) { return bits >= 64 ? ~0ull : (1ull << bits) - 1; }
static inline uint64_t field_of(uint64_t a, uint64_t at, uint64_t bits, unsigned width) {
  at &= 255, bits &= 255;
  return at >= width ? 0 : a >> at & ones(bits);
}
static inline uint64_t with_field(uint64_t b, uint64_t a, uint64_t at, uint64_t bits, unsigned width) {
  at &= 255, bits &= 255;
  if (at >= width) return b;
  uint64_t mask = ones(bits) << at;
  return (b & ~mask) | (a << at & mask);
}
static inline uint64_t permuted(uint64_t a, uint64_t b, uint64_t selectors) {
  uint64_t both = (uint32_t)a | b << 32, result = 0;
  for (int k = 0; k < 4; k++) {
    unsigned selector = selectors >> 4 * k & 15, byte = both >> 8 * (selector & 7) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= (uint64_t)byte << 8 * k;
  }
  return result;
}
static inline int64_t to_s64(double x) {
  return x != x ? INT64_MIN : x >= 0x1p63 ? INT64_MAX : x < -0x1p63 ? INT64_MIN : (int64_t)x;
}
"""
EXECUTOR = r"""
typedef struct ptx_range { uint64_t begin, end, writable; } ptx_range;
long ptx_distance;
char ptx_error[256];
static const ptx_range *ranges;
static uint64_t range_count;
static _Thread_local uint64_t last_range;
static char nowhere[16] __attribute__((aligned(16))); /* what an access gets that is not allowed */

void ptx_ranges(const ptx_range *sorted, uint64_t count) { ranges = sorted, range_count = count, last_range = 0; }

static int inside(const ptx_range *range, uint64_t address, unsigned bytes, int write) {
  return address >= range->begin && address + bytes <= range->end && range->writable >= (uint64_t)write;
}

uint64_t ptx_at(uint64_t address, unsigned bytes, int write, const char *kernel) {
  const char *wrong = 0;
  if (address % bytes) wrong = "is not aligned";
  else if (range_count && !(last_range < range_count && inside(&ranges[last_range], address, bytes, write))) {
    uint64_t low = 0, high = range_count;
    while (high - low > 1) {
      uint64_t middle = (low + high) / 2;
      if (ranges[middle].begin <= address) low = middle;
      else high = middle;
    }
    last_range = low;
    if (!inside(&ranges[low], address, bytes, write)) wrong = "is outside of all it may access";
  }
  if (!wrong) return address + ptx_distance;
  if (!*ptx_error)
    snprintf(ptx_error, sizeof ptx_error, "%s: address %#llx, where it would %s %u bytes, %s", kernel,
             (unsigned long long)address, write ? "write" : "read", bytes, wrong);
  return (uint64_t)nowhere;
}

int ptx_block(ptx_function *kernel, void **arguments, three grid, three block, three index) {
  unsigned t[3];
  *ptx_error = 0;
  for (t[2] = 0; t[2] < block[2]; t[2]++)
    for (t[1] = 0; t[1] < block[1]; t[1]++)
      for (t[0] = 0; t[0] < block[0] && !*ptx_error; t[0]++) kernel(arguments, grid, block, index, t);
  return *ptx_error ? -1 : 0;
}

int ptx_launch(ptx_function *kernel, void **arguments, three grid, three block) {
  unsigned b[3];
  for (b[2] = 0; b[2] < grid[2]; b[2]++)
    for (b[1] = 0; b[1] < grid[1]; b[1]++)
      for (b[0] = 0; b[0] < grid[0]; b[0]++)
        if (ptx_block(kernel, arguments, grid, block, b)) return -1;
  return 0;
}
"""

ENTRY = re.compile(r"\.visible \.entry (\w+)\(\s*(.*?)\s*\)\s*\{\n(.*?)\n\}", re.DOTALL)
HEAD = re.compile(r"(?:\.(?:version|target|address_size) \S+\s*)+")
GUARD = re.compile(r"@(!?)(%\w+)\s+(.*)")
ADDRESS = re.compile(r"\[(%\w+|\w+)(?:\+(-?\d+))?\]")


def without_comments(ptx: str) -> str:
    return re.sub(r"//[^\n]*", "", ptx)


class Function:
    """One kernel, line by line."""

    def __init__(self, name: str, parameters: str, body: str) -> None:
        self.name = name
        self.parameters: dict[str, tuple[int, str]] = {}
        for number, declared in enumerate(filter(None, re.split(r",\s*", parameters))):
            match = re.fullmatch(r"\.param \.(\w+) (\w+)", declared)
            if not match or match[1] not in C_TYPES:
                raise UnknownError(f"{name}: parameter {declared!r}")
            self.parameters[match[2]] = (number, match[1])
        self.widths: dict[
            str, str
        ] = {}  # type of each register, by its name; numbered registers share the name before their numbers
        self.lines = [self.statement(line.strip()) for line in body.split("\n") if line.strip()]

    def unknown(self, what: str) -> UnknownError:
        return UnknownError(f"{self.name}: {what!r} is not known to the translator")

    def statement(self, line: str) -> str:
        if line in "{}":
            return line
        if label := re.fullmatch(r"(\$?\w+):", line):
            return f"{label[1].replace('$', '')}:;"
        if not line.endswith(";"):
            raise self.unknown(line)
        line = line[:-1]
        if declared := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+?)(?:<(\d+)>)?", line):
            return self.registers(*declared.groups())
        if guard := GUARD.fullmatch(line):
            return f"if ({guard[1]}{self.register(guard[2])}) {{ {self.instruction(guard[3])} }}"
        return self.instruction(line)

    def registers(self, kind: str, name: str, count: str | None) -> str:
        if kind not in C_TYPES:
            raise self.unknown(f".reg .{kind}")
        self.widths[name] = kind
        width = max(WIDTHS[kind], 8)
        names = [name] if count is None else [f"{name}{k}" for k in range(int(count))]
        return f"uint{width}_t {', '.join(self.c_name(each) for each in names)};"

    @staticmethod
    def c_name(register: str) -> str:
        return register.replace("%", "v_")

    def register(self, name: str) -> str:
        if name not in self.widths and re.sub(r"\d+$", "", name) not in self.widths:
            raise self.unknown(name)
        return self.c_name(name)

    def value(self, operand: str) -> str:
        """The bits of an operand."""
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand.startswith("%"):
            return self.register(operand)
        if constant := re.fullmatch(r"0[fd]([0-9A-F]{8}|[0-9A-F]{16})", operand):
            return f"0x{constant[1]}ull"
        if re.fullmatch(r"-?\d+", operand):
            return f"(uint64_t){int(operand) % 2**64}ull"
        raise self.unknown(operand)

    @staticmethod
    def typed(kind: str, bits: str) -> str:
        return f"as_{kind}({bits})" if kind in ("f32", "f64") else f"({C_TYPES[kind]})({bits})"

    def instruction(self, line: str) -> str:
        opcode, _, rest = line.partition(" ") if " " in line else line.partition("\t")
        opcode, _, more = opcode.partition("\t")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", f"{more} {rest}")
        if opcode in ("bra", "bra.uni") and len(operands) == 1:
            return f"goto {operands[0].replace('$', '')};"
        if opcode == "ret" and not operands:
            return "return;"
        if line == '.pragma "nounroll"':  # a hint to the driver's compiler
            return ";"
        if opcode.startswith(("ld.", "st.")):
            return self.access(opcode, operands)
        if opcode in ("mov.b32", "mov.b64") and "{" in line:
            return self.parts(opcode, operands)
        if opcode not in RULES:
            raise self.unknown(line)
        kind, expression, result = RULES[opcode]
        names = dict(zip("ABCD", (self.value(operand) for operand in operands[1:]), strict=False))
        named = {**names, **{name.lower(): self.typed(kind, bits) for name, bits in names.items()}}
        if set(re.findall(r"\b[ABCDabcd]\b", expression)) - set(named) or (
            len(names) > 1 and "b" not in expression.lower()
        ):
            raise self.unknown(line)
        value = re.sub(r"\b([ABCDabcd])\b", lambda match: f"({named[match[1]]})", expression)
        value = f"of_{result}({value})" if result in ("f32", "f64") else f"({C_TYPES[result]})({value})"
        return f"{self.register(operands[0])} = {value};"

    def parts(self, opcode: str, operands: list[str]) -> str:
        """Two halves of a register, lower first."""
        half = int(opcode[5:]) // 2
        to, of = operands
        if to.startswith("{"):
            low, high = (self.register(name) for name in re.findall(r"%\w+", to))
            return f"{{ uint64_t whole = {self.value(of)}; {low} = whole & ones({half}); {high} = whole >> {half}; }}"
        low, high = (self.value(name) for name in re.findall(r"%\w+", of))
        return f"{self.register(to)} = ({low} & ones({half})) | (uint64_t)({high}) << {half};"

    def access(self, opcode: str, operands: list[str]) -> str:
        match = re.fullmatch(r"(ld|st)\.(param|global)\.(?:v(\d)\.)?(\w+)", opcode)
        if not match or match[4] not in C_TYPES:
            raise self.unknown(opcode)
        what, space, vector, kind = match.groups()
        values, at = operands if what == "ld" else operands[::-1]
        address = ADDRESS.fullmatch(at)
        c_type, count = C_TYPES[kind if kind[0] != "f" else f"u{kind[1:]}"], int(vector or 1)
        if not address:
            raise self.unknown(at)
        if space == "param":
            if what == "st" or vector or address[2] or self.parameters.get(address[1], (0, ""))[1] != kind:
                raise self.unknown(f"{opcode} {at}")
            return f"{self.register(values)} = *({c_type} *)arguments[{self.parameters[address[1]][0]}];"
        names = re.findall(r"%\w+", values)
        if len(names) != count:
            raise self.unknown(f"{opcode} {values}")
        size = count * WIDTHS[kind] // 8
        where = (
            f'ptx_at({self.register(address[1])} + {int(address[2] or 0)}, {size}, {int(what == "st")}, "{self.name}")'
        )
        moves = [
            f"{self.register(name)} = memory[{k}];" if what == "ld" else f"memory[{k}] = {self.register(name)};"
            for k, name in enumerate(names)
        ]
        volatile = f"typedef {c_type} __attribute__((may_alias)) element; element *memory = (element *){where};"
        return f"{{ {volatile} {' '.join(moves)} }}"

    def source(self) -> str:
        arguments = "void **arguments, three grid, three block, three block_index, three thread_index"
        body = "\n  ".join(self.lines)
        return f"void {self.name}({arguments}) {{\n  {body}\n}}\n"


def functions(ptx: str, only: Sequence[str] | None = None) -> list[Function]:
    """Kernels of a PTX text, optionally only those with these names."""
    text = without_comments(ptx)
    rest = HEAD.sub("", ENTRY.sub("", text)).strip()
    if rest:
        raise UnknownError(f"between the kernels stands {rest[:60]!r}")
    found = [match.groups() for match in ENTRY.finditer(text)]
    return [Function(*parts) for parts in found if only is None or parts[0] in only]


def table(kernels: Sequence[Function]) -> str:
    """C table through which all kernels are found and run."""
    rows = "".join(f'  {{"{kernel.name}", {kernel.name}, {len(kernel.parameters)}}},\n' for kernel in kernels)
    declared = "".join(f"extern ptx_function {kernel.name};\n" for kernel in kernels)
    row = "{ const char *name; ptx_function *function; unsigned arguments; }"
    return f"{declared}const struct ptx_kernel {row} ptx_kernels[] = {{\n{rows}  {{0, 0, 0}}\n}};\n{EXECUTOR}"


def translate(ptx: str, only: Sequence[str] | None = None) -> str:
    """Translate the kernels into one C source."""
    kernels = functions(ptx, only)
    return PRELUDE + "".join(kernel.source() for kernel in kernels) + table(kernels)


def build(ptx: str, directory: Path, only: Sequence[str] | None = None) -> Path:
    """Build a shared library of the kernels, compiled on all processors."""
    kernels = functions(ptx, only)
    jobs = min(4, len(kernels))
    heaviest = sorted(kernels, key=lambda kernel: -len(kernel.lines))
    sources = [PRELUDE + "".join(kernel.source() for kernel in heaviest[job::jobs]) for job in range(jobs)]
    compiler = shlex.split(os.environ.get("CC", "cc"))

    def compiled(number: int, source: str) -> Path:
        path = directory / f"kernels{number}.c"
        path.write_text(source)
        subprocess.run([*compiler, *FLAGS, "-c", path, "-o", path.with_suffix(".o")], check=True)
        return path.with_suffix(".o")

    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, range(jobs + 1), [*sources, PRELUDE + table(kernels)]))
    library = directory / "kernels.so"
    subprocess.run([*compiler, "-shared", *objects, "-o", library], check=True)
    return library


class Device:
    """Kernels of a library, to be launched from Python."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.error = (ctypes.c_char * 256).in_dll(self.library, "ptx_error")

    def allow(self, ranges: Sequence[tuple[int, int, bool]]) -> None:
        """Restrict kernels to these address ranges: begin, end, whether writable."""
        flat = [number for each in sorted(ranges) for number in each]
        self.ranges = (ctypes.c_uint64 * len(flat))(*flat)
        self.library.ptx_ranges(self.ranges, ctypes.c_uint64(len(ranges)))

    def launch(self, name: str, grid: int, block: int, *arguments: Any, only: int | None = None) -> None:
        """Run a kernel, or only its block `only`. Arguments are ctypes numbers.

        Raises RuntimeError for an access that a device would refuse, or outside of the allowed ranges.
        """
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        sizes = ((ctypes.c_uint * 3)(grid, 1, 1), (ctypes.c_uint * 3)(block, 1, 1))
        run, index = self.library.ptx_launch, ()
        if only is not None:
            run, index = self.library.ptx_block, ((ctypes.c_uint * 3)(only, 0, 0),)
        if run(getattr(self.library, name), pointers, *sizes, *index):
            raise RuntimeError(self.error.value.decode())


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(translate(Path(sys.argv[1]).read_text()))
