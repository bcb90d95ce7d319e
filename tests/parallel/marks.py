"""Conditions under which a test cannot run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

needs_torch = pytest.mark.skipif(
    SANITIZED or find_spec("torch") is None, reason="needs torch, and no sanitizer: torch is slow to start under one"
)
needs_memory_back = pytest.mark.skipif(SANITIZED, reason="the sanitizer keeps freed memory for a while")
