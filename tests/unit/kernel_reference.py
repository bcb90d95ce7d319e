"""NumPy reference of the kernels, and numbers for its comparison with them. All NaNs count as equal."""

from __future__ import annotations

import numpy as np
import pytest

from .kernel_library import EVERY_SOURCE, Spec, stored


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def widened(dtype: str, x: np.ndarray) -> np.ndarray:
    if dtype == "bfloat16":
        return bf16_to_f32(x)
    return x.astype(np.float32) if dtype == "float16" else (x != 0).astype(np.uint8) if dtype == "bool" else x.copy()


def rounded(dtype: str, x: np.ndarray) -> np.ndarray:
    return f32_to_bf16(x) if dtype == "bfloat16" else x.astype(stored(dtype))


def truncated(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Values truncated toward zero, saturating, by Python's unbounded integers."""
    limits = np.iinfo(dtype)
    return np.array(
        [min(max(int(v) if np.isfinite(v) else limits.max * int(np.sign(v)) * 2, limits.min), limits.max) for v in x],
        dtype,
    )


def scaled(dtype: str, x: np.ndarray, factor: float) -> np.ndarray:
    if dtype.startswith(("int", "uint")):
        return truncated(x.astype(np.float64) * factor, x.dtype)
    wide = widened(dtype, x)
    with np.errstate(all="ignore"):
        return rounded(dtype, wide * wide.dtype.type(factor))


def combined(dtype: str, op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if dtype == "bool":
        return a & b if op in ("min", "product") else a | b
    if op in ("sum", "average"):
        return a + b
    if op == "product":
        return a * b
    return np.where((a < b if op == "min" else a > b) | (a != a), a, b)


def expected(spec: Spec, sources: list[np.ndarray]) -> np.ndarray:
    dtype = spec.dtype
    integer = dtype.startswith(("int", "uint"))
    with np.errstate(all="ignore"):
        inputs = [
            scaled(dtype, s, spec.prescale) if spec.prescale != 1 and spec.unscaled in (k, EVERY_SOURCE) else s
            for k, s in enumerate(sources)
        ]
        wide = [
            widened(dtype, s).astype(np.int64) if integer and spec.op == "average" else widened(dtype, s)
            for s in inputs
        ]
        acc = wide[0]
        for s in wide[1:]:
            acc = combined(dtype, spec.op, acc, s)
        if not integer:
            if spec.divisor != 1:
                acc = acc / acc.dtype.type(spec.divisor)
            if spec.postscale != 1:
                acc = acc * acc.dtype.type(spec.postscale)
            return rounded(dtype, acc)
        if spec.divisor != 1:
            divisor = acc.dtype.type(spec.divisor)
            down = acc // divisor
            acc = down + ((down < 0) & (down * divisor != acc))
        if spec.op == "average":
            acc = np.clip(acc, np.iinfo(stored(dtype)).min, np.iinfo(stored(dtype)).max)
        if spec.postscale != 1:
            acc = truncated(acc.astype(np.float64) * spec.postscale, stored(dtype))
        return acc.astype(stored(dtype))


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def is_nan(dtype: str, x: np.ndarray) -> np.ndarray:
    if dtype == "bfloat16":
        x = bf16_to_f32(x)
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(len(x), bool)


def assert_equal_bits(dtype: str, got: np.ndarray, want: np.ndarray) -> None:
    same = (bits(got) == bits(want)) | (is_nan(dtype, got) & is_nan(dtype, want))
    if not same.all():
        i = int(np.argmin(same))
        pytest.fail(
            f"{(~same).sum()} of {len(same)} differ, first at {i}: got {bits(got)[i]:#x}, expected {bits(want)[i]:#x}"
        )


def numbers(dtype: str, n: int, seed: int) -> np.ndarray:
    """Numbers of every kind: small ones of both signs, random bit patterns, and special values."""
    rng = np.random.default_rng(seed)
    kind = stored(dtype)
    anything = rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
    if dtype == "bool":
        return np.where(rng.random(n) < 0.5, np.uint8(0), anything)
    if dtype.startswith(("int", "uint")):
        limits = np.iinfo(kind)
        edges = rng.choice(np.array([limits.min, limits.max, 0, 1, limits.max - 1], kind), n)
        return np.where(rng.random(n) < 0.8, anything, edges)
    small = rng.standard_normal(n).astype(np.float32) * np.exp2(rng.integers(-20, 14, n)).astype(np.float32)
    top = {"float16": 65504.0, "bfloat16": 3.3895314e38, "float32": 3.4028235e38, "float64": 1.7976931348623157e308}[
        dtype
    ]
    least = {"float16": 6e-8, "bfloat16": 9.2e-41, "float32": 1e-45, "float64": 5e-324}[dtype]
    special = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, top, -top, least, -least, 1.0, -1.0], n)
    with np.errstate(all="ignore"):
        plain, edges = (
            rounded(dtype, small),
            rounded(dtype, special.astype(np.float64 if dtype == "float64" else np.float32)),
        )
    return np.choose(rng.integers(0, 3, n), [plain, anything, edges]).astype(kind)


def ranks(dtype: str, count: int, n: int, seed: int = 0) -> list[np.ndarray]:
    return [numbers(dtype, n, 1000 * seed + k) for k in range(count)]
