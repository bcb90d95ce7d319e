"""Collectives on torch tensors, with Horovod's names, argument order and defaults.

Gradients flow through the blocking ones that return a new tensor: Horovod's, or the mathematical ones. See
`engine.torch.autograd`, and docs/explanation/collective-gradients.md for a table of both.
"""

from __future__ import annotations

import torch

from ..frameworks.surface import Tensors, make_functions
from . import adapter as _adapter  # noqa: F401  (registers torch.Tensor)
from .autograd import CALLS

globals().update(make_functions(__name__, Tensors(torch.Tensor, "torch.Tensor", CALLS)))
