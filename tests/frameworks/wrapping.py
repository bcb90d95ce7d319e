"""The two ways in which a test wraps an optimizer; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wrap:
    """Make an optimizer distributed, with gradients where torch puts them, or in shared memory."""

    views: bool

    def __call__(self, optimizer: Any, named: Any = None, **options: Any) -> Any:
        import engine

        # The check adds an operation to the first step, which tests would count; it has tests of its own.
        options.setdefault("check_parameters", False)
        return engine.DistributedOptimizer(optimizer, named, gradient_as_bucket_view=self.views, **options)
