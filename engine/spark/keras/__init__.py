"""Estimators of Spark ML for models of Keras: `KerasEstimator`, and the `KerasModel` that it returns."""

from .estimator import KerasEstimator
from .model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
