"""Results that whoever called the forward overwrites before the backward runs: gradients are eager's, wherever eager's
backward does not read the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import Norm
from evaluate import strict_reference
from torch import Tensor, fx, nn

from coda_inductor.inductor import joint
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.ops.custom import KEPT
from coda_inductor.write.kept import keep, lent

WIDTH, CLASSES = 32, 24
pytestmark = pytest.mark.usefixtures("uncached")


class End(nn.Module):
    """The end of a decoder: a residual, the last norm, and what the norm is multiplied by."""

    def __init__(self, how: Callable[[Tensor, Tensor], tuple[Tensor, ...]], centred: bool = False) -> None:
        super().__init__()
        self.down, self.head = nn.Linear(48, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES)
        self.norm = nn.LayerNorm(WIDTH) if centred else Norm(WIDTH)
        self.how = how

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(residual + self.down(x))
        return self.how(F.linear(h, self.head.weight), self.head(h))


TURN = torch.linspace(-1, 1, CLASSES**2, dtype=torch.float64).view(CLASSES, CLASSES)
LABELS = torch.arange(5 * 6) % CLASSES


def loss(z: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), LABELS)


WAYS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "scores": lambda z, b: (z,),
    "with a bias": lambda z, b: (b,),
    "scaled": lambda z, b: (0.5 * z,),
    "heads": lambda z, b: (z.unflatten(-1, (3, 8)).transpose(-2, -3),),
    "one of three parts": lambda z, b: (z.chunk(3, -1)[1],),
    "two of three parts": lambda z, b: z.chunk(3, -1)[:2],
    "a copy": lambda z, b: (z.clone(),),
    "a copy of what is read": lambda z, b: (z.clone(), z.sin()),
    "beside their loss": lambda z, b: (z, loss(z)),
    "a view, beside their loss": lambda z, b: (z.view(30, CLASSES), loss(z)),
    "beside a product of them": lambda z, b: (z, z @ TURN),
    "beside their softmax": lambda z, b: (z, z.softmax(-1)),
}
"""What is returned; the first is overwritten. No operation's backward reads it in eager."""


def gradients(model: End, compiled: Callable[..., tuple[Tensor, ...]], *lead: int) -> list[Tensor]:
    """Of what is read of the results before the first is overwritten."""
    torch.manual_seed(1)
    x, residual = (torch.randn(*lead, n).to(model.down.weight.dtype) for n in (48, WIDTH))
    model.zero_grad()
    results = compiled(x, residual)
    total = torch.stack([r.clone().cos().sum() for r in results if r.requires_grad]).sum()
    results[0].detach().mul_(-3.0)
    total.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.sampled
@pytest.mark.parametrize("centred", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("lead", [(5, 6), (30,)], ids=["sequences", "tokens"])
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_eagers(name: str, lead: tuple[int, ...], centred: bool) -> None:
    """Of one dimension of tokens, autograd would have noticed what a backward reads."""
    torch.manual_seed(0)
    model = End(WAYS[name], centred).double()
    wanted = gradients(model, model, *lead)
    with strict_reference(run=False):
        for mine, theirs in zip(gradients(model, torch.compile(model, backend="coda"), *lead), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert REPORTS[-1].sites


def test_behind_inductor() -> None:
    torch.manual_seed(0)
    model = End(WAYS["scores"]).double()
    wanted = gradients(model, model, 5, 6)
    with strict_reference():
        for mine, theirs in zip(gradients(model, torch.compile(model, backend="coda"), 5, 6), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


IN_16_BITS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "a copy, beside their loss": lambda z, b: (z.detach().clone(), loss(z.float())),
    "beside the loss of scaled ones": lambda z, b: (z, loss((z / 3).float())),
    "beside their loss": lambda z, b: (z / 2, loss(z.float())),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", IN_16_BITS)
def test_in_16_bits_behind_inductor(name: str) -> None:
    """What is wider may be made again of what is narrow, and Inductor drops copies."""
    torch.manual_seed(0)
    model = End(IN_16_BITS[name]).bfloat16()
    wanted = gradients(model, model, 5, 6)
    with strict_reference():
        for mine, theirs in zip(gradients(model, torch.compile(model, backend="coda"), 5, 6), wanted, strict=True):
            assert float((mine - theirs).norm() / theirs.norm()) < 0.05


def laws(
    how: Callable[[Tensor, Tensor], tuple[Tensor, ...]], dtype: torch.dtype
) -> tuple[set[str], list[frozenset[int]]]:
    """Those that the derivation uses, and the results that the backward may not read."""
    model, found = End(how).to(dtype), list[frozenset[int]]()

    def seen(graph: fx.Graph) -> frozenset[int]:
        found.append(lent(graph))
        return found[-1]

    with strict_reference(run=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "lent", seen)
        x, residual = (torch.randn(5, 6, n, dtype=dtype) for n in (48, WIDTH))
        torch.compile(model, backend="coda")(x, residual)
    return {law for site in REPORTS[-1].sites for law in site.laws}, found


@pytest.mark.parametrize("name", [name for name in WAYS if "copy" not in name])
def test_nothing_is_copied_for_a_statistic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is summed otherwise."""
    made = list[int]()

    def counted(graph: fx.Graph, results: frozenset[int]) -> None:
        keep(graph, results)
        made.append(len(graph.find_nodes(op="call_function", target=KEPT)))

    monkeypatch.setattr(joint, "keep", counted)
    laws(WAYS[name], torch.float64)
    assert made == [0]


def test_what_is_not_returned_is_read() -> None:
    """The statistic of a norm's backward is a sum of the scores' gradient times the scores."""
    assert "triangle" in laws(lambda z, b: (z.sin(),), torch.float64)[0]
    assert "triangle" not in laws(WAYS["scores"], torch.float64)[0]


def test_what_eager_keeps_is_read() -> None:
    """Of a result that eager's backward reads, autograd says that it was overwritten."""
    found, results = laws(lambda z, b: (z, z.sin()), torch.float64)
    assert "triangle" in found and results == [frozenset({1})]


def test_what_inductor_keeps_is_read() -> None:
    """Scores of 16 bits, of which a loss makes numbers of 32: it keeps the scores. Of as many bits it need not."""
    widened = laws(lambda z, b: (z, loss(z.float())), torch.bfloat16)[1]
    assert widened == [frozenset({1})] and laws(WAYS["beside their loss"], torch.float64)[1] == [frozenset({0, 1})]


def test_results_are_lent_and_no_gradients() -> None:
    assert laws(lambda z, b: (z.sin(), b.cos().sum()), torch.float64)[1] == [frozenset({0, 1})]
