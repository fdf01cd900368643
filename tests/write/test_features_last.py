"""What a convolution hands on to norms is copied once, with the features last; what may not lie otherwise stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, flat, strict_reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coda_inductor.core.settings import Settings
from coda_inductor.explain.facts import explain
from coda_inductor.inductor import joint
from coda_inductor.patterns.graph import aten
from coda_inductor.write.features_last import put_features_last

Program = Callable[[Tensor], Any]
BATCH, SIDE, PLACES, WIDTH = 2, 16, 16, 8


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) / 3).requires_grad_()


torch.manual_seed(0)
PATCHES, DEEP, AROUND, POINTS = leaf(WIDTH, 3, 4, 4), leaf(WIDTH, 3, 4), leaf(WIDTH, 1, 3, 3), leaf(WIDTH, WIDTH, 1, 1)
CUBES, BACK, ONE_FEATURE = leaf(WIDTH, 3, 2, 2, 2), leaf(3, WIDTH, 2, 2), leaf(1, 3, 4, 4)
POSITIONS, GAIN, BIAS, HEAD = leaf(PLACES, WIDTH), leaf(WIDTH), leaf(WIDTH), leaf(WIDTH, WIDTH)
UP, DOWN, FEW = leaf(12, WIDTH), leaf(WIDTH, 12), leaf(4, 4)
LEAVES = (PATCHES, DEEP, AROUND, POINTS, CUBES, BACK, ONE_FEATURE, POSITIONS, GAIN, BIAS, HEAD, UP, DOWN, FEW)


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


def part(h: Tensor, offset: int = 0) -> Tensor:
    return torch.as_strided(h, (h.shape[0] * PLACES - offset, 4), (WIDTH, 1), offset)


def of_both(see: Program) -> Program:
    """What is overwritten behind the layer's reading."""

    def program(x: Tensor) -> Any:
        made = layer(h := stream(x))
        see(h)
        return made.sin(), h.sin() @ HEAD

    return program


FIRES: dict[str, tuple[Program, int]] = {
    "tokens": (lambda x: layer(layer(stream(x))), 1),
    "tokens, returned by products": (lambda x: ((y := norm(stream(x)) @ HEAD), y.mT), 1),
    "root mean square": (lambda x: rms(stream(x)) @ HEAD, 1),
    "GELU before": (lambda x: layer(tokens(F.gelu(image(x))) + 1), 1),
    "two convolutions": (lambda x: layer(tokens(image(x) + F.conv2d(image(x), POINTS)) * GAIN), 1),
    "of one dimension": (lambda x: layer(F.conv1d(x.flatten(2)[..., :64], DEEP, stride=4).mT + POSITIONS), 1),
    "of three": (lambda x: layer(tokens(F.conv3d(x.unflatten(2, (4, 4)), CUBES, stride=2)) + 1), 1),
    "transposed": (lambda x: layer(tokens(F.conv_transpose2d(x[..., :4, :4], BACK, stride=2)) + 1), 1),
    "ConvNeXt": (convnext, 1),
    "hidden states": (hidden, 1),
    "overwritten": (overwritten, 1),
    "two readers": (two_readers, 1),
    "returned itself": (lambda x: ((t := tokens(image(x))), layer(t.sin())), 1),
    "checkpoint": (lambda x: checkpoint(lambda x: layer(stream(x)), x, use_reentrant=False), 1),
    "broadcast": (lambda x: rms(stream(x) + POSITIONS.expand(3, 1, PLACES, WIDTH)) @ HEAD, 1),
    "as_strided": (by_place(part), 1),
    "as_strided_copy": (by_place(lambda h: torch.as_strided_copy(h, (h.shape[0] * PLACES, 4), (WIDTH, 1))), 1),
}  # fmt: skip
STAYS: dict[str, Program] = {
    "no convolution": lambda x: layer(x.flatten(2)[:, :WIDTH, :WIDTH].mT @ HEAD[:3]),
    "nothing normalised": lambda x: F.linear(torch.tanh(stream(x)), UP),
    "normalised over places": lambda x: rms(stream(x).mT.contiguous()).mT @ HEAD,
    "normalised over one side": lambda x: rms(image(x).transpose(2, 3) + 1) @ FEW,
    "mean of the places": lambda x: stream(x).mean(1) @ HEAD,
    "features side by side": lambda x: layer(tokens(image(x.to(memory_format=torch.channels_last))) + POSITIONS),
    "one feature": lambda x: rms(tokens(F.conv2d(x, ONE_FEATURE, stride=4)) + 1) @ GAIN[None],
    "beside a class": lambda x: layer(torch.cat([GAIN.expand(x.shape[0], 1, -1), tokens(image(x))], 1)),
    "shared": lambda x: (h := stream(x), h.transpose(1, 2), layer(h)),
    "shared behind": lambda x: (y := stream(x).flip(1), y[:], layer(y).sum()),
    "shared copy": lambda x: (y := (h := stream(x)).clone(), y.mT, layer(h)),
    "with gaps": lambda x: ((h := stream(x))[..., 1:], layer(h)),
    "as_strided in the middle": by_place(lambda h: part(h[:, 1:], 1)),
}  # fmt: skip
WRITTEN: dict[str, Program] = {
    "as_strided": lambda h: part(h).mul_(2),
    "an operation of the user's": lambda h: double_(h.mT[:, :4]),
    "the same, by strides": lambda h: double_(part(h)),
}


def ran(f: Program, x: Tensor, grad: bool, dynamic: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of all that has one."""
    for t in LEAVES:
        t.grad = None
    x = x.clone().requires_grad_(grad)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.set_grad_enabled(grad):
        results = flat(f(x))
    if grad:
        torch.autograd.backward(
            [r for r in results if r.requires_grad], [r.detach().cos() for r in results if r.requires_grad]
        )
    return [r.detach() for r in results], [t.grad for t in (x, *LEAVES) if t.grad is not None]


def copies(
    f: Program, *, grad: bool, run: bool = False, dynamic: bool = False, batch: int = BATCH, **options: Any
) -> int:
    """How many views are copied. Results, gradients, strides and what shares memory are eager's."""
    made = list[int]()

    def counted(graph: torch.fx.Graph) -> None:
        before = set(graph.nodes)
        put_features_last(graph)
        new = (n for n in graph.nodes if n not in before and n.target is aten.clone.default)
        made.append(sum(n.args[0] in before for n in new))

    torch.manual_seed(1)
    x = torch.randn(batch, 3, SIDE, SIDE, dtype=torch.float64)
    eager = ran(f, x, grad)
    with strict_reference(run=run), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "put_features_last", counted)
        found = ran(torch.compile(f, backend="coda", options=options), x, grad, dynamic)
    for mine, theirs in zip((*found[0], *found[1]), (*eager[0], *eager[1]), strict=True):
        assert error(mine, theirs) < 1e-10
    where = [[r.untyped_storage().data_ptr() for r in results] for results, _ in (found, eager)]
    assert [[*map(w.index, w)] for w in where[:1]] == [[*map(w.index, w)] for w in where[1:]]
    long = [[s for s, n in zip(r.stride(), r.shape, strict=True) if n > 1] for r in found[0]]
    assert long == [[s for s, n in zip(r.stride(), r.shape, strict=True) if n > 1] for r in eager[0]]
    return sum(made)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FIRES)
def test_what_is_normalised_is_copied_once(name: str, grad: bool) -> None:
    f, wanted = FIRES[name]
    assert copies(f, grad=grad) == wanted


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str, grad: bool) -> None:
    assert (
        copies(STAYS[name], grad=grad and name != "as_strided in the middle") == 0
    )  # its gradient Inductor gets wrong


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_overwritten_by_its_place_lies_as_it_did(name: str) -> None:
    assert copies(of_both(WRITTEN[name]), grad=False) == 1


@pytest.mark.parametrize("name", ["tokens", "ConvNeXt", "two readers"])
def test_with_any_number_of_images_and_one(name: str) -> None:
    f, wanted = FIRES[name]
    assert copies(f, grad=True, dynamic=True) == copies(f, grad=True, batch=1) == wanted


def test_behind_inductor() -> None:
    assert copies(hidden, grad=True, run=True) == 1


def test_switched_off() -> None:
    assert copies(FIRES["tokens"][0], grad=False, disable="layouts") == 0


class Patches(nn.Module):
    """A patch embedding, and a layer behind it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 16, 16), nn.LayerNorm(width)
        self.up, self.down, self.places = (
            nn.Linear(width, 1024),
            nn.Linear(1024, width),
            nn.Parameter(torch.ones(64, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = tokens(self.patches(x)) + self.places
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.relu(self.up(self.norm(h)))


@pytest.mark.parametrize(("disable", "regions"), [("", 3), ("layouts", 2)])
def test_regions_make_the_stream(disable: str, regions: int) -> None:
    settings = Settings(target="sm_90a", disable=frozenset(filter(None, [disable])))
    x = torch.zeros(8, 3, 128, 128, dtype=torch.bfloat16)
    assert explain(Patches().bfloat16(), (x,), {}, "infer", settings)["totals"]["regions"] == regions
