"""Scaling results published by Horovod's authors, with their sources.

- 128 servers: "Horovod: fast and easy distributed deep learning in TensorFlow", arXiv 1802.05799, and Horovod's README;
  32 servers: the README of October 2017 (from the change github.com/horovod/horovod/pull/44);
- 4 servers, and images per second on one GPU with batches of 64: the table that this change replaced, row "RDMA Horovod
  (allreduce on GPU with NCCL)". As speedups: 15.0, 14.6 and 13.7 of 16.

All servers have 4 Pascal GPUs each and a network of 25 Gbit/s with RoCE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.scaling.architectures import Layer, build_inception3, build_resnet101, build_vgg16

GPUS = 4
"""Number of GPUs of a server."""

BANDWIDTH = 25e9
"""Bits per second of a server's link."""

BATCH = 64
"""Images in a batch in the measurement of one GPU, and as recommended by Horovod's page on benchmarks. Horovod's
maintainers have also mentioned 32 (github.com/horovod/horovod/issues/425)."""


@dataclass(frozen=True)
class Model:
    """Model with its images per second on one GPU, and its scaling efficiency by number of servers."""

    name: str
    layers: Callable[[], tuple[Layer, ...]]
    images: float
    efficiency: dict[int, float]


MODELS = (
    Model("Inception V3", build_inception3, 134.4, {4: 15.0 / 16, 32: 0.90, 128: 0.90}),
    Model("ResNet-101", build_resnet101, 119.4, {4: 14.6 / 16, 32: 0.90, 128: 0.90}),
    Model("VGG-16", build_vgg16, 130.9, {4: 13.7 / 16, 32: 0.79, 128: 0.68}),
)
