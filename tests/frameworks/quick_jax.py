"""How JAX is run in tests: what it compiles is used a few times, so compiling has to be quick."""

from __future__ import annotations

JAX = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
