"""Estimators of Spark ML that train a model of Keras: `KerasEstimator`, and the `KerasModel` that it gives."""

from .estimator import KerasEstimator
from .model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
