"""Norms of each head in epilogues: what is summed over the columns of a head, what is refused, and what it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codegen_cases import head_norm, random_inputs, rotary_norm
from compiling import REFERENCE, close, run
from torch import Tensor, fx, nn

from coda_inductor.codegen import legality
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.heads import over_heads, summand
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Let, Region
from coda_inductor.core.settings import Settings
from coda_inductor.core.verify import verify
from coda_inductor.explain import explain
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.records import Report

BATCH, LENGTH, HEADS, SIZE = 2, 6, 3, 8
WIDTH = HEADS * SIZE
STRICT = REFERENCE | {"strict": True}
Inputs = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("interpreted")


def inputs() -> Inputs:
    torch.manual_seed(0)
    shapes = {
        "x": (BATCH, LENGTH, WIDTH), "w": (WIDTH, WIDTH), "one": (SIZE, WIDTH), "b": (WIDTH,), "g": (SIZE,),
        "cos": (LENGTH, SIZE), "sin": (LENGTH, SIZE), "each": (HEADS, 1, 1), "other": (HEADS, 1, SIZE),
    }  # fmt: skip
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def heads(i: Inputs, weight: str = "w", bias: bool = False) -> Tensor:
    return F.linear(i["x"], i[weight], i["b"] if bias else None).view(BATCH, LENGTH, -1, SIZE).transpose(1, 2)


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def turned(q: Tensor, i: Inputs) -> Tensor:
    a, b = q.chunk(2, -1)
    return q * i["cos"] + torch.cat((-b, a), -1) * i["sin"]


def neighbours(q: Tensor, i: Inputs) -> Tensor:
    a, b = q[..., ::2], q[..., 1::2]
    cos, sin = i["cos"][:, : SIZE // 2], i["sin"][:, : SIZE // 2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def deferred(i: Inputs) -> Inputs:
    return i | {"x": rms(F.linear(i["x"], i["w"]) + i["x"], i["b"])}


IN_EPILOGUE: dict[str, Callable[[Inputs], Any]] = {
    "alone": lambda i: rms(heads(i)),
    "torch's": lambda i: F.rms_norm(heads(i), (SIZE,), i["g"], 1e-6),
    "weight": lambda i: rms(heads(i), i["g"]),
    "1 + weight": lambda i: rms(heads(i), 1 + i["g"]),
    "weights of all heads": lambda i: rms(heads(i), i["other"]),
    "a number for each head": lambda i: rms(heads(i), i["each"]),
    "bias": lambda i: rms(heads(i, bias=True), i["g"]),
    "behind a norm of the row": lambda i: rms(heads(deferred(i)), i["g"]),
    "length": lambda i: heads(i) / (heads(i).square().sum(-1, keepdim=True) + 1e-6).sqrt(),
    "sizes": lambda i: heads(i) / (heads(i).abs().mean(-1, keepdim=True) + 1e-6),
    "two sums": lambda i: heads(i) / (heads(i).square().mean(-1, True) + heads(i).abs().sum(-1, True) + 1e-6),
    "halves": lambda i: turned(rms(heads(i), i["g"]), i),
    "halves of 1 + weight": lambda i: turned(rms(heads(i), 1 + i["g"]), i),
    "halves with a bias": lambda i: turned(rms(heads(i, bias=True), i["g"]), i),
    "halves behind a norm of the row": lambda i: turned(rms(heads(deferred(i)), i["g"]), i),
    "halves of one head": lambda i: turned(rms(heads(i, "one"), i["g"]), i),
    "neighbours": lambda i: neighbours(rms(heads(i), i["g"]), i),
    "and as it was": lambda i: (rms(heads(i), i["g"]), heads(i)),
}


@pytest.mark.parametrize("name", IN_EPILOGUE)
def test_it_is_made_in_the_epilogue(name: str) -> None:
    f, given = IN_EPILOGUE[name], inputs()
    ran, wanted = run(f, given, options=STRICT), f(given)
    pairs = zip(ran.output, wanted, strict=True) if isinstance(wanted, tuple) else [(ran.output, wanted)]
    for found, want in pairs:
        close(found, want)
    regions = [site.region for report in ran.reports for site in report.sites if over_heads(site.region)]
    assert len(regions) == 1 and regions[0].half == (SIZE // 2 if name.startswith(("halves", "neigh")) else 0)


def norm_of_nothing_whole(i: Inputs) -> Tensor:
    """Over half of each head."""
    return rms(heads(i).unflatten(-1, (2, SIZE // 2))[..., 0, :])


OTHERWISE: dict[str, Callable[[Inputs], Any]] = {
    "its mean is subtracted": lambda i: F.layer_norm(heads(i), (SIZE,), i["g"]),
    "behind the rotary embedding": lambda i: rms(turned(heads(i), i), i["g"]),
    "the largest": lambda i: heads(i) / heads(i).abs().amax(-1, keepdim=True),
    "one head": lambda i: rms(heads(i, "one"), i["g"]),
    "over the heads": lambda i: (q := heads(i)) * torch.rsqrt(q.square().mean(1, keepdim=True) + 1e-6),
    "over tokens": lambda i: (q := heads(i)) * torch.rsqrt(q.square().mean(2, keepdim=True) + 1e-6),
    "half of each head": norm_of_nothing_whole,
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_others_are_right_all_the_same(name: str) -> None:
    f, given = OTHERWISE[name], inputs()
    ran = run(f, given, options=STRICT)
    close(ran.output, f(given))
    assert not any(over_heads(site.region) for report in ran.reports for site in report.sites)


def test_of_sums_within_sums_the_inner_is_taken() -> None:
    def f(i: Inputs) -> tuple[Tensor, Tensor]:
        y = rms(heads(i))
        return y, rms(y.tanh(), i["g"])

    given = inputs()
    ran = run(f, given, options=STRICT)
    for found, want in zip(ran.output, f(given), strict=True):
        close(found, want)
    assert [len(over_heads(site.region)) for report in ran.reports for site in report.sites] == [1]


@pytest.mark.parametrize("name", ["halves", "weight"])
def test_training_sums_itself(name: str) -> None:
    """The backward reads the sum and the product as it was: both would be stored beside the result."""
    given = {name: x.requires_grad_() for name, x in inputs().items()}
    f = IN_EPILOGUE[name]
    ran, wanted = run(f, given, options=STRICT, grad=True), f(given)
    close(ran.output, wanted)
    read = [given[name] for name in ("x", "w", "g")]
    seed = torch.randn_like(wanted)
    for found, want in zip(*(torch.autograd.grad(y, read, seed) for y in (ran.output, wanted)), strict=True):
        close(found, want)
    assert not any(over_heads(site.region) for report in ran.reports for site in report.sites)


@pytest.mark.parametrize("name", ["weight", "halves", "halves behind a norm of the row", "neighbours"])
def test_bf16_is_as_close_as_eager(name: str) -> None:
    f, exact = IN_EPILOGUE[name], inputs()
    given = {k: x.bfloat16() for k, x in exact.items()}
    wanted = f({k: x.double() for k, x in given.items()})
    ran = run(f, given, options=STRICT)
    errors = [(y.double() - wanted).norm() for y in (ran.output, f(given))]
    assert errors[0] <= errors[1]
    assert any(over_heads(site.region) for report in ran.reports for site in report.sites)


class Attention(nn.Module):
    """Queries and keys with norms of each head, and fewer heads of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * SIZE, bias=False) for n in (4, 2, 2))
        self.o, self.g, self.h = nn.Linear(4 * SIZE, WIDTH, bias=False), *(nn.Parameter(torch.rand(SIZE)) for _ in "gh")

    def forward(self, x: Tensor, i: Inputs) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = turned(rms(q, self.g), i), turned(rms(k, self.h), i)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_of_normalised_heads(dynamic: bool) -> None:
    given, model = inputs(), Attention().double()
    if dynamic:
        torch._dynamo.mark_dynamic(given["x"], 0)
    with torch.no_grad():
        ran = run(model, given["x"], given, options=STRICT)
        close(ran.output, model(given["x"], given))
    assert sum(bool(over_heads(site.region)) for site in ran.reports[0].sites) == 2


# ---- the record


def test_its_meaning() -> None:
    region = head_norm(192, 16)
    given = [x.double() for x in random_inputs(region, 5, "cpu")]
    a, b, r, bias, weight = given
    exact = dataclasses.replace(region, dtype="f64", stores=(dataclasses.replace(region.stores[0], dtype="f64"),))
    found, *_ = interpret(exact, given)
    x = ((a @ b.t()) * r[:, None] + bias).unflatten(1, (-1, 64))
    close(found, (rms(x).flatten(1) * weight))


def lets(region: Region, **changed: tuple[Any, ...]) -> Region:
    """The Region with other arguments of some statements."""
    new = (dataclasses.replace(let, args=changed.get(let.name, let.args)) for let in region.lets)
    return dataclasses.replace(region, lets=tuple(new))


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (lets(head_norm(192, 16), total=("square", 0.0, 65.0)), "are no heads of 65"),
        (lets(head_norm(192, 16), total=("square", 0.0, 0.5)), "are no heads of 0.5"),
        (lets(head_norm(192, 16), total=("r", 0.0, 64.0)), "a sum over heads of r"),
        (lets(head_norm(192, 16), total=("square", "x", 64.0)), "a sum over heads of square and x"),
        (lets(rotary_norm(256, 16), total=("aa", 0.0, 64.0)), "a sum over heads of aa and 0.0"),
        (lets(rotary_norm(384, 16), total=("aa", "bb", 32.0)), "halves of 64, not of 32"),
    ],
)
def test_malformed_records(region: Region, message: str) -> None:
    with pytest.raises(BrokenInvariant, match=message):
        verify(region)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (lets(rotary_norm(256, 16), aa=("ar", "br")), "mixes their halves"),
        (lets(rotary_norm(256, 16), total=("bb", "aa", 64.0)), "mixes their halves"),
        (lets(rotary_norm(256, 16), bb=("br", 2.0)), "computed otherwise"),
    ],
)
def test_no_kernel_takes_it(region: Region, message: str) -> None:
    """It is said before a kernel is compiled."""
    (total,) = over_heads(region)
    for what in (lambda: summand(region, total), lambda: legality.check(region)):
        with pytest.raises(Unsupported, match=message):
            what()


def test_halves_of_other_vectors() -> None:
    """The first half reads the second half's bias."""
    region = rotary_norm(256, 16)
    region = dataclasses.replace(
        region,
        lets=tuple(dataclasses.replace(let, op="second") if let.name == "bias_a" else let for let in region.lets),
    )
    with pytest.raises(Unsupported, match="mixes their halves"):
        summand(region, over_heads(region)[0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("total", "total"), "a sum over heads within another"),
        (("pair", "pair"), "what a table is in"),
    ],
)
def test_sums_of_what_a_kernel_does_not_know_yet(args: tuple[str, str], message: str) -> None:
    region = rotary_norm(256, 16)
    pair = Let("pair", "first", ("table",)), Let("other", "second", ("table",))
    more = (
        Let("again", "over_head", ("pair", "other", 64.0))
        if "pair" in args
        else Let("again", "over_head", (*args, 64.0))
    )
    region = verify(dataclasses.replace(region, lets=(*region.lets, *pair, more)))
    with pytest.raises(Unsupported, match=message):
        summand(region, more)


class Swiglu(nn.Module):
    """A norm of groups of what two products make together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms((F.silu(self.a(x)) * self.b(x)).unflatten(-1, (-1, 64)))


class Wide(nn.Module):
    """Queries of heads of `size`, perhaps turned, or with keys and values as parts of one product."""

    def __init__(self, size: int, how: str = "") -> None:
        super().__init__()
        self.size, self.how = size, how
        self.o, self.w = nn.Linear(256, 256, bias=False), nn.Linear(256, 8 * size, bias=False)
        self.n, self.g = nn.Parameter(torch.ones(256)), nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, y: Tensor, cos: Tensor) -> Any:
        h = x + self.o(y)
        q = self.w(rms(h, self.n)).unflatten(-1, (-1, self.size))
        if self.how == "packed":
            q, k, v = q.split([4, 2, 2], 2)
            return h, rms(q, self.g), rms(k, self.g), v
        if self.how == "turned first":
            return h, rms(turned(q.transpose(1, 2), {"cos": cos, "sin": cos.sin()}), self.g)
        q = rms(q, self.g)
        return h, turned(q.transpose(1, 2), {"cos": cos, "sin": cos.sin()}) if self.how else q


def derived(model: nn.Module, *args: Tensor) -> list[Region]:
    """The Regions for an H100."""
    found = list[Region]()

    def kept(graph: fx.Graph, settings: Settings) -> Report:
        report = rewrite_for(graph, settings)
        found.extend(site.region for site in report.sites)
        return report

    given = tuple(x.bfloat16() for x in args)
    explain(model.bfloat16(), given, {}, "infer", Settings(target="sm_90a"), rewrite=kept)
    return found


@pytest.mark.parametrize(
    ("size", "how", "count", "sums"),
    [(64, "", 2, 1), (64, "turned", 2, 1), (80, "", 2, 0), (80, "turned", 2, 0), (16, "", 2, 0), (64, "packed", 2, 0),
     (64, "turned first", 2, 0)],
)  # fmt: skip
def test_where_no_kernel_sums_the_rest_is_made_all_the_same(size: int, how: str, count: int, sums: int) -> None:
    """o with its residual and the sum of its squares, and the norm that is deferred to the queries."""
    x, y, cos = torch.randn(2, 256, 256), torch.randn(2, 256, 256), torch.randn(256, size)
    found = derived(Wide(size, how), x, y, cos)
    assert (len(found), sum(bool(over_heads(r)) for r in found)) == (count, sums)
    if how == "turned first":
        assert any(r.half for r in found)


def test_two_products_together_stay_together() -> None:
    (found,) = derived(Swiglu(), torch.randn(2, 256, 256))
    assert len(found.products) == 2 and not over_heads(found)


def test_tiles_hold_whole_heads() -> None:
    """Of 96 columns only tiles of 192, of 80 none; and of narrow ones none: a thread's columns lie in several."""
    for narrow in (2, 8, 16):
        with pytest.raises(Unsupported, match=f"sums over heads of {narrow}, 32 columns at a time"):
            legality.check(head_norm(4096, 1024, narrow))
    assert {c.tile_n for c in legality.candidates(head_norm(768, 1024, 96), 8192)} == {192}
    assert {c.tile_n for c in legality.candidates(head_norm(4096, 1024, 128), 8192)} <= {128, 256}
    with pytest.raises(Unsupported, match="sums over heads of 80"):
        legality.check(head_norm(800, 1024, 80))


def test_two_products_take_none() -> None:
    region = rotary_norm(256, 16)
    apart = dataclasses.replace(
        region,
        half=0,
        products=(region.products[0], dataclasses.replace(region.products[1], b=2)),
        operands=tuple(o for o in region.operands if o.extent == "token"),
        stores=(dataclasses.replace(region.stores[0], value="an", second=""),),
        lets=tuple(
            dataclasses.replace(let, args=("aa", 0.0, 64.0)) if let.name == "total" else let
            for let in region.lets[:9]
            if let.name not in ("wa", "wb")
        ),
    )
    with pytest.raises(Unsupported, match="a sum over heads beside two products"):
        legality.check(apart)
