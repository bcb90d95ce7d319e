"""The tests, as one package: a module imports what it shares with others by relative names, on ranks too."""

import contextlib

# PyTorch's build for GPUs loads Triton with the first optimizer; behind TensorFlow its library crashes the process.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401
