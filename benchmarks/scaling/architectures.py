"""Layers of three image classifiers: parameters and multiplications, computed from the papers' descriptions.

VGG-16 (configuration D of arXiv 1409.1556), ResNet-101 (arXiv 1512.03385) and Inception V3 (arXiv 1512.00567, as built
by TF-Slim and Keras, without the auxiliary classifier), with 1000 classes. A convolution followed by batch
normalisation has no bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Layer:
    """Layer with weights: the parameters of each of its tensors, and the multiplications for one image."""

    tensors: tuple[int, ...]
    multiplications: int


@dataclass
class Network:
    """Network under construction; `side` and `channels` are those of the input of the next layer.

    `normalised` is the number of batch normalisation vectors of each convolution; 0: it has a bias instead.
    """

    side: int
    normalised: int
    channels: int = 3
    layers: list[Layer] = field(default_factory=list)

    def conv(self, out: int, size: int | tuple[int, int], stride: int = 1, valid: bool = False) -> Network:
        """Add a convolution; `valid`: without padding."""
        high, wide = (size, size) if isinstance(size, int) else size
        self.side = _shrink(self.side, max(high, wide) if valid else 1, stride)
        weights = high * wide * self.channels * out
        vectors = (out,) * (self.normalised or 1)
        self.layers.append(Layer((weights, *vectors), weights * self.side**2))
        self.channels = out
        return self

    def pool(self, size: int, stride: int, valid: bool = True) -> Network:
        """Add a pooling layer."""
        self.side = _shrink(self.side, size if valid else 1, stride)
        return self

    def dense(self, inputs: int, out: int) -> Network:
        """Add a dense layer with a bias."""
        self.layers.append(Layer((inputs * out, out), inputs * out))
        return self

    def branches(self, *branches: Callable[[Network], object], keep: int = 0) -> Network:
        """Add parallel branches, whose channels are concatenated; `keep` channels of the input are passed through."""
        channels, side, out = self.channels, self.side, keep
        for branch in branches:
            self.channels, self.side = channels, side
            branch(self)
            out += self.channels
        self.channels = out
        return self


def _shrink(side: int, size: int, stride: int) -> int:
    return (side - size) // stride + 1


def vgg16() -> tuple[Layer, ...]:
    """Return the layers of VGG-16: 138,357,544 parameters."""
    net = Network(224, normalised=0)
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(out, 3)
        net.pool(2, 2)
    net.dense(7 * 7 * 512, 4096).dense(4096, 4096).dense(4096, 1000)
    return tuple(net.layers)


def resnet101() -> tuple[Layer, ...]:
    """Return the layers of ResNet-101: 44,549,160 parameters."""
    net = Network(224, normalised=2).conv(64, 7, 2).pool(3, 2, valid=False)
    for width, count in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(count):
            stride = 2 if block == 0 and width > 64 else 1
            entered = net.channels, net.side
            if block == 0:
                net.conv(4 * width, 1, stride)
                net.channels, net.side = entered
            net.conv(width, 1, stride).conv(width, 3).conv(4 * width, 1)
    net.dense(2048, 1000)
    return tuple(net.layers)


def inception3() -> tuple[Layer, ...]:
    """Return the layers of Inception V3: 23,817,352 parameters; batch normalisation has an offset and no scale."""
    net = Network(299, normalised=1)
    net.conv(32, 3, 2, valid=True).conv(32, 3, valid=True).conv(64, 3).pool(3, 2)
    net.conv(80, 1).conv(192, 3, valid=True).pool(3, 2)
    for pooled in (32, 64, 64):
        net.branches(
            lambda n: n.conv(64, 1),
            lambda n: n.conv(48, 1).conv(64, 5),
            lambda n: n.conv(64, 1).conv(96, 3).conv(96, 3),
            lambda n, out=pooled: n.conv(out, 1),  # type: ignore[misc]
        )
    net.branches(
        lambda n: n.conv(384, 3, 2, valid=True),
        lambda n: n.conv(64, 1).conv(96, 3).conv(96, 3, 2, valid=True),
        keep=net.channels,
    )
    for width in (128, 160, 160, 192):
        net.branches(
            lambda n: n.conv(192, 1),
            lambda n, w=width: n.conv(w, 1).conv(w, (1, 7)).conv(192, (7, 1)),  # type: ignore[misc]
            lambda n, w=width: (  # type: ignore[misc]
                n.conv(w, 1).conv(w, (7, 1)).conv(w, (1, 7)).conv(w, (7, 1)).conv(192, (1, 7))
            ),
            lambda n: n.conv(192, 1),
        )
    net.branches(
        lambda n: n.conv(192, 1).conv(320, 3, 2, valid=True),
        lambda n: n.conv(192, 1).conv(192, (1, 7)).conv(192, (7, 1)).conv(192, 3, 2, valid=True),
        keep=net.channels,
    )
    for _ in range(2):
        net.branches(
            lambda n: n.conv(320, 1),
            lambda n: n.conv(384, 1).branches(lambda m: m.conv(384, (1, 3)), lambda m: m.conv(384, (3, 1))),
            lambda n: (
                n.conv(448, 1).conv(384, 3).branches(lambda m: m.conv(384, (1, 3)), lambda m: m.conv(384, (3, 1)))
            ),
            lambda n: n.conv(192, 1),
        )
    net.dense(2048, 1000)
    return tuple(net.layers)
