"""Widths that are no multiple of 8, as a vocabulary of 50257 or an MLP of 2730: what is made lies in rows that are
farther apart than they are long, and so do its gradients. A weight with such rows is copied into rows that a kernel can
read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import REFERENCE, pretend
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch

TOKENS, WIDTH = 320, 64
pytestmark = pytest.mark.usefixtures("uncached")


class Head(nn.Module):
    """A norm, scores, and the loss. `tied`: the embedding's weight."""

    def __init__(self, vocabulary: int, *, bias: bool, tied: bool) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, WIDTH), nn.LayerNorm(WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, vocabulary, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(self.norm(self.body(self.embedding(ids))))
        scores = scores.float() if scores.dtype == torch.bfloat16 else scores
        return nn.functional.cross_entropy(scores, targets), scores


def made(vocabulary: int, dtype: torch.dtype, *, bias: bool = False, tied: bool = False) -> tuple[Head, Tensor, Tensor]:
    torch.manual_seed(0)
    ids, targets = torch.randint(0, vocabulary, (2, TOKENS))
    targets[::7] = -100
    return Head(vocabulary, bias=bias, tied=tied).to(dtype), ids, targets


def gradients(model: Head, compiled: object, ids: Tensor, targets: Tensor, *, scores: bool) -> list[Tensor]:
    """The loss, the scores if somebody reads them, and all gradients."""
    model.zero_grad()
    loss, found = compiled(ids, targets)  # type: ignore[operator]
    (loss + found.pow(2).mean() if scores else loss).backward()
    return [loss, *([found] if scores else []), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.sampled
@pytest.mark.parametrize(("vocabulary", "bias", "tied"), [(1021, False, True), (1022, True, False), (603, True, True)])
@pytest.mark.parametrize("scores", [False, True])
def test_float64(vocabulary: int, bias: bool, tied: bool, scores: bool) -> None:
    model, ids, targets = made(vocabulary, torch.float64, bias=bias, tied=tied)
    compiled = torch.compile(model, backend="coda", options=REFERENCE)
    wanted = gradients(model, model, ids, targets, scores=scores)
    wanted = [x.detach().clone() for x in wanted]
    for found, right in zip(gradients(model, compiled, ids, targets, scores=scores), wanted, strict=True):
        assert found.stride() == right.stride() and (found - right).norm() <= 1e-10 * right.norm()


@pytest.mark.sampled
@pytest.mark.parametrize(("vocabulary", "bias"), [(2045, False), (2046, True)])
def test_kernels_get_rows_that_they_can_read(
    vocabulary: int, bias: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No matrix is copied at a launch, and the scores that the backward reads are those that the kernel wrote."""
    pretend(monkeypatch, tmp_path)
    model, ids, targets = made(vocabulary, torch.bfloat16, bias=bias)
    exact, _, _ = made(vocabulary, torch.float64, bias=bias)
    exact.load_state_dict(model.state_dict())
    REPORTS.clear()
    compiled = torch.compile(lambda *given: (model(*given)[0], given[0]), backend="coda")
    gradients(model, compiled, ids, targets, scores=False)
    launch.LAUNCHES.clear()
    found = gradients(model, compiled, ids, targets, scores=False)
    read = {(k, r.n) for report in REPORTS for site in report.sites for r in [site.region] for k in r.ks.values()}
    assert {(WIDTH, vocabulary), (vocabulary, WIDTH)} <= read
    assert sum(launch.LAUNCHES.values()) == len(REPORTS[-1].sites) and not launch.FALLBACKS
    for value, right in zip(found, gradients(exact, exact, ids, targets, scores=False), strict=True):
        assert (value.double() - right).norm() <= 0.02 * right.norm()


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
SEEN: dict[str, Change] = {
    "returned": lambda loss, x: (loss, x),
    "a view": lambda loss, x: (loss, x.t().unsqueeze(0)),
    "a part": lambda loss, x: (loss, x.view(-1)[::3]),
    "expanded": lambda loss, x: (loss, (x + 1).unsqueeze(1).expand(-1, 2, -1)),
    "by its place": lambda loss, x: (loss, torch.as_strided(x, (10, 10), (603, 1)).sin()),
    "an operation of a user's": lambda loss, x: (loss, torch.ops.mine.flat(x)),
}
torch.library.define("mine::flat", "(Tensor x) -> Tensor")
torch.library.impl("mine::flat", "CompositeExplicitAutograd", lambda x: x.as_strided((x.numel(),), (1,)).clone())
torch.library.register_fake("mine::flat", lambda x: x.new_empty(x.numel()))


@pytest.mark.sampled
@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("numbers", ["float64", "pretended"])
def test_nobody_sees_the_gaps(name: str, numbers: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if numbers == "pretended":
        pretend(monkeypatch, tmp_path)
    dtype = torch.float64 if numbers == "float64" else torch.bfloat16
    model, ids, targets = made(2046, dtype)
    change = SEEN[name]

    def call(ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = model.head(model.norm(model.body(model.embedding(ids))))
        return change(nn.functional.cross_entropy(scores, targets), scores)

    torch._dynamo.reset()  # all cases have one code, of which Dynamo keeps eight
    REPORTS.clear()
    options = REFERENCE if numbers == "float64" else None
    wanted, found = call(ids), torch.compile(call, backend="coda", options=options)(ids)
    assert any(site.region.n == WIDTH for report in REPORTS for site in report.sites)
    for ours, eagers in zip(found, wanted, strict=True):
        assert ours.stride() == eagers.stride()
        assert (ours - eagers).norm() <= (1e-10 if numbers == "float64" else 0.02) * eagers.norm()


class Mlp(nn.Module):
    """SwiGLU of any width, whose result may be normalised, as EVA-02's is."""

    def __init__(self, width: int, *, bias: bool, normed: bool) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*s, bias) for s in ((WIDTH, width), (WIDTH, width), (width, WIDTH)))
        self.norm = nn.RMSNorm(width) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(nn.functional.silu(self.gate(x)) * self.up(x)))
        return x + y


def all_of(model: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """The output, and all gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = compiled(x)
    (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in model.parameters())) if t is not None]


@pytest.mark.sampled
@pytest.mark.parametrize(("width", "bias", "normed"), [(2046, False, False), (2046, True, True), (2045, False, False)])
@pytest.mark.parametrize("numbers", ["float64", "pretended"])
def test_weights_whose_rows_do_not_begin_at_multiples_of_16_bytes(
    numbers: str, width: int, bias: bool, normed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is copied at a launch: the copy is a kernel of the graph's."""
    if numbers == "pretended":
        pretend(monkeypatch, tmp_path)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp(width, bias=bias, normed=normed).to(torch.float64)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    wanted = all_of(model, model, x)
    if numbers == "pretended":
        model, x = model.bfloat16(), x.bfloat16()
    REPORTS.clear()
    launch.FALLBACKS.clear()
    options = REFERENCE if numbers == "float64" else None
    found = all_of(model, torch.compile(model, backend="coda", options=options), x)
    read = {
        (k, r.n, len(r.products)) for report in REPORTS for s in report.sites for r in [s.region] for k in r.ks.values()
    }
    assert {(WIDTH, width, 2), (width, WIDTH, 1)} <= read and not launch.FALLBACKS
    for ours, right in zip(found, wanted, strict=True):
        assert (ours - right).norm() <= (1e-10 if numbers == "float64" else 0.02) * right.norm()


@pytest.mark.parametrize(("first", "whole"), [(0, 67), (3, 72), (3, 131)])
def test_a_part_of_a_wider_weight(first: int, whole: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whose rows, or whose first number, do not lie at multiples of 16 bytes."""
    pretend(monkeypatch, tmp_path)
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(128, whole).bfloat16()

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w[:, first : first + WIDTH].t())

    launch.FALLBACKS.clear()
    REPORTS.clear()
    found = torch.compile(call, backend="coda")(x, w)
    assert [site.region.n for report in REPORTS for site in report.sites] == [128] and not launch.FALLBACKS
    assert (found.double() - call(x.double(), w.double())).norm() <= 0.02 * found.double().norm()
