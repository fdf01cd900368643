"""Products that kernels add to memory: a head's gradient by blocks, and the records and tiles that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, pretend
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_inductor.codegen import legality, source
from coda_inductor.codegen.cases import weight_gradient_added
from coda_inductor.codegen.target import SM_90A, SM_100A
from coda_inductor.codegen.tiles import Config, tiles
from coda_inductor.commands.differences import bisect
from coda_inductor.core import blocks
from coda_inductor.core.errors import BrokenInvariant, Unsupported
from coda_inductor.core.region import Product, Region, Store, parse
from coda_inductor.core.settings import Settings
from coda_inductor.core.verify import verify
from coda_inductor.inductor import joint
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Site
from coda_inductor.kernels import launch
from coda_inductor.measure import timing
from coda_inductor.ops.custom import ADDED_REGION, ADDED_UP, REGION
from coda_inductor.passes import plain
from coda_inductor.write.kept import keep

ROWS, WIDTH, VOCABULARY = 384, 16, 200
pytestmark = pytest.mark.usefixtures("uncached")
Targets = list[object]


class Head(nn.Module):
    """A head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.head(x)
        return F.cross_entropy(z if z.dtype == torch.float64 else z.float(), y)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> Targets:
    """The operations of the finished graphs; also small products are added by Regions."""
    found: Targets = []

    def kept(graph: fx.Graph, lent: frozenset[int]) -> None:
        keep(graph, lent)
        found.extend(n.target for n in graph.nodes)

    monkeypatch.setattr(plain, "ADDED_LEAST", 8)
    monkeypatch.setattr(joint, "keep", kept)
    return found


def gradients(dtype: torch.dtype, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    model = Head().to(dtype)
    x, y = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True), torch.randint(0, VOCABULARY, (ROWS,))
    call = torch.compile(model, backend="coda", dynamic=False, options=options) if options else model
    loss = call(x, y)
    return [loss.detach(), *torch.autograd.grad(loss, (x, model.head.weight))]


@pytest.mark.parametrize("disable", ["", "loss"])
def test_a_heads_gradient_is_added_up_by_regions(adding: Targets, disable: str) -> None:
    found = gradients(torch.float64, **REFERENCE, strict=True, chunk=128, disable=disable)
    assert adding.count(ADDED_REGION) == 2 and adding.count(ADDED_UP) == 1  # the first is there to be added to
    for mine, eager in zip(found, gradients(torch.float64), strict=True):
        assert float((mine - eager).abs().max()) < 1e-10


def test_the_switch_of_plain_products_leaves_them(adding: Targets) -> None:
    gradients(torch.float64, **REFERENCE, strict=True, chunk=128, disable="bare")
    assert adding.count(ADDED_REGION) == 0 and adding.count(ADDED_UP) == 3


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def test_kernels_add_where_the_others_lie(adding: Targets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a machine that is pretended: each block's kernel is launched once, and nothing falls back."""
    pretend(monkeypatch, tmp_path)
    torch.manual_seed(1)
    exact, eager = gradients(torch.float64), gradients(torch.bfloat16)
    gradients(torch.bfloat16, chunk=128)  # measures
    launch.LAUNCHES.clear()
    REPORTS.clear()
    mine = gradients(torch.bfloat16, chunk=128)
    digests = [site.region.digest for report in REPORTS for site in report.sites if site.region.adds]
    assert len(digests) == 2 and len({*digests}) == 1  # of two blocks: the first is there to be added to
    assert launch.LAUNCHES[digests[0]] == 2 and not launch.FALLBACKS
    assert all(a < 1.5 * b for a, b in zip(errors(mine, exact), errors(eager, exact), strict=True))


def test_who_loses_is_added_by_cublas(adding: Targets, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)

    def slower(calls: Sequence[Callable[[], object]], rounds: int, **how: object) -> list[timing.Times]:
        for call in calls:
            call()
        return [timing.Times(2.0 if i == 0 and len(calls) == 2 else 1.0, 1.5) for i in range(len(calls))]

    monkeypatch.setattr(timing, "compared", slower)
    gradients(torch.bfloat16, chunk=128)
    assert adding.count(ADDED_UP) == 3


def added(n: int = 24, k: int = 16, dtype: str = "f64") -> Region:
    out = dtype if dtype == "f64" else "f32"
    product = Product("acc0", 0, 1, k, "kn", a_layout="km")
    return Region(n, dtype, (product,), (), (), (Store("acc0", out),), (), adds=True)


def test_what_it_means() -> None:
    """Outputs to add to are zeros; of no rows nothing changes; by blocks of rows it is the same."""
    region = verify(added())
    a, b = torch.randn(16, 40, dtype=torch.float64), torch.randn(16, 24, dtype=torch.float64)
    before = torch.randn(40, 24, dtype=torch.float64)
    for numbers in (None, 24 * 8):
        out = before.clone()
        blocks.into(region, [a, b], [out], numbers)
        assert float((out - before - a.T @ b).abs().max()) < 1e-12
    assert not blocks.outputs(region, [a, b])[0].any()
    blocks.into(region, [a[:, :0], b], [out := before.clone()[:0]])
    assert not out.numel()
    made = torch.ops.coda.added_region(before, a, b, region.text, "reference")
    assert float((made - before - a.T @ b).abs().max()) < 1e-12
    torch.library.opcheck(torch.ops.coda.added_region, (before, a, b, region.text, "reference"))


def test_of_no_rows_nothing_is_zeroed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is of no rows leaves what lies there as it is."""
    pretend(monkeypatch, tmp_path)
    region = weight_gradient_added(24, 16)
    kernel = launch.kernel(region.text, str(tmp_path))
    out = torch.ones(4, 24)
    assert kernel.prepare([torch.empty(16, 0).bfloat16(), torch.empty(16, 24).bfloat16()], [out]) is None
    assert bool((out == 1).all())


def test_kernels_that_add_are_others() -> None:
    region = weight_gradient_added(2048, 4096)
    assert source.form(region) != source.form(replace(region, adds=False))


@pytest.mark.parametrize(("rows", "vocabulary"), [(128, 204), (124, 200), (128, 200)])
def test_rows_of_16_bytes_are_asked_for(rows: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "ADDED_LEAST", 8)
    found = list[bool]()
    with FakeTensorMode():
        graph = fx.Graph()
        shapes = {"into": (vocabulary, WIDTH), "e": (rows, vocabulary), "x": (rows, WIDTH)}
        into, e, x = (graph.placeholder(name) for name in shapes)
        for node, shape in zip((into, e, x), shapes.values(), strict=True):
            node.meta["val"] = torch.empty(shape, dtype=torch.float32 if node is into else torch.bfloat16)
        turned = graph.call_function(torch.ops.aten.permute.default, (e, [1, 0]))
        turned.meta["val"] = e.meta["val"].permute(1, 0)
        node = graph.call_function(ADDED_UP, (into, turned, x))
        node.meta["val"] = torch.empty(shapes["into"], dtype=torch.float32)
        found.append(plain.as_region(node) is not None)
    assert found == [rows % 8 == vocabulary % 8 == 0]


def test_its_record() -> None:
    """It has a text and a digest of its own; those of others are as they were."""
    region = added()
    assert parse(region.text) == region
    assert '"adds"' not in replace(region, adds=False).text and region.digest != replace(region, adds=False).digest
    narrow = replace(added(dtype="bf16"), stores=(Store("acc0", "bf16"),))
    for wrong in (narrow, replace(region, stores=(*region.stores, *region.stores))):
        with pytest.raises(BrokenInvariant, match="added to memory"):
            verify(wrong)


def test_its_tiles() -> None:
    region = weight_gradient_added(2048, 4096)
    assert legality.candidates(region, 32000) == SM_90A.adds == legality.candidates(region, 64)
    legality.check(region)
    with pytest.raises(Unsupported, match="added to memory, on sm_100a"):
        legality.check(region, SM_100A)


def test_tiles_that_are_turned() -> None:
    """They are written with a t, read from records that are older, and are for products alone."""
    (config,) = tiles("128x192pp2x1t")
    assert config.turned and str(config) == "128x192pp2x1t"
    fields = config._asdict()
    assert Config.read(fields) == config
    del fields["turned"]
    assert Config.read(fields) == config._replace(turned=False)
    assert Config.read({**fields, "more": 1}) is None and Config.read({"tile_m": 1}) is None and Config.read(3) is None
    alone = replace(weight_gradient_added(2048, 4096), adds=False)
    assert legality.is_legal(alone, config)
    scaled = replace(alone, stores=(*alone.stores, *alone.stores))
    with pytest.raises(Unsupported, match="128x192pp2x1t is for a product with nothing beside it"):
        legality.require(scaled, config)


def test_only_what_is_known_to_be_added_to_is_overwritten(adding: Targets) -> None:
    """A sum that somebody else reads, too, is copied first."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("into", "a", "b")]
    one = graph.call_function(ADDED_REGION, (*given, added().text, "reference"))
    two = graph.call_function(ADDED_REGION, (one, *given[1:], added().text, "reference"))
    graph.output((one, two))
    call = fx.GraphModule(nn.Module(), graph)
    a, b = torch.randn(16, 40, dtype=torch.float64), torch.randn(16, 24, dtype=torch.float64)
    into = torch.randn(40, 24, dtype=torch.float64)
    before = into.clone()
    with torch.no_grad():
        first, second = torch.compile(call, backend="coda", options=REFERENCE)(into, a, b)
    assert torch.equal(into, before)
    assert float((first - before - a.T @ b).abs().max()) < 1e-12
    assert float((second - before - 2 * (a.T @ b)).abs().max()) < 1e-12


@pytest.mark.parametrize("adds", [False, True])
def test_a_sum_that_is_read_as_a_matrix_is_copied_first(adds: bool) -> None:
    graph = fx.Graph()
    into, a, b = (graph.placeholder(name) for name in ("into", "a", "b"))
    one = graph.call_function(ADDED_UP, (into, a, b))
    if adds:
        graph.output(graph.call_function(ADDED_REGION, (one, one, b, added(512, 512).text, "reference")))
    else:
        graph.output(graph.call_function(ADDED_UP, (one, one, b)))
    call = fx.GraphModule(nn.Module(), graph)
    x, y, z = torch.randn(3, 512, 512, dtype=torch.float64)
    first = x + y @ z
    with torch.no_grad():
        found = torch.compile(call, backend="coda", options=REFERENCE)(x, y, z)
    assert float((found - first - (first.T if adds else first) @ z).abs().max()) < 1e-9


def test_a_bisection_compares_it_with_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    site = Site("r0", weight_gradient_added(64, 32), "72", (), (), (), "")
    found = bisect.alone(site, Settings(target="sm_90a", cache_dir=str(tmp_path)), torch.device("cpu"))
    assert found["error"] == 0.0 and found["differs"] is False


def test_a_matrix_that_is_a_bare_product_itself(adding: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "DEEP_LEAST", 8)
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    one = graph.call_function(torch.ops.aten.mm.default, (a, b))
    two = graph.call_function(ADDED_UP, (graph.call_function(ADDED_UP, (None, a, b)), one, c))
    graph.output(two)
    x, y, z = torch.randn(3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        call = torch.compile(fx.GraphModule(nn.Module(), graph), backend="coda", options=REFERENCE | {"strict": True})
        found = call(x, y, z)
    assert adding.count(ADDED_REGION) == adding.count(REGION) == 1
    assert float((found - x @ y - x @ y @ z).abs().max()) < 1e-12
