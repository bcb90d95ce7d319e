"""The tests, as one package: modules import shared code by relative names, also on ranks."""

import contextlib

# PyTorch's build for GPUs loads Triton with the first optimizer; behind TensorFlow its library crashes the process.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401
