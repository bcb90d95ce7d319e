"""PowerSGD, which sends a gradient matrix as the product of two thin ones.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, algorithms 1 and 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from ..collectives.compression import Scheme
from ..config.forms import whole_number

DEPENDENT = 8
"""Norm after projection, in last places of the former norm, up to which a column counts as linearly dependent."""


@dataclass
class _State:
    """State of one parameter."""

    right: torch.Tensor  # [columns, rank]: the last right factor; equal on all ranks
    error: torch.Tensor | None  # [rows, columns]: error feedback, not sent yet, of this rank; None: zeros
    random: torch.Generator  # equal on all ranks


class PowerSGD(Scheme):
    """Compression scheme with one step of subspace iteration per reduction and error feedback.

    For a gradient of n rows and m columns (dimensions after the first are merged) it sends `rank * (n + m)` numbers.
    The error of a rank's approximation is added to its next gradient. This takes as much memory as the gradients.

    Parameters
    ----------
    rank : int
        Rank of the approximation. From min(n, m) on it is exact up to rounding, and nothing is saved.
    start_iter : int
        Number of first reductions of each gradient that are plain averages, while gradients change fast.
    min_compression_rate : float
        Compression rate that a gradient must exceed: `n * m > min_compression_rate * rank * (n + m)`.
    seed : int
        Seed of the first right factors. Equal on all ranks.
    """

    def __init__(self, rank: int = 2, start_iter: int = 10, min_compression_rate: float = 2.0, seed: int = 0) -> None:
        if not min_compression_rate >= 0:
            raise ValueError(f"min_compression_rate is {min_compression_rate}; expected 0 or more")
        self._rank = whole_number("rank", rank, 1)
        self._start = whole_number("start_iter", start_iter, 0)
        self._least = min_compression_rate
        self._seed = seed
        self._calls: dict[str, int] = {}
        self._states: dict[str, _State] = {}

    def accepts(self, name: str, parameter: torch.Tensor) -> bool:
        if parameter.dim() < 2 or not parameter.numel():
            return False
        rows, columns = parameter.shape[0], parameter[0].numel()
        return rows * columns > self._least * self._rank * (rows + columns)

    def reduce(self, name: str, gradient: torch.Tensor) -> Generator[torch.Tensor, torch.Tensor, torch.Tensor]:
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if calls <= self._start:
            return (yield gradient)
        dtype = torch.float64 if gradient.dtype is torch.float64 else torch.float32
        matrix = gradient.reshape(len(gradient), -1).to(dtype)
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = self._make_state(name, matrix)
        # State may come from a checkpoint or another rank, and the model may have been moved since.
        right = _refill_zero_columns(state.right.to(matrix.device), state.random)
        matrix = matrix if state.error is None else matrix + state.error.to(matrix.device)
        left = _orthonormalize_columns((yield matrix @ right))
        right = yield matrix.T @ left
        approximation = _multiply_transposed(left, right)
        if bool(torch.isfinite(right).all()):
            # Otherwise gradients overflowed on some rank: all ranks see it, and keep the former state.
            state.right, state.error = right, matrix - approximation
        return approximation.reshape(gradient.shape)

    def _make_state(self, name: str, matrix: torch.Tensor) -> _State:
        rank = min(self._rank, *matrix.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
        return _State(matrix.new_zeros(matrix.shape[1], rank), None, generator)

    def rounds(self) -> dict[str, int]:
        """Return the number of reductions of each gradient."""
        return self._calls

    def state_dict(self) -> dict[str, Any]:
        """Return numbers of reductions and the last right factors; the error feedback is not part of it."""
        factors = {name: (each.right.cpu(), each.random.get_state()) for name, each in self._states.items()}
        return {"calls": dict(self._calls), "factors": factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load numbers of reductions and right factors; keep the error feedback of gradients whose numbers are equal.

        The error feedback of others is dropped, since it belongs to steps that the loaded state does not include.
        """
        calls, self._calls = self._calls, dict(state["calls"])
        before = {name: each for name, each in self._states.items() if calls.get(name) == self._calls.get(name)}
        self._states = {}
        for name, (right, random) in state["factors"].items():
            generator = torch.Generator()
            generator.set_state(random)
            error = before[name].error if name in before else None
            self._states[name] = _State(right.clone(), error, generator)


# The functions below are bitwise reproducible for any number of threads: elementwise, or in one thread. Matrix products
# do not guarantee that.


def _refill_zero_columns(right: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Replace zero columns of `right` by random ones, since they would stay zero otherwise."""
    zero = ~right.bool().any(dim=0)
    if not bool(zero.any()):
        return right
    right = right.clone()
    # Drawn on the processor: every device gets the same numbers.
    drawn = torch.randn(len(right), int(zero.sum()), generator=random, dtype=right.dtype, device="cpu")
    right[:, zero] = drawn.to(right.device)
    return right


def _orthonormalize_columns(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the columns, by Gram-Schmidt, twice; zeros for dependent ones. NaN stays NaN."""
    # Rows are the columns. Sums of NumPy run in one thread, in a fixed order.
    wide = columns.cpu().double().numpy().T.copy()
    for k in range(len(wide)):
        before = (wide[k] * wide[k]).sum() ** 0.5
        for _ in range(2):
            for j in range(k):
                wide[k] -= (wide[j] * wide[k]).sum() * wide[j]
        after = (wide[k] * wide[k]).sum() ** 0.5
        if after <= DEPENDENT * torch.finfo(columns.dtype).eps * before:
            wide[k] = 0.0
        else:
            wide[k] /= after
    return torch.from_numpy(wide.T.copy()).to(columns.dtype).to(columns.device)


def _multiply_transposed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right.T`, computed term by term."""
    total = left[:, :1] * right[:, 0]
    for k in range(1, left.shape[1]):
        total += left[:, k : k + 1] * right[:, k]
    return total
