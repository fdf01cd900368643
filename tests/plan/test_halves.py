"""Rotary embeddings in epilogues: which values are halves of heads, what is read beside them, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_cases import rotary, rotary_tables
from compiling import REFERENCE, close, run
from torch import Tensor, fx, nn
from zoo import Decoder, Shape, token_ids

from coda_inductor.codegen import legality
from coda_inductor.codegen.target import SM_90A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import Let, Region, Store
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import show
from coda_inductor.core.verify import verify
from coda_inductor.explain import explain
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.records import Report
from coda_inductor.patterns.terms import Terms
from coda_inductor.plan.built import Built
from coda_inductor.plan.draft import Conflict
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.beside import through
from coda_inductor.rewrite.limits import Limits

BATCH, LENGTH, HEADS, SIZE = 2, 6, 3, 8
WIDTH = HEADS * SIZE
HALF = SIZE // 2
STRICT = REFERENCE | {"strict": True}

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def heads(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b).view(BATCH, LENGTH, -1, SIZE).transpose(1, 2)


def turned(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers spells it."""
    a, b = q.chunk(2, -1)
    return q * cos + torch.cat((-b, a), -1) * sin


def anew(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As many others do, of angles for one half."""
    a, b = q.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def angles(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.arange(LENGTH, dtype=dtype)[:, None] * 0.3 ** torch.arange(HALF, dtype=dtype)


def in_graph(q: Tensor) -> tuple[Tensor, Tensor]:
    once = angles(q.dtype)
    twice = torch.cat((once, once), -1)
    return twice.cos() * 1.0, twice.sin() * 1.0


Inputs = dict[str, Tensor]


def inputs() -> Inputs:
    torch.manual_seed(0)
    return {
        "x": drawn(BATCH, LENGTH, WIDTH), "w": drawn(WIDTH, WIDTH), "one": drawn(SIZE, WIDTH), "b": drawn(WIDTH),
        "cos": drawn(LENGTH, SIZE), "sin": drawn(LENGTH, SIZE), "half": drawn(LENGTH, HALF), "h": drawn(SIZE),
        "all": drawn(BATCH, 1, LENGTH, SIZE), "split": drawn(LENGTH, 2, HALF),
    }  # fmt: skip


HALVED: dict[str, tuple[Callable[[Inputs], Any], int]] = {
    "given tables": (lambda i: turned(heads(i["x"], i["w"]), i["cos"], i["sin"]), 2),
    "computed tables": (lambda i: turned(heads(i["x"], i["w"]), *in_graph(i["x"])), 1),
    "one table for both": (lambda i: turned(heads(i["x"], i["w"]), i["cos"], i["cos"]), 1),
    "put together anew": (lambda i: anew(heads(i["x"], i["w"]), i["half"], i["half"].sin()), 1),
    "halves swapped": (lambda i: anew(heads(i["x"], i["w"]).flip(1), i["half"], i["half"].sin()), 0),
    "bias": (lambda i: turned(heads(i["x"], i["w"], i["b"]), i["cos"], i["sin"]), 2),
    "one head": (lambda i: turned(heads(i["x"], i["one"], i["h"]), i["cos"], i["sin"]), 2),
    "tables of each sample": (lambda i: turned(heads(i["x"], i["w"]), i["all"], i["all"].exp()), 2),
    "three dimensions": (lambda i: turned(heads(i["x"], i["w"]), i["split"].flatten(1), i["cos"]), 2),
    "heads stay behind tokens": (
        lambda i: turned(heads(i["x"], i["w"]).transpose(1, 2), i["cos"][:, None], i["sin"][:, None]), 2,
    ),
    "another order in memory": (lambda i: turned(heads(i["x"], i["w"]), i["cos"], i["sin"]).contiguous() + 0.0, 2),
    "after a norm": (
        lambda i: turned(heads(F.rms_norm(i["x"] @ i["w"] + i["x"], (WIDTH,)), i["w"]), i["cos"], i["sin"]), 2,
    ),
    "no table": (lambda i: (lambda q: (q * torch.cat(q.chunk(2, -1)[::-1], -1)).tanh())(heads(i["x"], i["w"])), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", HALVED)
def test_it_is_made_in_the_epilogue(name: str) -> None:
    """Exactly, of as few tables as may be."""
    f, count = HALVED[name]
    given = inputs()
    ran = run(f, given, options=STRICT)
    close(ran.output, f(given))
    regions = [site.region for report in ran.reports for site in report.sites if site.region.half]
    if name == "halves swapped":  # heads in another order are not rows of the weight as they lie
        assert not regions
        return
    assert [r.half for r in regions] == [HALF]
    assert sum(o.extent == "table" for o in regions[0].operands) == count


def cast_elsewhere(i: Inputs) -> Any:
    return turned(heads(i["x"].float(), i["w"].float()), i["cos"].float(), i["sin"].float()), i[
        "cos"
    ].float().bfloat16()


def cast_for_it(i: Inputs) -> Any:
    cos, sin = (i[name].bfloat16().float().exp().bfloat16() for name in ("cos", "sin"))
    return turned(heads(i["x"].bfloat16(), i["w"].bfloat16()), cos, sin)


@pytest.mark.parametrize(("f", "dtype"), [(cast_elsewhere, "f32"), (cast_for_it, "bf16")])
def test_tables_are_those_that_the_user_goes_on_with(f: Callable[[Inputs], Any], dtype: str) -> None:
    given = inputs()
    given = {k: v.float() for k, v in given.items()}
    ran = run(f, given, options=STRICT)
    (region,) = (site.region for report in ran.reports for site in report.sites)
    assert {o.dtype for o in region.operands} == {dtype}
    wanted, found = (y[0] if isinstance(y, tuple) else y for y in (f(given), ran.output))
    assert (wanted - found).norm() < 1e-2 * wanted.norm()
    if dtype == "f32":
        assert (wanted - found).norm() < 1e-6 * wanted.norm()


def half_of_zeros(i: Inputs) -> Tensor:
    a, b = heads(i["x"], i["w"]).chunk(2, -1)
    return torch.cat((a * b, torch.zeros_like(a)), -1)


def both_forms(i: Inputs) -> Any:
    q = heads(i["x"], i["w"])
    return turned(q, i["cos"], i["sin"]), q.relu()


def repeated_bias(i: Inputs) -> Tensor:
    """Its halves are equal, those of its heads are not."""
    return turned(heads(i["x"], i["w"], torch.cat([i["b"][: WIDTH // 2]] * 2)), i["cos"], i["sin"])


@pytest.mark.parametrize("f", [half_of_zeros, both_forms, repeated_bias])
def test_others_are_right_all_the_same(f: Callable[[Inputs], Any]) -> None:
    given = inputs()
    ran, wanted = run(f, given, options=STRICT), f(given)
    for found, want in zip(*((y if isinstance(y, tuple) else (y,)) for y in (ran.output, wanted)), strict=True):
        close(found, want)
    assert not any(site.region.half for report in ran.reports for site in report.sites)


def test_they_can_be_switched_off() -> None:
    """The other Regions are those that there were without them."""
    model, ids = Decoder(Shape(rope=True)).double().eval(), token_ids()
    with torch.no_grad():
        wanted = model(ids)
    for options, count, halved in (
        ({}, 12, 4),
        ({"disable": "halves"}, 10, 0),
        ({"only": "pointwise,statistic,pair"}, 10, 0),
    ):
        ran = run(model, ids, options=STRICT | options)
        close(ran.output, wanted)
        assert (ran.regions, sum(bool(site.region.half) for site in ran.reports[0].sites)) == ([count], halved)
        said = [r for r in ran.reports[0].refused if "'halves' are switched off" in r.reason]
        assert bool(said) is (halved == 0) and all("zoo.py" in r.source for r in said)


def test_why_a_product_does_without_is_said() -> None:
    """What is left to Inductor then was measured; its form was not the reason."""
    reports = list[Report]()

    def slower(plan: Plan, builts: list[Built]) -> Limits:
        bits = [acc.bit for b in builts if b.region.half for acc in b.draft.space.accs]
        return Limits({bit: f"measured slower: {bit}" for bit in bits})

    def rewritten(graph: fx.Graph, settings: Settings) -> Report:
        reports.append(rewrite_for(graph, settings, slower))
        return reports[-1]

    model = Decoder(Shape(rope=True)).double().eval()
    explain(model, (token_ids(),), {}, "infer", Settings(target="reference"), rewritten)
    (report,) = reports
    reasons = {r.reason for r in report.refused}
    assert report.sites and not any(site.region.half for site in report.sites)
    assert sum("measured slower" in why for why in reasons) == 4
    assert not any("two halves" in why for why in reasons)


class Layer(nn.Module):
    """From attention's result to the next attention, in training."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size = size
        self.o, self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def heads(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        h = x + self.o(y)
        n = F.rms_norm(h, h.shape[-1:], self.gain, 1e-5)
        q, k, v = (f(n).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return h, turned(q, cos, sin), turned(k, cos, sin), v

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        h, q, k, v = self.heads(*given)
        return h, F.scaled_dot_product_attention(q, k, v)


class Grouped(Layer):
    """With one head of keys and of values for several of queries, each given to attention as often as it is read."""

    def __init__(self, width: int, size: int, group: int) -> None:
        super().__init__(width, size)
        self.group = group
        self.k, self.v = (nn.Linear(width, width // group, bias=False) for _ in range(2))

    def heads(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        h, q, *keys_and_values = super().heads(x, y, cos, sin)
        return h, q, *(t[:, :, None].expand(-1, -1, self.group, -1, -1).flatten(1, 2) for t in keys_and_values)


@pytest.mark.sampled
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("group", [1, HEADS])
def test_gradients(dynamic: bool, group: int) -> None:
    model = (Layer(WIDTH, SIZE) if group == 1 else Grouped(WIDTH, SIZE, group)).double()
    for batch in (2, 3):
        given = [drawn(batch, LENGTH, WIDTH).requires_grad_() for _ in "xy"] + [drawn(LENGTH, SIZE) for _ in "cs"]
        compiled = torch.compile(model, backend="coda", options=STRICT, dynamic=dynamic)
        found, wanted = compiled(*given), model(*given)
        weights = [torch.randn_like(t) for t in wanted]
        over = [*given[:2], *model.parameters()]
        for a, b in zip(
            (*found, *torch.autograd.grad(found, over, weights)),
            (*wanted, *torch.autograd.grad(wanted, over, weights)),
            strict=True,
        ):
            assert float((a - b).detach().abs().max()) < 1e-10


def test_the_first_layers_gradient_hides_no_features() -> None:
    """It multiplies with an input of the graph, as a product does with its weight."""
    given = inputs()
    w, x = nn.Parameter(given["w"]), given["x"]
    ran = run(lambda: turned(heads(x, w), given["cos"], given["sin"]), grad=True, options=STRICT)
    assert [site.region.half for report in ran.reports for site in report.sites] == [HALF]
    wanted = turned(heads(x, w), given["cos"], given["sin"])
    weights = torch.randn_like(wanted)
    pair = [torch.autograd.grad(y, w, weights)[0] for y in (ran.output, wanted)]
    assert float((pair[0] - pair[1]).abs().max()) < 1e-10


def test_one_pass_is_left_of_a_layer() -> None:
    """Beside attention's backward, with the statistics of q, k and v in it. Of a forward none."""
    model = Layer(512, 128).bfloat16()
    x, table = torch.randn(2, 1024, 512, dtype=torch.bfloat16), torch.randn(1024, 128, dtype=torch.bfloat16)
    args = (x.requires_grad_(), x.detach().clone().requires_grad_(), table, table.sin())
    for mode, left in (("infer", 0), ("train", 1)):
        report = explain(model, args, {}, mode, Settings(target="sm_90a"))  # type: ignore[arg-type]
        assert report["totals"]["passes_left"] == left
        loads = [r["loads"] for g in report["graphs"] for r in g["regions"] if "first 64 of 128" in r["products"][0]]
        assert loads == [["f32[2048]", "bf16[2048, 128]", "bf16[2048, 128]"]] * 2


def test_grouped_keys_are_not_kept_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the adjoint their statistic is a sum over what attention read and the gradients that the group adds up, so
    that the backward wants no key as it was: no second way to lay it out, and one plan."""
    conflicts = list[Any]()
    monkeypatch.setattr(Conflict, "__init__", lambda self, **said: conflicts.append(said))
    model = Grouped(512, 128, 2).bfloat16()
    x, table = torch.randn(2, 1024, 512, dtype=torch.bfloat16), torch.randn(1024, 128, dtype=torch.bfloat16)
    args = (x.requires_grad_(), x.detach().clone().requires_grad_(), table, table.sin())
    report = explain(model, args, {}, "train", Settings(target="sm_90a"))
    products = [r["products"][0] for g in report["graphs"] for r in g["regions"]]
    assert sum("first 64 of 128" in p for p in products) == 2
    assert not conflicts


def test_layers_are_alike_whatever_is_derived_first() -> None:
    """One Region is q and k of all layers, in training, where the adjoint looks at them first, as in inference."""
    model, ids = Decoder(Shape(rope=True)).double(), token_ids()
    reports = [
        r
        for grad in (True, False)
        for r in run(model, ids, grad=grad, options=STRICT | {"disable": "bilinearity"}).reports
    ]
    halved = [site.region.digest for report in reports for site in report.sites if site.region.half]
    assert len(halved) == 8 and len(set(halved)) == 1


def test_the_adjoint_counts_no_half_twice() -> None:
    """A value whose two halves are one would add up to twice the sum."""
    terms = Terms()
    f, c, s = terms.leaf("f", [0, 2]), terms.leaf("c", [2]), terms.leaf("s", [2])
    con = terms.con(terms.leaf("a", [0, 9]), terms.leaf("w", [9, 1, 2]), (9,), 0)
    image = terms.add(terms.mul(c, terms.select(con, 1, 0)), terms.mul(s, terms.select(con, 1, 1)))
    z, twice, images = (
        terms.cat((1,), {1: 2}, list(pair)) for pair in ((terms.mul(f, c), terms.mul(f, s)), (f, f), (image, image))
    )
    axes = SimpleNamespace(size={1: SimpleNamespace(static=2)})
    reading = SimpleNamespace(roots=lambda node: ((0,), (1,), (2,)), axes=axes)
    nodes = {z: ["z"], twice: ["twice"], images: ["images"]}
    program: Any = SimpleNamespace(lifted=SimpleNamespace(terms=terms, reading=reading), nodes=nodes)
    assert through(program, z, con, (1, 2)) is None


def changed(region: Region, **fields: Any) -> Region:
    return dataclasses.replace(region, **fields)


def test_what_a_well_formed_region_of_halves_is() -> None:
    region = rotary(256, 64)
    first, second = region.products
    for wrong, said in (
        (changed(region, half=0), "without halves"),
        (changed(region, half=80), "no multiple"),
        (changed(region, products=(first,)), "not of one weight"),
        (changed(region, products=(first, dataclasses.replace(second, b=2))), ""),
        (changed(region, stores=(Store("xc", "bf16"),)), "two values"),
        (changed(region, lets=(*region.lets, Let("z", "add", ("table", 1.0)))), "only pairs"),
        (changed(region, lets=(*region.lets, Let("z", "first", ("a",)))), "only pairs"),
    ):
        with pytest.raises(BrokenInvariant, match=said):
            verify(wrong)
    assert region.width == 2 * region.n
    assert "in0 @ in1.T[:, first 64 of 128]" in show(region) and f"[M, {region.width}]" in show(region)


def test_which_tiles_fit_heads() -> None:
    """A block of a cluster loads whole heads or an even part of one; only heads that were tried are built."""
    for half, config, fits in (
        (64, Config(128, 128, 2, 1, True), True),
        (64, Config(128, 192, 1, 1, True), False),
        (32, Config(128, 192, 1, 1, True), True),
        (32, Config(128, 192, 2, 1, True), False),
        (128, Config(128, 64, 1, 1, False), True),
    ):
        assert legality.is_legal(rotary(4096, 4096, half), config) is fits
    for half in (16, 48, 40):
        with pytest.raises(Unsupported, match=f"heads of {2 * half}"):
            legality.check(rotary_tables(4096, 4096, half))
    assert {c.tile_n for c in legality.candidates(rotary(4096, 4096), 8192)} == {128}
    assert legality.candidates(rotary(4096, 4096), 8192)[0] == SM_90A.heads[0]


def test_a_symbolic_width_adds_no_guard() -> None:
    """With dynamic=True the width of a weight that is given is a symbol, and so is how many heads it makes."""

    def f(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = F.linear(x, w).view(*x.shape[:2], -1, SIZE).transpose(1, 2).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x, w = drawn(2, LENGTH, WIDTH).requires_grad_(), drawn(3 * SIZE, WIDTH).requires_grad_()
    cos, sin = drawn(SIZE // 2), drawn(SIZE // 2)
    torch._dynamo.reset()
    found, wanted = torch.compile(f, backend="coda", options=STRICT, dynamic=True)(x, w, cos, sin), f(x, w, cos, sin)
    weights = torch.randn_like(wanted)
    pairs = [torch.autograd.grad(y, (x, w), weights) for y in (found, wanted)]
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
