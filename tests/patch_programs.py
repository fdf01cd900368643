"""Programs that normalise what a convolution makes of patches, and others that do so in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Program = Callable[[Tensor], Any]
BATCH, SIDE, PLACES, WIDTH = 2, 16, 16, 8


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) / 3).requires_grad_()


torch.manual_seed(0)
PATCHES, DEEP, AROUND, POINTS = leaf(WIDTH, 3, 4, 4), leaf(WIDTH, 3, 4), leaf(WIDTH, 1, 3, 3), leaf(WIDTH, WIDTH, 1, 1)
CUBES, BACK, ONE_FEATURE = leaf(WIDTH, 3, 2, 2, 2), leaf(3, WIDTH, 2, 2), leaf(1, 3, 4, 4)
POSITIONS, GAIN, BIAS, HEAD = leaf(PLACES, WIDTH), leaf(WIDTH), leaf(WIDTH), leaf(WIDTH, WIDTH)
UP, DOWN, FEW, MIX = leaf(12, WIDTH), leaf(WIDTH, 12), leaf(4, 4), leaf(PLACES, PLACES)
LEAVES = (PATCHES, DEEP, AROUND, POINTS, CUBES, BACK, ONE_FEATURE, POSITIONS, GAIN, BIAS, HEAD, UP, DOWN, FEW, MIX)


@torch.library.custom_op("features_last::double_", mutates_args={"x"})
def double_(x: Tensor) -> None:
    x.mul_(2)


def image(x: Tensor) -> Tensor:
    return F.conv2d(x, PATCHES, BIAS, stride=4)


def tokens(h: Tensor) -> Tensor:
    return h.flatten(2).transpose(1, 2)


def stream(x: Tensor) -> Tensor:
    return tokens(image(x)) + POSITIONS


def norm(h: Tensor) -> Tensor:
    return F.layer_norm(h, (WIDTH,), GAIN, BIAS)


def rms(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def layer(h: Tensor) -> Tensor:
    return h + F.linear(F.gelu(F.linear(norm(h), UP)), DOWN)


def convnext(x: Tensor) -> Tensor:
    h = image(x)
    inner = F.gelu(F.linear(norm(F.conv2d(h, AROUND, padding=1, groups=WIDTH).permute(0, 2, 3, 1)), UP))
    return h + F.linear(inner, DOWN).permute(0, 3, 1, 2)


def hidden(x: Tensor) -> Any:
    first = stream(x)
    return norm(second := layer(first)), (first, second)


def overwritten(x: Tensor) -> Any:
    h = image(x).mul_(2)
    t = tokens(h)
    t.transpose(1, 2).add_(1)
    return layer(t * GAIN), h


def two_readers(x: Tensor) -> Any:
    """Only one of them is normalised."""
    t = tokens(image(x))
    return layer(t + 1), (t * 2).transpose(1, 2).softmax(-1), t


def by_place(see: Program) -> Program:
    """What is made of the stream that something else reads by its place in memory."""

    def program(x: Tensor) -> Any:
        return layer(h := stream(x)), torch.tanh(see(h)) @ HEAD[:4]

    return program


def part(h: Tensor) -> Tensor:
    return torch.as_strided(h, (h.shape[0] * PLACES, 4), (WIDTH, 1))


def of_both(see: Program) -> Program:
    """What is overwritten behind the layer's reading."""

    def program(x: Tensor) -> Any:
        made = layer(h := stream(x))
        see(h)
        return made.sin(), h.sin() @ HEAD

    return program


FIRES: dict[str, Program] = {
    "tokens": lambda x: layer(layer(stream(x))),
    "tokens, returned by products": lambda x: (y := rms(stream(x)) @ HEAD, y.mT),
    "a copy, returned": lambda x: (y := rms(stream(x)).contiguous(), y.mT, layer(y)),
    "root mean square": lambda x: rms(stream(x)) @ HEAD,
    "nothing added": lambda x: rms(tokens(image(x))) @ HEAD,
    "mean alone": lambda x: ((t := tokens(image(x))) - t.mean(-1, keepdim=True)) @ HEAD,
    "GELU before": lambda x: layer(tokens(F.gelu(image(x))) + 1),
    "two convolutions": lambda x: layer(tokens(image(x) + F.conv2d(image(x), POINTS)) * GAIN),
    "of one dimension": lambda x: layer(F.conv1d(x.flatten(2)[..., :64], DEEP, stride=4).mT + POSITIONS),
    "of three": lambda x: layer(tokens(F.conv3d(x.unflatten(2, (4, 4)), CUBES, stride=2)) + 1),
    "transposed": lambda x: layer(tokens(F.conv_transpose2d(x[..., :4, :4], BACK, stride=2)) + 1),
    "ConvNeXt": convnext,
    "hidden states": hidden,
    "overwritten": overwritten,
    "two readers": two_readers,
    "returned itself": lambda x: (t := tokens(image(x)), layer(t.sin())),
    "checkpoint": lambda x: checkpoint(lambda x: layer(stream(x)), x, use_reentrant=False),
    "broadcast": lambda x: rms(stream(x) + POSITIONS.expand(3, 1, PLACES, WIDTH)) @ HEAD,
    "as_strided": by_place(part),
    "as_strided_copy": by_place(lambda h: torch.as_strided_copy(h, (h.shape[0] * PLACES, 4), (WIDTH, 1))),
}
"""Of these one view is copied."""
STAYS: dict[str, Program] = {
    "no convolution": lambda x: layer(x.flatten(2)[:, :WIDTH, :WIDTH].mT @ HEAD[:3]),
    "nothing normalised": lambda x: F.linear(torch.tanh(stream(x)), UP),
    "normalised over places": lambda x: rms(stream(x).mT.contiguous()).mT @ HEAD,
    "normalised over one side": lambda x: rms(image(x).transpose(2, 3) + 1) @ FEW,
    "mixed by a product": lambda x: rms((image(x).flatten(2) @ MIX).mT + 1) @ HEAD,
    "mean of the places": lambda x: stream(x).mean(1) @ HEAD,
    "features side by side": lambda x: layer(tokens(image(x.to(memory_format=torch.channels_last))) + POSITIONS),
    "one feature": lambda x: rms(tokens(F.conv2d(x, ONE_FEATURE, stride=4)) + 1) @ GAIN[None],
    "beside a class": lambda x: layer(torch.cat([GAIN.expand(x.shape[0], 1, -1), tokens(image(x))], 1)),
    "shared": lambda x: (h := stream(x), h.transpose(1, 2), layer(h)),
    "shared behind": lambda x: (y := stream(x).flip(1), y[:], layer(y).sum()),
    "shared copy": lambda x: (y := (h := stream(x)).clone(), y.mT, layer(h)),
    "with gaps": lambda x: ((h := stream(x))[..., 1:], layer(h)),
    "as_strided of the last": by_place(lambda h: torch.as_strided(h[1:], (PLACES, 4), (WIDTH, 1))),
    "as_strided of rows apart": by_place(lambda h: torch.as_strided(h[:, :3], (PLACES, 4), (WIDTH, 1))),
}
"""Of these none is."""
WRITTEN: dict[str, Program] = {
    "as_strided": lambda h: part(h).mul_(2),
    "an operation of the user's": lambda h: double_(h.mT[:, :4]),
    "the same, by strides": lambda h: double_(part(h)),
}
"""What overwrites the stream, or a part of it."""
WITHOUT_GRADIENT = frozenset({"as_strided of the last", "as_strided of rows apart"})
"""Of these Inductor alone makes another gradient than eager."""
