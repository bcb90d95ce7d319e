"""Estimators of Spark ML for models of PyTorch: `TorchEstimator`, and the `TorchModel` that it returns."""

from .estimator import TorchEstimator
from .model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
