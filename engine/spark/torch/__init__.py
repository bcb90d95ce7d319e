"""Estimators of Spark ML that train a model of PyTorch: `TorchEstimator`, and the `TorchModel` that it gives."""

from .estimator import TorchEstimator
from .model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
