"""Diffusion transformers of several images: what scales and gates the tokens of each is a vector of its sample, which
epilogues read. In float64, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conditioned_blocks import Apart, Chunks, D, Table, inputs, model
from evaluate import compiled, error, strict_reference
from torch import Tensor, nn
from trained_layers import as_eager

from coda_inductor.core.region import SAMPLE, parse
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report


def tokens(report: Report) -> list[int]:
    """Of each sample, of every operand that is one's vector."""
    return [o.tokens for site in report.sites for o in site.region.operands if o.extent == "sample"]


def summed(report: Report) -> list[int]:
    """Of each sample, of every sum over its tokens."""
    return [r.tokens for site in report.sites for r in site.region.reductions if r.tokens]


@pytest.mark.sampled
@pytest.mark.parametrize("of_text", [False, True])
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("block", [Chunks, Table, Apart])
def test_several_images_are_eagers(block: Callable[[], nn.Module], batch: int, of_text: bool) -> None:
    """The gates of both products of both blocks."""
    made, args = model(block, of_text), inputs(batch, 2 * SAMPLE)
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10
    assert set(tokens(report)) == {2 * SAMPLE} and len(tokens(report)) >= 4
    assert all(parse(site.region.text) == site.region for site in report.sites)


def test_as_inductor_compiles_it() -> None:
    """The parts of one product, which lie apart, are read where they are."""
    made, args = model(Chunks), inputs(2, SAMPLE)
    found, (report,) = compiled(made, *args)
    assert error(found, made(*args)) < 1e-10 and tokens(report)


@pytest.mark.parametrize("count", [SAMPLE // 2, SAMPLE - 8, SAMPLE + 8])
def test_tokens_that_fill_no_tile_are_refused(count: int) -> None:
    made, args = model(Chunks), inputs(2, count)
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10 and not tokens(report)
    assert any(f"its tokens are {count}" in r.reason for r in report.refused)


def test_a_symbol_of_images_is_eagers() -> None:
    made = model(Chunks)
    for dim, read in ((0, True), (1, False)):
        with strict_reference(run=False), torch.no_grad():
            REPORTS.clear()
            step = torch.compile(made, backend="coda")
            for batch, count in ((2, 2 * SAMPLE), (3, 2 * SAMPLE)) if dim == 0 else ((2, 2 * SAMPLE), (2, 3 * SAMPLE)):
                args = inputs(batch, count)
                for x in args[: 2 - dim]:
                    torch._dynamo.mark_dynamic(x, dim)
                assert error(step(*args), made(*args)) < 1e-10
            assert len(REPORTS) == 1 and bool(tokens(REPORTS[0])) is read, dim


@pytest.mark.sampled
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("block", [Chunks, Table, Apart])
def test_their_gradients_are_eagers(block: Callable[[], nn.Module], batch: int) -> None:
    """Epilogues read such vectors, and take their gradients: sums over the tokens of each sample."""
    reports = as_eager(model(block), *inputs(batch, SAMPLE))
    assert all(map(tokens, reports))
    sums = [count for report in reports for count in summed(report)]
    assert set(sums) == {SAMPLE} and len(sums) >= 4


@pytest.mark.parametrize("count", [SAMPLE - 8, SAMPLE + 8])
def test_sums_of_samples_that_fill_no_tile_are_refused(count: int) -> None:
    reports = as_eager(model(Chunks), *inputs(2, count))
    assert any(report.sites for report in reports) and not any(map(summed, reports))


def test_gradients_of_a_symbol_of_images_are_eagers() -> None:
    made = model(Chunks)
    with strict_reference(run=False):
        REPORTS.clear()
        step = torch.compile(made, backend="coda")
        for batch in (2, 3, 5):
            args = [a.requires_grad_() for a in inputs(batch, SAMPLE)]
            for x in args:
                torch._dynamo.mark_dynamic(x, 0)
            leaves = [*args, *made.parameters()]
            wanted, found = made(*args), step(*args)
            weight = torch.randn_like(wanted)
            gradients = [torch.autograd.grad((out * weight).sum(), leaves) for out in (found, wanted)]
            assert all(error(mine, theirs) < 1e-10 for mine, theirs in zip(*gradients, strict=True))
        assert len(REPORTS) == 1 and summed(REPORTS[0])


class Pooled(nn.Module):
    """What is added up over the tokens of each sample, in the order that `way` asks for; over the samples of each token
    nothing is."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), way

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out: Tensor = self.second(h)
        if self.way == "turned":
            return out.sum() + h.permute(2, 1, 0).sum(1)
        if self.way == "kept":
            return out * h.mean(1, keepdim=True)[..., :D]
        return out + (h.amax(1, keepdim=True) if self.way == "largest" else h.sum(0))[..., :D]


@pytest.mark.parametrize("way", ["turned", "kept", "largest", "of tokens"])
def test_sums_of_a_forward(way: str) -> None:
    torch.manual_seed(0)
    made, (x, _) = Pooled(way).double(), inputs(SAMPLE if way == "of tokens" else 3, SAMPLE)
    with torch.no_grad():
        found, (report,) = compiled(made, x, run=False)
        wanted = made(x)
    assert error(found, wanted) < 1e-10 and found.stride() == wanted.stride()
    assert bool(summed(report)) == (way == "kept")
    as_eager(made, x)


class Frames(nn.Module):
    """A gate for each video and a scale for each of its frames, both inputs; a place's embedding is of no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, gate: Tensor, scale: Tensor, place: Tensor) -> Tensor:
        h = F.silu(self.first(x)) * scale[:, :, None] + place
        out: Tensor = x + gate[:, None, None] * self.second(h)
        return out


def test_samples_within_samples_have_their_own_tokens() -> None:
    torch.manual_seed(0)
    made, size = Frames().double(), 2 * SAMPLE
    given = ((2, 3, size, D), (2, D), (2, 3, 2 * D), (size, 2 * D))
    args = [torch.randn(*shape, dtype=torch.float64) for shape in given]
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10 and sorted(tokens(report)) == [size, 3 * size]
    sums = [count for report in as_eager(made, *args) for count in summed(report)]
    assert set(sums) <= {size, 3 * size} and sums


class Late(nn.Module):
    """The condition's product stands behind that of the tokens; its result is returned, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.second = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        gate = self.gate(t[:, 0])
        return self.second(h * gate[:, None]), gate


class Waiting(Late):
    """The gate is made of the mean of the tokens that it scales: squeeze and excitation."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        gate = torch.sigmoid(self.gate(h.mean(1)[:, :D]))
        return self.second(h * gate[:, None]), gate


@pytest.mark.parametrize("kind", [Late, Waiting])
def test_a_condition_may_come_late(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made, args = kind().double(), inputs(2, SAMPLE)
    found, reports = compiled(made, *args, run=False)
    assert all(error(a, b) < 1e-10 for a, b in zip(found, made(*args), strict=True))
    assert bool([t for r in reports for t in tokens(r)]) == (kind is Late)


class Scaled(nn.Module):
    """A norm without a mean, scaled for each sample, whose own scale leaves the next product: the sample's is stored
    with the operand."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.second = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        n = F.rms_norm(self.first(x), (2 * D,)) * (1 + self.scale(t[:, 0])[:, None])
        out: Tensor = self.second(n)
        return out


@pytest.mark.parametrize("batch", [2, 3])
def test_a_norms_scale_leaves_the_samples_behind(batch: int) -> None:
    torch.manual_seed(0)
    made, args = Scaled().double(), inputs(batch, SAMPLE)
    found, (report,) = compiled(made, *args, run=False)
    assert error(found, made(*args)) < 1e-10 and tokens(report) == [SAMPLE]
    assert "bilinearity" in {law for site in report.sites for law in site.laws}


def test_columns_that_lie_apart_are_not_read_so() -> None:
    """A gate whose features are not side by side."""
    torch.manual_seed(0)
    made, (x, _) = Late().double(), inputs(2, SAMPLE)
    gate = torch.randn(2 * D, 2, dtype=torch.float64).t()

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        return made.second(made.first(x) * gate[:, None])  # type: ignore[no-any-return]

    found, reports = compiled(gated, x, gate, run=False)
    assert error(found, gated(x, gate)) < 1e-10 and not any(map(tokens, reports))
