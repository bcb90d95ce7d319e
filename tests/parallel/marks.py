"""Conditions under which a test cannot run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")

needs_bfloat16 = pytest.mark.skipif(find_spec("ml_dtypes") is None, reason="needs ml_dtypes, for bfloat16")
needs_memory_back = pytest.mark.skipif(SANITIZED, reason="the sanitizer keeps freed memory for a while")
