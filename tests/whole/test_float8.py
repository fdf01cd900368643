"""Training with linear layers in 8 bits: the Regions and passes of whole blocks, and outputs and gradients that are as
near to float64's as Inductor's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import strict_reference
from float8_layers import BLOCKS, E4M3, INNER, RECIPES, WIDTH, Linear, Mlp, by, by_row, errors, exact, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coda_inductor.core.elementwise import Output
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report, Site
from coda_inductor.passes.casts import FAST

BATCH, LENGTH = 2, 56
OPTIONS: dict[str, Any] = {"target": "reference", "strict": True}
ALONE = {"only": "tables"}

# The one place to change when more is derived: M x N x K of each product, dtypes, reductions.
REGIONS = {
    ("rowwise", "mlp"): """112x128x64+64 e4m3@e4m3 fast max M, max N
112x64x128 e4m3@e4m3 fast
112x128x64 e4m3@e4m3 max M, max M, max N, max N
64x128x112 e4m3@e4m3
112x64x128 e4m3@e4m3
128x64x112 e4m3@e4m3
112x64x128 e4m3@e4m3 sum M
128x64x112 e4m3@e4m3""",
    ("rowwise", "gpt"): """112x128x64 e4m3@e4m3 fast max M, max N
112x64x128 e4m3@e4m3 fast
112x128x64 e4m3@e4m3 max M, max N, sum M
64x128x112 e4m3@e4m3
112x64x128 e4m3@e4m3 sum M, sum M
128x64x112 e4m3@e4m3""",
    ("tensorwise", "mlp"): """112x128x64+64 e4m3@e4m3 fast max N
112x64x128 e4m3@e4m3 fast
112x128x64 e5m2@e4m3 max N, max N
112x64x128 e5m2@e4m3 sum M""",
    ("tensorwise", "gpt"): """112x128x64 e4m3@e4m3 fast max N
112x64x128 e4m3@e4m3 fast
112x128x64 e5m2@e4m3 max N, sum M
112x64x128 e5m2@e4m3 sum M, sum M""",
    ("rowwise_with_gw_hp", "mlp"): """112x128x64+64 e4m3@e4m3 fast max N
112x64x128 e4m3@e4m3 fast
112x128x64 e4m3@e4m3 max N, max N
112x64x128 e4m3@e4m3
112x64x128 e4m3@e4m3 sum M""",
    ("rowwise_with_gw_hp", "gpt"): """112x128x64 e4m3@e4m3 fast max N
112x64x128 e4m3@e4m3 fast
112x128x64 e4m3@e4m3 max N, sum M
112x64x128 e4m3@e4m3 sum M, sum M""",
}
PASSES: dict[tuple[str, str], dict[str, int]] = {
    ("rowwise", "mlp"): {"e4m3 e4m3.T": 4, "e4m3.T": 4, "max M max N": 5},
    ("rowwise", "gpt"): {"e4m3 e4m3.T": 3, "e4m3.T": 3, "max M max N": 4},
    ("tensorwise", "mlp"): {"e4m3 e4m3.T": 1, "e5m2 e5m2.T": 3, "e4m3.T": 4},
    ("tensorwise", "gpt"): {"e4m3 e4m3.T": 1, "e5m2 e5m2.T": 2, "e4m3.T": 3},
    ("rowwise_with_gw_hp", "mlp"): {"e4m3.T": 3},
    ("rowwise_with_gw_hp", "gpt"): {"e4m3.T": 2},
}


each_recipe = pytest.mark.parametrize("recipe", [pytest.param(r, marks=by_row if "row" in r else ()) for r in RECIPES])
each_block = pytest.mark.parametrize("block", BLOCKS)


def described(site: Site) -> str:
    """A Region's products, and what is taken of what it makes."""
    region = site.region
    products = f"{site.m}x{region.n}x" + "+".join(str(p.k) for p in region.products)
    taken = [", ".join(sorted(f"{r.of} {r.over}" for r in region.reductions))] if region.reductions else []
    return " ".join([products, "@".join(region.dtypes), *["fast"] * region.fast, *taken])


def regions(recipe: str, block: str) -> list[str]:
    """What is wanted, as `described`."""
    return REGIONS[recipe, block].split("\n")


def left(report: Report) -> dict[str, int]:
    """What the passes leave, and how many leave it: a tensor, transposed or not, or the largest over M or N."""

    def said(o: Output) -> str:
        return f"max {o.over}" if o.over else o.dtype + ".T" * o.transposed

    return Counter(" ".join(sorted(map(said, p.record.outputs))) for p in report.elementwise)


def drawn(model: nn.Module, seed: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Draws the model's parameters; an input, and the output's gradient."""
    torch.manual_seed(seed)
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    x, grad = (torch.randn(batch, LENGTH, WIDTH).bfloat16() for _ in range(2))
    return x, grad


def off(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, grad: Tensor) -> list[float]:
    """The errors of the output and of all gradients."""
    true = exact(model)
    return errors(step(run, x, model, grad), step(true, x.double(), true, grad.double()))


def ratios(mine: list[list[float]], theirs: list[list[float]]) -> list[float]:
    """Of each tensor's errors, added up over the seeds."""
    return [sum(a) / sum(b) for a, b in zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)]


@cache
def by_inductor(recipe: str, block: str) -> list[list[float]]:
    """Inductor's own errors, for each of five seeds."""
    model = by(recipe, BLOCKS[block]())
    torch._dynamo.reset()
    return [off(torch.compile(model, backend="inductor"), model, *drawn(model, seed)) for seed in range(5)]


@pytest.mark.sampled
@pytest.mark.parametrize("numerics", ["", "strict"])
@each_block
@each_recipe
def test_gradients_are_about_as_exact_as_inductors(recipe: str, block: str, numerics: str) -> None:
    """Over five seeds: on average, and of each tensor."""
    theirs = by_inductor(recipe, block)
    model = by(recipe, BLOCKS[block]())
    options = OPTIONS | ({"numerics": numerics} if numerics else {})
    with strict_reference(run=False):
        run = torch.compile(model, backend="coda", options=options)
        about_as_exact([off(run, model, *drawn(model, seed)) for seed in range(5)], theirs)


def about_as_exact(mine: list[list[float]], theirs: list[list[float]]) -> None:
    """The tensors' errors, of each seed."""
    found = ratios(mine, theirs)
    assert sum(found) / len(found) <= 1.05 and max(found) <= 1.25, found


def near_eagers(model: nn.Module, x: Tensor, grad: Tensor, **options: Any) -> Report:
    """Compiles; the output and all gradients against eager's."""
    with strict_reference(run=False):
        REPORTS.clear()
        run = torch.compile(model, backend="coda", options=OPTIONS | options)
        about_as_exact([off(run, model, x, grad)], [off(model, model, x, grad)])
    (report,) = REPORTS
    return report


@pytest.mark.sampled
@each_block
@each_recipe
def test_regions_and_passes(recipe: str, block: str) -> None:
    """SwiGLU is of two products, with the largest values of what it makes, and its gradient has those of two tensors; a
    norm's gain gets its gradient from a product's epilogue."""
    model = by(recipe, BLOCKS[block]())
    report = near_eagers(model, *drawn(model, 0))
    assert [described(site) for site in report.sites] == regions(recipe, block)
    assert left(report) == PASSES[recipe, block]
    for region in (site.region for site in report.sites):  # as it is stored
        made = {let.name: let.op for let in region.lets}
        assert all(made[r.value] == "bf16" for r in region.reductions if r.of == "max")


@each_recipe
def test_all_products_add_up_fast_where_allowed(recipe: str) -> None:
    """The same Regions, and a line of the report for each product that asked for slow sums."""
    model = by(recipe, Mlp())
    report = near_eagers(model, *drawn(model, 0), numerics="fast")
    wanted = [line.replace(" fast", "") for line in regions(recipe, "mlp")]
    assert all(site.region.fast for site in report.sites if "e4m3" in described(site))
    assert [described(site).replace(" fast", "") for site in report.sites] == wanted
    slow = (
        3 if recipe == "rowwise_with_gw_hp" else 6
    )  # two for each of three layers, but weights' gradients in bfloat16
    assert Counter(c.what for c in report.casts)[FAST] == slow


def test_a_graph_of_which_only_the_sums_change_is_rewritten() -> None:
    """No Region is asked for, and Inductor calls the product."""

    def product(a: Tensor, b: Tensor, one: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    a, b = (torch.randn(320, 64).to(E4M3) for _ in range(2))
    for numerics, changed in (("default", False), ("fast", True), ("strict", False)):
        with strict_reference(run=False):
            REPORTS.clear()
            torch.compile(product, backend="coda", options=OPTIONS | ALONE | {"numerics": numerics})(
                a, b, torch.ones(())
            )
        (report,) = REPORTS
        assert (report.rewrote, len(report.casts), len(report.sites)) == (changed, int(changed), 0)


@each_recipe
def test_every_rounding_is_kept_where_asked(recipe: str) -> None:
    """No Region is lost by it. Passes take the largest of rows and columns, which Regions take otherwise."""
    model = by(recipe, Mlp())
    report = near_eagers(model, *drawn(model, 0), numerics="strict")
    largest = {"max M max N": 8} if recipe == "rowwise" else {}
    assert len(report.sites) >= len(regions(recipe, "mlp")) and left(report) == PASSES[recipe, "mlp"] | largest


@by_row
def test_any_number_of_rows() -> None:
    """One graph for two batches. Passes are left for weights: transposed, rows of others may end anywhere."""
    model = by("rowwise", Mlp())
    with strict_reference(run=False):
        REPORTS.clear()
        run = torch.compile(model, backend="coda", options=OPTIONS, dynamic=True)
        for batch in (2, 4):
            x, grad = drawn(model, batch, batch)
            about_as_exact([off(run, model, x, grad)], [off(model, model, x, grad)])
    (report,) = REPORTS
    assert left(report) == {"e4m3.T": 3, "max M max N": 3}
    assert [len(site.region.products) for site in report.sites][:3] == [2, 1, 1]
    assert "max N" in described(report.sites[0]) and "max N" in described(report.sites[2])


@each_recipe
def test_gradients_add_up(recipe: str) -> None:
    """Two calls before the gradients are read."""
    model = by(recipe, Mlp())
    (x, grad), true = drawn(model, 0), exact(model)
    found: list[list[Tensor]] = []
    with strict_reference(run=False):
        for run, of in ((torch.compile(model, backend="coda", options=OPTIONS), model), (model, model), (true, true)):
            of.zero_grad()
            for i in (1, -2):
                dtype = next(of.parameters()).dtype
                run((x * i).to(dtype)).backward(grad.to(dtype))
            found.append([p.grad for p in of.parameters() if p.grad is not None])
    mine, theirs = (errors(some, found[2]) for some in found[:2])
    assert len(mine) == 4
    about_as_exact([mine], [theirs])


class Tied(nn.Module):
    """One weight in two products of a tile, and each once more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(WIDTH, INNER, bias=False), Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.up(h)) * self.up(h))  # type: ignore[no-any-return]


@each_recipe
def test_a_weight_that_is_used_twice(recipe: str) -> None:
    model = by(recipe, Tied())
    report = near_eagers(model, *drawn(model, 0))
    assert len(report.sites) >= 7 and report.elementwise


@each_recipe
def test_frozen_weights(recipe: str) -> None:
    """Of the gate and of the norm: no gradient of them, so fewer products, and fewer sums over tokens."""
    model = by(recipe, Mlp())
    for name, p in model.named_parameters():
        p.requires_grad_("gate" not in name and "gain" not in name)
    sites = near_eagers(model, *drawn(model, 0)).sites
    assert len(sites) == len(regions(recipe, "mlp")) - (recipe == "rowwise")
    assert not [site for site in sites if "sum" in described(site)]


class Checkpointed(nn.Module):
    """Two blocks that are run again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for make in BLOCKS.values())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.sampled
@each_recipe
def test_checkpointed_blocks(recipe: str) -> None:
    model = by(recipe, Checkpointed())
    report = near_eagers(model, *drawn(model, 0))
    assert len(report.sites) >= sum(len(regions(recipe, block)) for block in BLOCKS) and report.elementwise


@each_block
@each_recipe
def test_torchaos_own_layers(recipe: str, block: str) -> None:
    """Where torchao is installed: the same bits by eager, and the same Regions and passes."""
    convert = pytest.importorskip("torchao.float8")
    mine, theirs = by(recipe, BLOCKS[block]()), BLOCKS[block](nn.Linear).bfloat16()
    x, grad = drawn(mine, 0)
    theirs.load_state_dict(mine.state_dict())
    convert.convert_to_float8_training(theirs, config=convert.Float8LinearConfig.from_recipe_name(recipe))
    true = exact(mine)
    wanted, eager = step(true, x.double(), true, grad.double()), step(mine, x, mine, grad)
    assert all(map(torch.equal, eager, step(theirs, x, theirs, grad)))
    with strict_reference(run=False):
        REPORTS.clear()
        run = torch.compile(theirs, backend="coda", options=OPTIONS)
        about_as_exact([errors(step(run, x, theirs, grad), wanted)], [errors(eager, wanted)])
    (report,) = REPORTS
    assert [described(site) for site in report.sites] == regions(recipe, block)
    assert left(report) == PASSES[recipe, block]
