"""Settings of JAX for tests, whose programs run only a few times, so that compiling has to be quick."""

from __future__ import annotations

JAX = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
