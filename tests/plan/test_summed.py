"""Two products in one sum: which epilogues take another product into their accumulator, and how it is launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_cases import random_inputs, summed, summed_norm_backward
from compiling import REFERENCE, close, run
from evaluate import captured
from torch import Tensor, nn
from zoo import Decoder, Shape, token_ids

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region, parse
from coda_inductor.core.settings import Settings
from coda_inductor.core.text import show
from coda_inductor.inductor.joint import rewrite
from coda_inductor.inductor.records import Report
from coda_inductor.kernels import executable
from coda_inductor.kernels.executable import Executable, Parts
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.verdicts import Decisions, Legal

STRICT = REFERENCE | {"strict": True}
TILE = Config(128, 128, 1, 2, True)

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def given() -> dict[str, Tensor]:
    """Two left operands and a third, with weights of both layouts; `tall` sums over more."""
    shapes = {"x": (300, 16), "y": (300, 16), "z": (300, 16), "w": (16, 24), "v": (16, 24), "u": (16, 24)}
    return {name: drawn(*shape) for name, shape in (shapes | {"wt": (24, 16), "tall": (300, 8), "t": (8, 24)}).items()}


GRAPHS: dict[str, tuple[Callable[..., Any], int]] = {
    "added": (lambda i: (i["x"] @ i["w"] + i["y"] @ i["v"]).relu(), 1),
    "and nothing else": (lambda i: i["x"] @ i["w"] + i["y"] @ i["v"], 1),
    "of linear layers": (lambda i: F.linear(i["x"], i["wt"]).add(F.linear(i["y"], i["wt"] + 1)).relu(), 1),
    "both taken away": (lambda i: (-(i["x"] @ i["w"]) - i["y"] @ i["v"]).relu(), 1),
    "a number between them": (lambda i: (1 - i["x"] @ i["w"] - i["y"] @ i["v"]).relu(), 0),
    "of three": (lambda i: (i["x"] @ i["w"] + i["y"] @ i["v"] + i["z"] @ i["u"]).relu(), 1),
    "twice, in one sum": (lambda i: ((s := i["x"] @ i["w"] + i["y"] @ i["v"]).relu(), s.tanh()), 1),
    "one taken away": (lambda i: (i["x"] @ i["w"] - i["y"] @ i["v"]).relu(), 0),
    "one doubled": (lambda i: (i["x"] @ i["w"] + 2 * (i["y"] @ i["v"])).relu(), 0),
    "one through more": (lambda i: ((i["x"] @ i["w"]).tanh() + i["y"] @ i["v"]).relu(), 0),
    "the other read as well": (lambda i: ((p := i["x"] @ i["w"]), (p + i["y"] @ i["v"]).relu()), 0),
    "its tile read as well": (lambda i: ((p := i["x"] @ i["w"]).t(), (p + i["y"] @ i["v"]).relu()), 0),
    "read by a loop that stays": (lambda i: (((p := i["x"] @ i["w"]) * 2).softmax(1), (p + i["y"] @ i["v"]).relu()), 0),
    "read by a sum that stays": (lambda i: ((p := i["x"] @ i["w"]).tanh().amax(1), (p + i["y"] @ i["v"]).relu()), 0),
    "of a weight and its view": (lambda i: (i["x"] @ i["w"] + i["y"] @ i["w"].view(16, 24)).relu(), 0),
    "of a slice, twice": (lambda i: (i["x"] @ i["big"][:16] + i["y"] @ i["big"][0:16, :]).relu(), 0),
    "of two slices": (lambda i: (i["x"] @ i["big"][:16] + i["y"] @ i["big"][16:]).relu(), 1),
    "and multiplied": (lambda i: ((p := i["x"] @ i["w"]) + i["y"] @ i["v"]) * p, 0),
    "the first again": (lambda i: (i["x"] @ i["w"] + (q := i["y"] @ i["v"])).relu() * q, 0),
    "other depths": (lambda i: (i["tall"] @ i["t"] + i["y"] @ i["v"]).relu(), 1),
    "of parts of one weight": (lambda i: (i["x"] @ i["big"][:16] + i["tall"] @ i["big"][16:24]).relu(), 1),
    "of parts of its rows": (lambda i: (i["x"] @ i["long"][:, :16].t() + i["tall"] @ i["long"][:, 16:].t()).relu(), 1),
    "of a part and a whole": (lambda i: (i["x"] @ i["long"][:, :16].t() + i["y"] @ i["wt"].t()).relu(), 0),
    "of one depth first": (lambda i: (i["tall"] @ i["t"] + i["x"] @ i["w"] + i["z"] @ i["u"]).relu(), 1),
    "other layouts": (lambda i: (i["x"] @ i["wt"].t() + i["y"] @ i["v"]).relu(), 0),
    "of one left operand": (lambda i: (i["x"] @ i["w"] + i["x"] @ i["v"]).relu(), 0),
    "of one weight": (lambda i: (i["x"] @ i["w"] + i["y"] @ i["w"]).relu(), 0),
    "an operand with gaps": (lambda i: (i["x"] @ i["w"] + i["gaps"] @ i["v"]).relu(), 0),
}


def sums(regions: list[Region]) -> int:
    return sum(r.summed for r in regions)


@pytest.mark.parametrize("name", GRAPHS)
def test_which_products_meet_in_one_accumulator(name: str) -> None:
    function, wanted = GRAPHS[name]
    inputs = given() | {"gaps": drawn(300, 40)[:, :16], "big": drawn(32, 24), "long": drawn(24, 24)}

    def called(*tensors: Tensor) -> Any:
        return function(dict(zip(inputs, tensors, strict=True)))

    ran = run(called, *inputs.values(), options=STRICT)
    found, right = ran.output, function(inputs)
    for mine, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, right)), strict=True):
        close(mine, theirs)
    assert sums([site.region for report in ran.reports for site in report.sites]) == wanted


@pytest.mark.parametrize(("numerics", "count"), [("default", 1), ("strict", 0)])
def test_no_products_meet_where_each_rounds(numerics: str, count: int) -> None:
    function, inputs = GRAPHS["added"][0], given()

    def called(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Any:
        return function({"x": x, "w": w, "y": y, "v": v})

    ran = run(called, *(inputs[name] for name in "xwyv"), options=STRICT | {"numerics": numerics})
    assert sums([site.region for report in ran.reports for site in report.sites]) == count


class Attending(nn.Module):
    """Grouped heads behind a norm, and a gated MLP behind another."""

    def __init__(self, keys: int, bias: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(32, eps=1e-5), nn.RMSNorm(32, eps=1e-5)
        self.q, self.v = (nn.Linear(32, n, bias=bias) for n in (32, keys))
        self.k = nn.Linear(32, keys, bias=False)  # its gradient would be 0
        self.o, self.down = nn.Linear(32, 32, bias=False), nn.Linear(48, 32, bias=False)
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        n = self.first(x)
        q, k, v = (w(n).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        n = self.second(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("keys", "bias", "summed"), [(8, False, 0), (16, False, 1), (32, False, 1), (32, True, 0)])
def test_gradients_of_what_two_layers_read_meet_in_one_accumulator(keys: int, bias: bool, summed: int) -> None:
    """Of gate and up, and of keys and values; the queries' then adds to a tile. There the norm's statistic of keys and
    values is `summed` as well, if they are so wide that a pass beside attention would read more (and none reads them
    anyway, for the gradients of biases)."""
    model, x = Attending(keys, bias).double(), drawn(4, 80, 32).requires_grad_()
    ran = run(model, x, grad=True, options=STRICT)
    eager = model(x)
    wanted = torch.autograd.grad(eager.square().sum(), [x, *model.parameters()])
    found = torch.autograd.grad(ran.output.square().sum(), [x, *model.parameters()])
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    regions = [site.region for report in ran.reports for site in report.sites]
    assert sums(regions) == 2
    over_rows = [any(s.over == "N" for s in r.reductions) for r in regions if r.summed]
    assert sum(over_rows) == summed
    texts = [show(r) for r in regions if r.summed]
    assert all(text.count(" @ ") == 2 and "per tile" not in text.split("\n")[1] for text in texts)


def test_one_that_no_kernel_can_do_is_two_products_again() -> None:
    rounds, report = derived(legal=one_product, slower=lambda b: False)
    assert [sums(regions) for regions in rounds] == [0] and len(report.sites) == 1
    assert [o.extent for o in rounds[0][0].operands] == ["tile"]


@pytest.mark.parametrize("again", [False, True])
def test_one_that_loses_may_win_with_nothing_beside_the_sum(again: bool) -> None:
    """If that loses as well, both products are left to Inductor."""
    rounds, report = derived(legal=lambda region: None, slower=lambda b: again or bool(b.region.lets))
    assert [sums(regions) for regions in rounds] == [1, 1, *([0] if again else [])]
    assert [len(r.lets) for r in (rounds[0][0], rounds[1][0])] == [1, 0]
    assert len(report.sites) == (not again) and {r.reason for r in report.refused} == {"measured slower"}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, w, v: ((s := x @ w + y @ v).relu(), s.sum(0)),  # as the gradient of a bias
        lambda x, y, w, v: (2 * (x @ w) + 2 * (y @ v)).relu(),
        lambda x, y, w, v: (-(x @ w) - y @ v).relu(),
    ],
)
def test_whatever_loses_there_is_an_end(function: Callable[..., Any]) -> None:
    """Also where the sum alone is not all that the second round's epilogue does."""
    rounds, report = derived(legal=lambda region: None, slower=lambda b: True, function=function)
    assert len(rounds) <= 4 and not sums(rounds[-1]) and not any(site.region.summed for site in report.sites)


def one_product(region: Region) -> None:
    if region.summed:
        raise Unsupported("a sum of two")


def derived(
    legal: Legal,
    slower: Callable[[Built], bool],
    function: Callable[..., Any] = lambda x, y, w, v: (x @ w + y @ v).relu(),
) -> tuple[list[list[Region]], Report]:
    """The Regions of each round in which `slower` ones lose, and what came of it."""
    rounds = list[list[Region]]()

    def decide(plan: Plan, builts: list[Built]) -> Limits:
        rounds.append([b.region for b in builts])
        return Limits({acc.bit: "measured slower" for b in builts if b.added and slower(b) for acc in b.products})

    (module,) = captured(function, *list(given().values())[:2], *both())
    return rounds, rewrite(module.graph, Settings(target="reference"), decisions=Decisions(legal, decide))


def both() -> list[Tensor]:
    return [drawn(16, 24), drawn(16, 24)]


@pytest.mark.parametrize(("options", "wanted"), [({"disable": "summed"}, 0), ({"only": "summed"}, 1), ({}, 1)])
def test_they_can_be_switched_off(options: dict[str, str], wanted: int) -> None:
    x, y = drawn(300, 16), drawn(300, 16)
    w, v = both()
    ran = run(lambda *i: (i[0] @ i[2] + i[1] @ i[3]).relu(), x, y, w, v, options=STRICT | options)
    close(ran.output, (x @ w + y @ v).relu())
    regions = [site.region for report in ran.reports for site in report.sites]
    assert len(regions) == 1 and sums(regions) == wanted


def test_strict_numerics_round_each_product() -> None:
    ran = run(lambda *i: (i[0] @ i[2] + i[1] @ i[3]).relu(), *(x.bfloat16() for x in (drawn(300, 16), drawn(300, 16))),
              *(x.bfloat16() for x in both()), options=STRICT | {"numerics": "strict"})  # fmt: skip
    assert sums([site.region for report in ran.reports for site in report.sites]) == 0


def test_a_decoder_sums_in_each_layer() -> None:
    model, ids = Decoder(Shape(rope=True)).double(), token_ids()
    ran = run(lambda ids: model(ids).square().sum(), ids, grad=True, options=STRICT)
    assert sums([site.region for report in ran.reports for site in report.sites]) == 4


@pytest.mark.parametrize("k", [64, 96])
def test_depths_that_tiles_divide_are_legal(k: int) -> None:
    region = summed(256, 128)
    region = dataclasses.replace(region, products=(dataclasses.replace(region.products[0], k=k),))
    if k % 64:
        with pytest.raises(Unsupported, match="not a multiple of 64"):
            legality.check(region)
        return
    legality.check(region)
    assert parse(region.text) == region


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("make", [summed, summed_norm_backward])
def test_what_a_kernel_is_told_spans_both_tensors(
    make: Callable[[int, int], Region], a_turned: bool, b_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever lies first: the two products are read back from the addresses, and give the Region's sum."""
    region, asked = make(64, 128), list[tuple[Any, ...]]()
    p = region.products[0]
    inputs = random_inputs(region, 40, "cpu")
    for side, turned in zip(zip(*p.pairs, strict=True), (a_turned, b_turned), strict=True):
        order = side[::-1] if turned else side
        for i, x in zip(order, torch.stack([inputs[j] for j in order]).unbind(), strict=True):
            inputs[i] = x
    fields = (*source.SPANS, "x1", "x2", "x3", "x4", "c", "r0", "r1", "r0w", "r1w", *source.DOORS)
    monkeypatch.setattr(executable, "resident", lambda config: 1)
    kernel = Executable(region, TILE, Parts(lambda *given: asked.append(given), fields, 8, None))
    outs = [torch.empty(40, 64, dtype=DTYPES[s.dtype]) for s in region.stores]
    kernel.prepare(inputs, outs + [torch.empty(0) for _ in region.reductions])(0, 0)
    ((a, b, *_),) = asked
    a_apart, b_apart, *found_turned = asked[0][4][:4]
    assert a_apart > 0 and b_apart > 0 and found_turned == [a_turned, b_turned]
    both = [x.as_strided((2, *x.shape), (apart, *x.stride())) for x, apart in ((a, a_apart), (b, b_apart))]
    both = [x.flip(0) if turned else x for x, turned in zip(both, found_turned, strict=True)]  # by halves of k tiles
    assert (
        all(
            torch.equal(x[i], inputs[j])
            for x, places in zip(both, zip(*p.pairs, strict=True), strict=True)
            for i, j in enumerate(places)
        )
        or region.products[0].a_layout == "km"
    )
    weights = both[1]
    weights = weights.transpose(1, 2) if p.b_layout == "nk" else weights
    found = (both[0].float() @ weights.float()).sum(0)
    plain = dataclasses.replace(region, operands=(), lets=(), stores=(), reductions=region.reductions[-1:])
    plain = dataclasses.replace(plain, stores=(dataclasses.replace(region.stores[0], value="acc", dtype="f32"),))
    torch.testing.assert_close(found, interpret(plain, inputs[: region.matrices])[0])
