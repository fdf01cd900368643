"""Sweeps: what they mean, where they are found beside an operation that is no product, and where they are not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiling import Norm
from evaluate import error, strict_reference
from sweep_cases import CASES, apart, headed, packed, rotary, tensors
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.codegen import legality, sweep_plan, sweep_source
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import DTYPES, Let
from coda_inductor.core.sweep import Output, Read, Sweep, Write, interpret_sweep, parse_sweep, shape, verify_sweep
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.passes.sweeps import Kept, in_turn, require_one_time, waits_for
from coda_inductor.patterns import graph as g
from coda_inductor.plan.sweeps import Swept, Wanted, read_through
from coda_inductor.plan.sweeps import swept as swept_of

B, T, D, HEADS, EXACT = 2, 24, 32, 4, 1e-10


# What it means.


def test_sums_and_tiles() -> None:
    sweep = packed(8)
    *z, x, s = (t.float() for t in tensors(sweep, 24, "cpu"))
    tile, bias, statistic = interpret_sweep(sweep, tensors(sweep, 24, "cpu"))
    scaled = torch.cat(z, 1) * s[:, None]
    assert torch.equal(tile, scaled.bfloat16())
    torch.testing.assert_close(bias, scaled.sum(0))
    torch.testing.assert_close(statistic, (scaled * x).sum(1))


def test_parts_add_to_one_sum() -> None:
    sweep = apart(8)
    z, x, u, w, y, v = (t.float() for t in tensors(sweep, 5, "cpu"))
    found = interpret_sweep(sweep, tensors(sweep, 5, "cpu"))
    wanted = [z.sum(0), (z * x).sum(1), (z * u + w * v + 1.0).sum(1), w.sum(0), (w * y).sum(1)]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_heads() -> None:
    sweep, m = headed(32), 16
    x, g, k, y = (t.float() for t in tensors(sweep, m, "cpu"))
    g, k, y = (t.view(8, -1, 2, 16).transpose(1, 2).flatten(2).flatten(0, 1) for t in (g, k, y))
    tile, bias, statistic, turned = interpret_sweep(sweep, tensors(sweep, m, "cpu"))
    assert torch.equal(tile, (g + k[:, 32:]).bfloat16())
    torch.testing.assert_close(bias, g.sum(0))
    torch.testing.assert_close(statistic, (x * g).sum(1))
    assert torch.equal(turned, y.view(m, 2, 2, 8).flip(2).flatten(1).bfloat16())


def test_halves_of_heads_and_tables() -> None:
    sweep, m = rotary(48), 32
    g, x, c, s, *_ = (t.float() for t in tensors(sweep, m, "cpu"))
    c, s = (t.repeat(m // len(t), 3) for t in (c, s))
    first, second = (g * s).unflatten(1, (3, 2, 8)).unbind(2)
    wanted = g * c + torch.stack([second, -first], 2).flatten(1)
    tile, bias, statistic, _ = interpret_sweep(sweep, tensors(sweep, m, "cpu"))
    torch.testing.assert_close(tile, wanted.bfloat16())
    torch.testing.assert_close(bias, wanted.sum(0))
    torch.testing.assert_close(statistic, (g * x).sum(1))


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_text_is_the_sweep(make: Callable[[int], Sweep]) -> None:
    sweep = make(32)
    assert parse_sweep(sweep.text) == sweep and parse_sweep(sweep.text).digest == sweep.digest
    assert make(48).digest != sweep.digest


def broken() -> Iterator[tuple[str, Sweep]]:
    whole = packed(8)
    part = whole.parts[0]

    def with_part(**changes: Any) -> Sweep:
        return dataclasses.replace(whole, parts=(dataclasses.replace(part, **changes), *whole.parts[1:]))

    yield "nothing leaves", dataclasses.replace(whole, outputs=())
    yield "no tile", with_part(reads=(Read("z", 1, "tile"), *part.reads[1:]))
    yield "gets", with_part(writes=part.writes[1:])
    yield "gets", with_part(writes=(dataclasses.replace(part.writes[0], start=8), *part.writes[1:]))
    yield "not defined before", with_part(lets=part.lets[::-1])
    yield "no such operation", with_part(lets=(Let("v0", "floor", ("z",)), *part.lets[1:]))
    yield "not a tile", with_part(writes=(*part.writes[:2], Write("s", 2)))
    yield "of width 24", with_part(reads=(part.reads[0], Read("x", 3, "tile", 20), part.reads[2]))
    yield "no halves", with_part(reads=(Read("z", 0, "tile", 0, 1), *part.reads[1:]))
    yield "two things", with_part(reads=(*part.reads[:2], Read("s", 4, "feature")))
    yield "sums of bf16", dataclasses.replace(whole, outputs=(*whole.outputs[:2], Output("token", 0, "bf16")))


@pytest.mark.parametrize(("says", "sweep"), [*broken()], ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_well_formed_is_a_bug(says: str, sweep: Sweep) -> None:
    with pytest.raises(BrokenInvariant, match=says):
        verify_sweep(sweep)


# What runs.


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_module_computes_the_parts(make: Callable[[int], Sweep]) -> None:
    """Its functions, on the columns that interpret_sweep gives each part."""
    from coda_inductor.core.sweep import columns

    sweep, m = make(48), 16
    names: dict[str, Any] = {}
    text = sweep_source.render(sweep)
    exec(text[text.index("def part0") :], names)
    inputs = [t.float() for t in tensors(sweep, m, "cpu")]
    outs = [torch.zeros(shape(o, m)) for o in sweep.outputs]
    for part, function in zip(sweep.parts, names["PARTS"], strict=True):
        args = []
        for read in part.reads:
            x = inputs[read.input]
            if x.dim() == 3:
                x = (
                    x.view(-1, sweep.inputs[read.input][1] // x.shape[2], *x.shape[1:])
                    .transpose(1, 2)
                    .flatten(2)
                    .flatten(0, 1)
                )
            x = x[:, None] if x.dim() == 1 else x[:, columns(part, read, x.shape[1])]
            args.append(x.repeat(m // len(x), 1))
        for write, value in zip(part.writes, function(*args), strict=True):
            out, extent = outs[write.output], sweep.outputs[write.output].extent
            if extent == "token":
                out += value.sum(1)
            else:
                places = columns(part, write, out.shape[-1])
                out[..., places] = value.sum(0) if extent == "feature" else value
    for mine, wanted in zip(outs, interpret_sweep(sweep, tensors(sweep, m, "cpu")), strict=True):
        torch.testing.assert_close(mine.to(wanted.dtype), wanted, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("n", [16, 256, 272, 4096])
def test_partial_results_have_room(make: Callable[[int], Sweep], n: int) -> None:
    """Every strip of every part has a place of its own in the partial results of a sum."""
    sweep = make(n)
    for i, output in enumerate(sweep.outputs):
        if output.extent == "token":
            slots = sweep_plan.slots(sweep, i)
            places = [
                first + s for number, first in slots.items() for s in range(sweep_plan.strips(sweep.parts[number]))
            ]
            assert sorted(places) == [*range(sweep_plan.tiles(sweep, i, 7))]
            assert {number for number, p in enumerate(sweep.parts) if any(w.output == i for w in p.writes)} == {*slots}
        elif output.extent == "feature":
            assert sweep_plan.tiles(sweep, i, 7) == 7
    for m in (1, 8, 100000):
        count = sweep_plan.blocks(sweep, m, 132)
        sums = [(i, o) for i, o in enumerate(sweep.outputs) if o.extent != "tile"]
        for_rows, for_blocks = sweep_plan.partial_results(sweep)
        wanted = sum(sweep_plan.tiles(sweep, i, count) * (o.width or m) for i, o in sums)
        assert count >= 1 and for_rows * m + for_blocks * count == wanted


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        (apart(12), "12 columns, no multiple of 8"),
        (packed(20), "20 columns, no multiple of 8"),
        (parse_sweep(packed(8).text.replace('"bf16"', '"f64"').replace('"f32"', '"f64"')), "f64"),
    ],
)
def test_what_no_kernel_runs(sweep: Sweep, says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        legality.check(sweep)


# Where they are found: an operation that is no product stands for attention.

LIBRARY = torch.library.Library("coda_tests_sweeps", "DEF")
LIBRARY.define("mix(Tensor q, Tensor k, Tensor v) -> Tensor")
LIBRARY.define("mix_backward(Tensor g, Tensor q, Tensor k, Tensor v, bool turned) -> (Tensor, Tensor, Tensor)")


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, T, D] each, of k and v perhaps fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (torch.tanh(q) * k + v).transpose(1, 2).contiguous().transpose(1, 2)


def _mix_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, turned: bool) -> tuple[Tensor, ...]:
    """Each gradient lies token by token, as attention's do; `turned`: head by head."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(_mix(*leaves), leaves, g)
    rows = torch.contiguous_format  # copies: none may be the gradient that was given, whose memory is used again
    return tuple(
        x.clone(memory_format=rows) if turned else x.transpose(1, 2).clone(memory_format=rows).transpose(1, 2)
        for x in grads
    )


def _lying(x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x.new_empty((b, t, h, d)).transpose(1, 2)


LIBRARY.impl("mix", _mix, "CPU")
LIBRARY.impl("mix_backward", _mix_backward, "CPU")
torch.library.register_fake("coda_tests_sweeps::mix", lambda q, k, v: _lying(q), lib=LIBRARY)
torch.library.register_fake(
    "coda_tests_sweeps::mix_backward",
    lambda g, q, k, v, turned: tuple(x.new_empty(x.shape) if turned else _lying(x) for x in (q, k, v)),
    lib=LIBRARY,
)
OPS = torch.ops.coda_tests_sweeps
TURNED = [False]


def _gradients(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
    return OPS.mix_backward(g, *ctx.saved_tensors, TURNED[0])  # type: ignore[no-any-return]


torch.library.register_autograd(
    "coda_tests_sweeps::mix",
    _gradients,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=LIBRARY,
)


def heads(x: Tensor, width: int = D // HEADS) -> Tensor:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)  # type: ignore[no-any-return]


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """A layer of GPT-2: LayerNorm, q, k and v of one weight, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.qkv, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        q, k, v = self.qkv(self.norm(x)).split(D, -1)
        return x + self.out(joined(OPS.mix(heads(q), heads(k), heads(v))))  # type: ignore[no-any-return]


class Apart(nn.Module):
    """A layer of ViT: three weights with biases; `read` returns what else reads q."""

    def __init__(self, read: Callable[[Tensor], Tensor] = lambda q: q.new_zeros(())) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        return x + self.out(joined(OPS.mix(heads(q), heads(k), heads(v)))) + self.read(q)  # type: ignore[no-any-return]


class Rotated(nn.Module):
    """A layer of Llama: RMSNorm, rotary embeddings of q and k in halves of heads, half as many heads of k and v."""

    few = HEADS // 2

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(D, D, bias=False), Norm(D)
        self.q, self.out = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k, self.v = (nn.Linear(D, D // HEADS * self.few, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.up(x)
        y = self.norm(x)

        def turned(h: Tensor) -> Tensor:
            first, second = h.chunk(2, -1)
            return h * cos + torch.cat([-second, first], -1) * sin

        q, k, v = turned(heads(self.q(y))), turned(heads(self.k(y))), heads(self.v(y))
        return x + self.out(joined(OPS.mix(q, k, v)))  # type: ignore[no-any-return]


class Lonely(Rotated):
    """One head of k and v: what is a table of q is as wide as they are."""

    few = 1


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(T, dtype=torch.float64), 0.3 ** torch.arange(D // HEADS // 2)).repeat(1, 2)
    return angles.cos(), angles.sin()


def layer(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make().double()
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)
    return model


def results(run: Any, model: nn.Module, *rest: Tensor, batch: int = B) -> list[Tensor]:
    """The output, and all gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(batch, T, D, dtype=torch.float64, requires_grad=True)
    y = run(x, *rest)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def swept(
    model: nn.Module, *rest: Tensor, run: bool = True, dynamic: bool = False, batch: int = B, **options: Any
) -> tuple[Kept, ...]:
    """The Sweeps of a layer, all of whose results are eager's."""
    wanted = results(model, model, *rest, batch=batch)
    with strict_reference(run=run):
        REPORTS.clear()
        compiled = torch.compile(model, backend="coda", dynamic=dynamic, options=options)
        found = results(compiled, model, *rest, batch=batch)
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert error(mine, theirs) < EXACT
    (report,) = REPORTS
    return report.swept


def said(kept: Kept) -> list[tuple[int, int, list[str]]]:
    """Of each part its columns, its halves, and what it writes to."""
    outputs = kept.sweep.outputs
    return [(p.n, p.half, [outputs[w.output].extent for w in p.writes]) for p in kept.sweep.parts]


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_weight(dynamic: bool) -> None:
    """Gradients side by side, the bias's, and LayerNorm's statistics."""
    (kept,) = swept(layer(Packed), dynamic=dynamic)
    parts = said(kept)
    assert [p[:2] for p in parts] == [(D, 0)] * 3 and parts[0] == parts[1] == parts[2]
    extents = parts[0][2]
    assert extents[0] == "tile" and extents.count("feature") == 1 and {*extents} == {"tile", "feature", "token"}
    assert "cat" in kept.what and "sum" in kept.what


def test_three_weights() -> None:
    (kept,) = swept(layer(Apart))
    parts = said(kept)
    assert [p[:2] for p in parts] == [(D, 0)] * 3
    assert all(p[2].count("feature") == 1 and "tile" not in p[2] and p[2].count("token") > 1 for p in parts)


def test_rotary_embeddings() -> None:
    (kept,) = swept(layer(Rotated), *tables())
    half = D // HEADS // 2
    parts = [(D // 2, half, ["tile", "tile", "token", "token"]), (D // 4, half, ["tile", "tile"])]
    assert sorted(said(kept), reverse=True) == parts
    assert sorted(o.width for o in kept.sweep.outputs if o.extent == "tile") == [D // 2, D]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", [Packed, Apart, Rotated, Lonely])
def test_one_sequence(make: Callable[[], nn.Module], dynamic: bool) -> None:
    """Of one sequence tables have as many rows as the tiles."""
    rest = tables() if make in (Rotated, Lonely) else ()
    (kept,) = swept(layer(make), *rest, batch=1, dynamic=dynamic)
    (more,) = swept(layer(make), *rest, dynamic=dynamic)
    assert said(kept) == said(more)


@pytest.fixture
def turned() -> Iterator[None]:
    """The gradients of q, k and v lie head by head."""
    TURNED[0] = True
    yield
    TURNED[0] = False


@pytest.mark.usefixtures("turned")
@pytest.mark.parametrize("make", [Rotated, Lonely])
def test_one_sequence_whose_gradients_lie_head_by_head(make: Callable[[], nn.Module]) -> None:
    """No table is their leader, though it lies in rows."""
    assert len(swept(layer(make), *tables(), batch=1)) == len(swept(layer(make), *tables())) == 1


@pytest.mark.parametrize("batch", [1, 2])
def test_tables_of_every_sequence(batch: int) -> None:
    """Angles by position ids: as many rows as the tiles, in batches too; of one head a table that k reads as a tile."""
    of_each = [t.expand(batch, 1, -1, -1).contiguous() for t in tables()]
    for make in (Rotated, Lonely):
        assert len(swept(layer(make), *of_each, batch=batch)) == 1


class Scaled(Rotated):
    """One head of k and v, and one vector that scales every head."""

    few = 1

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.up(x)
        q, k, v = (heads(w(self.norm(x))) for w in (self.q, self.k, self.v))
        return x + self.out(joined(OPS.mix(q * cos, k * cos, v)))  # type: ignore[no-any-return]


def test_a_vector_of_a_head_is_read_in_two_ways() -> None:
    """It is a feature of k and a table of q: the Regions stay, without a Sweep."""
    scale = torch.linspace(0.5, 1.5, D // HEADS, dtype=torch.float64)
    assert swept(layer(Scaled), scale, scale) == () and REPORTS[0].sites
    assert any("is read in two ways" in r.reason for r in REPORTS[0].refused)


def test_the_whole_graph_is_inductors_too() -> None:
    """Not only interpreted: as Inductor compiles the operation for the reference target."""
    assert len(swept(layer(Packed), run=True)) == len(swept(layer(Packed), run=False)) == 1


def test_other_loops_read_the_gradient() -> None:
    """Inductor might make one kernel of what reads it: here a second path back into q."""
    assert not swept(layer(lambda: Apart(lambda q: torch.sin(q))))
    refused = {r.reason for r in REPORTS[-1].refused}
    assert any("too" in reason for reason in refused), refused


@pytest.mark.usefixtures("turned")
@pytest.mark.parametrize("make", [Packed, Apart, Rotated])
def test_gradients_that_lie_head_by_head(make: Callable[[], nn.Module]) -> None:
    """As those of attention that is written as products: they are put into rows on the way."""
    (kept,) = swept(layer(make), *(tables() if make is Rotated else ()))
    reads = {r.extent: r.inner for part in kept.sweep.parts for r in part.reads}
    assert reads["heads"] == D // HEADS
    assert sum(o.extent == "tile" for o in kept.sweep.outputs) == (1 if make is Packed else 3)


def test_nothing_but_a_sum_is_none() -> None:
    """A single kernel of Inductor's has nothing to gain."""

    class Frozen(Packed):
        def __init__(self) -> None:
            super().__init__()
            for p in (*self.norm.parameters(), *self.up.parameters()):
                p.requires_grad_(False)

    assert all(len(kept.sweep.outputs) > 1 for kept in swept(layer(Frozen)))


def test_it_is_a_switch() -> None:
    assert not swept(layer(Packed), disable="sweeps")
    assert len(swept(layer(Packed), only="sweeps")) <= 1


def test_inference_has_none() -> None:
    model = layer(Packed)
    with torch.no_grad(), strict_reference(run=True):
        REPORTS.clear()
        torch.compile(model, backend="coda")(torch.randn(B, T, D, dtype=torch.float64))
    assert not REPORTS[-1].swept


def test_kept_is_what_the_graph_has_no_more() -> None:
    """Every name is of an operation whose work the Sweep does, and the text is compact."""
    (kept,) = swept(layer(Packed))
    assert len(set(kept.nodes)) == len(kept.nodes) > 5
    assert kept.m == str(B * T) and kept.source.startswith(__file__.rsplit("/", 1)[0])
    assert json.loads(kept.sweep.text)["parts"][0]["n"] == D
    assert all(dtype in DTYPES for dtype, _ in kept.sweep.inputs)


# What a graph says that is none: read without the search for it.


def one_sweep(function: Callable[[Tensor], Any], *wanted: str, there: bool = True) -> Swept:
    """The Sweep of the nodes of these operations, of a gradient [B, T, D] that a product of its rows has made tokens
    of."""
    module = make_fx(lambda x: (function(x), x.view(-1, D) @ x.new_ones(D, D)), tracing_mode="fake")(
        torch.ones(B, T, D)
    )
    matrices = [n for n in module.graph.nodes if n.op == "call_function" and "view" in str(n.target)][-1:]
    lifted = read_through(module.graph, matrices, rounding=False)
    rows = frozenset(i for d in lifted.reading.roots(matrices[0])[:1] for i in d)
    found = []
    for node in module.graph.nodes:
        if any(name in str(node.target) for name in wanted):
            source, reduction = node, g.reduction(node)
            if reduction is not None:
                source = reduction.source
                dims = lifted.reading.roots(source)
                over = frozenset(i for d in reduction.dims for i in dims[d])
            found.append(Wanted(node, lifted.term[source], rows, over if reduction else None))
    return swept_of(lifted, found, lambda node: there)


def test_rows_in_another_order() -> None:
    assert len(one_sweep(lambda x: x.sum(-1), "sum").outputs) == 1
    with pytest.raises(Unsupported, match="rows in another order"):
        one_sweep(lambda x: x.transpose(0, 1).sum(-1), "sum")


def test_what_lies_in_no_memory() -> None:
    with pytest.raises(Unsupported, match="does not lie in memory"):
        one_sweep(lambda x: x.sum(-1), "sum", there=False)


def test_an_input_that_waits_for_an_output() -> None:
    """As the gradient through a norm does for its own statistic."""
    made = one_sweep(lambda x: x * x.sum(-1, keepdim=True), "sum", "mul")
    with pytest.raises(Unsupported, match="wait for its own sum"):
        require_one_time(made)
    require_one_time(one_sweep(lambda x: (x.sum(-1), x.sum((0, 1))), "sum"))


def test_a_part_that_is_no_tile() -> None:
    """As in the gradient of a slice: zeros lie beside it."""
    with pytest.raises(Unsupported, match="made of vectors alone"):
        one_sweep(lambda x: torch.cat([x, torch.full((B, T, D), 0.0)], -1), "cat")
    assert len(one_sweep(lambda x: torch.cat([x, 2.0 * x], -1), "cat").sweep.parts) == 2


def test_a_tile_that_is_a_table_of_what_is_made() -> None:
    """Its columns are those of each of two heads, whose own columns are weights'."""
    with pytest.raises(Unsupported, match="fewer columns"):
        one_sweep(lambda x: x.unsqueeze(2) * x.new_ones(2, D), "mul")


class Crossed(nn.Module):
    """Cross-attention: k and v of other tokens, as many, so that rows are of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.out = (nn.Linear(D, D) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x, other = x + self.up(x), other + self.side(other)
        q, k, v = self.q(x), self.k(other), self.v(other)
        return self.out(joined(OPS.mix(heads(q), heads(k), heads(v))))  # type: ignore[no-any-return]


def test_rows_of_two_kinds() -> None:
    torch.manual_seed(2)
    (kept,) = swept(layer(Crossed), torch.randn(B, T, D, dtype=torch.float64))
    assert [width for _, width in kept.sweep.inputs] == [D] * len(kept.sweep.inputs)
    assert [p[2].count("feature") for p in said(kept)] == [1, 1, 1]


class Unused(nn.Module):
    """A third part of one weight that nobody reads: its gradient is 0, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.qkv(x).chunk(3, -1)
        return x + self.out(joined(OPS.mix(heads(q), heads(k), heads(k))))  # type: ignore[no-any-return]


def test_a_part_without_a_gradient_costs_no_region() -> None:
    assert not swept(layer(Unused))
    assert len(REPORTS[-1].sites) >= 1


def test_what_cannot_be_written_costs_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is as it was before the Sweeps."""

    def refused(*args: object) -> None:
        raise Unsupported("no room")

    monkeypatch.setattr("coda_inductor.passes.sweeps._write", refused)
    assert not swept(layer(Packed))
    assert len(REPORTS[-1].sites) > 1 and any(r.reason == "no room" for r in REPORTS[-1].refused)


def test_sweeps_that_wait_for_each_other() -> None:
    """They run in an order, or not at all."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    x = graph.call_function(torch.sin, (a,))
    y = graph.call_function(torch.cos, (x,))
    z = graph.call_function(torch.sin, (b,))
    one, two, three = (Swept(apart(8), inputs, outputs) for inputs, outputs in (([y], [z]), ([a], [x]), ([z], [y])))
    assert in_turn([one, two]) == [two, one]
    assert in_turn([one, three]) == []
    assert waits_for(one, three) is y and waits_for(three, one) is z and in_turn([one, two, three]) == [two]


class Gated(nn.Module):
    """q scaled for each token and each feature, k shifted for each token: their sums are also of vectors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.gate, self.scale = nn.Linear(D, 1), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(x)
        y = self.norm(x)
        t = self.gate(y).sigmoid()
        q, k, v = self.q(y) * t * self.scale, self.k(y) * self.scale + t, self.v(y)
        return x + self.out(joined(OPS.mix(heads(q), heads(k), heads(v))))  # type: ignore[no-any-return]


def test_scales_and_shifts_of_tokens() -> None:
    swept(layer(Gated))
    assert len(REPORTS[-1].sites) >= 1
