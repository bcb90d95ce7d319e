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
class LayerBuilder:
    """Network under construction; `side` and `channels` are those of the input of the next layer.

    `normalised` is the number of batch normalisation vectors of each convolution; 0: it has a bias instead.
    """

    side: int
    normalised: int
    channels: int = 3
    layers: list[Layer] = field(default_factory=list)

    def add_conv(self, out: int, size: int | tuple[int, int], stride: int = 1, valid: bool = False) -> LayerBuilder:
        """Add a convolution; `valid`: without padding."""
        high, wide = (size, size) if isinstance(size, int) else size
        self.side = _shrink_side(self.side, max(high, wide) if valid else 1, stride)
        weights = high * wide * self.channels * out
        vectors = (out,) * (self.normalised or 1)
        self.layers.append(Layer((weights, *vectors), weights * self.side**2))
        self.channels = out
        return self

    def add_pool(self, size: int, stride: int, valid: bool = True) -> LayerBuilder:
        """Add a pooling layer."""
        self.side = _shrink_side(self.side, size if valid else 1, stride)
        return self

    def add_dense(self, inputs: int, out: int) -> LayerBuilder:
        """Add a dense layer with a bias."""
        self.layers.append(Layer((inputs * out, out), inputs * out))
        return self

    def add_branches(self, *branches: Callable[[LayerBuilder], object], keep: int = 0) -> LayerBuilder:
        """Add parallel branches, whose channels are concatenated; `keep` channels of the input are passed through."""
        channels, side, out = self.channels, self.side, keep
        for branch in branches:
            self.channels, self.side = channels, side
            branch(self)
            out += self.channels
        self.channels = out
        return self


def _shrink_side(side: int, size: int, stride: int) -> int:
    return (side - size) // stride + 1


def build_vgg16() -> tuple[Layer, ...]:
    """Return the layers of VGG-16: 138,357,544 parameters."""
    net = LayerBuilder(224, normalised=0)
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.add_conv(out, 3)
        net.add_pool(2, 2)
    net.add_dense(7 * 7 * 512, 4096).add_dense(4096, 4096).add_dense(4096, 1000)
    return tuple(net.layers)


def build_resnet101() -> tuple[Layer, ...]:
    """Return the layers of ResNet-101: 44,549,160 parameters."""
    net = LayerBuilder(224, normalised=2).add_conv(64, 7, 2).add_pool(3, 2, valid=False)
    for width, count in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(count):
            stride = 2 if block == 0 and width > 64 else 1
            entered = net.channels, net.side
            if block == 0:
                net.add_conv(4 * width, 1, stride)
                net.channels, net.side = entered
            net.add_conv(width, 1, stride).add_conv(width, 3).add_conv(4 * width, 1)
    net.add_dense(2048, 1000)
    return tuple(net.layers)


def build_inception3() -> tuple[Layer, ...]:
    """Return the layers of Inception V3: 23,817,352 parameters; batch normalisation has an offset and no scale."""
    net = LayerBuilder(299, normalised=1)
    net.add_conv(32, 3, 2, valid=True).add_conv(32, 3, valid=True).add_conv(64, 3).add_pool(3, 2)
    net.add_conv(80, 1).add_conv(192, 3, valid=True).add_pool(3, 2)
    for pooled in (32, 64, 64):
        net.add_branches(
            lambda n: n.add_conv(64, 1),
            lambda n: n.add_conv(48, 1).add_conv(64, 5),
            lambda n: n.add_conv(64, 1).add_conv(96, 3).add_conv(96, 3),
            lambda n, out=pooled: n.add_conv(out, 1),
        )
    net.add_branches(
        lambda n: n.add_conv(384, 3, 2, valid=True),
        lambda n: n.add_conv(64, 1).add_conv(96, 3).add_conv(96, 3, 2, valid=True),
        keep=net.channels,
    )
    for width in (128, 160, 160, 192):
        net.add_branches(
            lambda n: n.add_conv(192, 1),
            lambda n, w=width: n.add_conv(w, 1).add_conv(w, (1, 7)).add_conv(192, (7, 1)),
            lambda n, w=width: (
                n.add_conv(w, 1).add_conv(w, (7, 1)).add_conv(w, (1, 7)).add_conv(w, (7, 1)).add_conv(192, (1, 7))
            ),
            lambda n: n.add_conv(192, 1),
        )
    net.add_branches(
        lambda n: n.add_conv(192, 1).add_conv(320, 3, 2, valid=True),
        lambda n: n.add_conv(192, 1).add_conv(192, (1, 7)).add_conv(192, (7, 1)).add_conv(192, 3, 2, valid=True),
        keep=net.channels,
    )
    for _ in range(2):
        net.add_branches(
            lambda n: n.add_conv(320, 1),
            lambda n: n.add_conv(384, 1).add_branches(
                lambda m: m.add_conv(384, (1, 3)), lambda m: m.add_conv(384, (3, 1))
            ),
            lambda n: (
                n.add_conv(448, 1)
                .add_conv(384, 3)
                .add_branches(lambda m: m.add_conv(384, (1, 3)), lambda m: m.add_conv(384, (3, 1)))
            ),
            lambda n: n.add_conv(192, 1),
        )
    net.add_dense(2048, 1000)
    return tuple(net.layers)
