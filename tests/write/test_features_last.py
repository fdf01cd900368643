"""What a convolution hands on to norms is copied once, with the features last; what may not lie otherwise stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import error, flat, strict_reference
from patch_programs import (
    BATCH,
    FIRES,
    LEAVES,
    SIDE,
    STAYS,
    WITHOUT_GRADIENT,
    WRITTEN,
    Program,
    hidden,
    of_both,
    tokens,
)
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain.facts import explain
from coda_inductor.inductor import joint
from coda_inductor.patterns.graph import aten
from coda_inductor.write.features_last import put_features_last


def ran(f: Program, x: Tensor, grad: bool, dynamic: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the gradients of all that has one."""
    for t in LEAVES:
        t.grad = None
    x = x.clone().requires_grad_(grad)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.set_grad_enabled(grad):
        results = flat(f(x))
    made = [r for r in results if r.requires_grad]
    torch.autograd.backward(made, [r.detach().cos() for r in made])
    return [r.detach() for r in results], [t.grad for t in (x, *LEAVES) if t.grad is not None]


def lie(results: list[Tensor]) -> list[Any]:
    """Their strides, and which share memory."""
    memory = [r.untyped_storage().data_ptr() for r in results]
    apart = [[s for s, n in zip(r.stride(), r.shape, strict=True) if n > 1] for r in results]
    return [*map(memory.index, memory), *apart]


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
    assert lie(found[0]) == lie(eager[0])
    return sum(made)


@pytest.mark.sampled
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FIRES)
def test_what_is_normalised_is_copied_once(name: str, grad: bool) -> None:
    assert copies(FIRES[name], grad=grad) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str, grad: bool) -> None:
    assert copies(STAYS[name], grad=grad and name not in WITHOUT_GRADIENT) == 0


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_overwritten_by_its_place_lies_as_it_did(name: str) -> None:
    assert copies(of_both(WRITTEN[name]), grad=False) == 1


@pytest.mark.parametrize("name", ["tokens", "ConvNeXt", "two readers"])
def test_with_any_number_of_images_and_one(name: str) -> None:
    assert copies(FIRES[name], grad=True, dynamic=True) == copies(FIRES[name], grad=True, batch=1) == 1


def test_behind_inductor() -> None:
    assert copies(hidden, grad=True, run=True) == 1


def test_switched_off() -> None:
    assert copies(FIRES["tokens"], grad=False, disable="layouts") == 0


class Patches(nn.Module):
    """A patch embedding, and a layer behind it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 16, 16), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 1024), nn.Linear(1024, width)
        self.places = nn.Parameter(torch.ones(64, width))

    def forward(self, x: Tensor) -> Tensor:
        h = tokens(self.patches(x)) + self.places
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.relu(self.up(self.norm(h)))


@pytest.mark.parametrize(("disable", "regions"), [("", 3), ("layouts", 2)])
def test_regions_make_the_stream(disable: str, regions: int) -> None:
    settings = Settings(target="sm_90a", disable=frozenset(filter(None, [disable])))
    x = torch.zeros(8, 3, 128, 128, dtype=torch.bfloat16)
    assert explain(Patches().bfloat16(), (x,), {}, "infer", settings)["totals"]["regions"] == regions
