"""Capture without a GPU or memory, and the counting of what a rewriting leaves."""

from __future__ import annotations

import json
import operator
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from float8_layers import WIDTH, Mlp, by
from torch import Tensor, fx, nn

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Let, Operand, Product, Reduction, Region, Store
from coda_inductor.core.settings import Settings
from coda_inductor.explain.capture import capture, load
from coda_inductor.explain.facts import BY_ITS_LARGEST, explain, region_facts, render
from coda_inductor.explain.report import amounts, same_passes
from coda_inductor.inductor.records import Refusal, Report, Site

M, N, K = 512, 256, 128
TILE = 4 * M * N


def graphs_of(function: Callable[..., Any], *args: Tensor, mode: Literal["infer", "train"] = "infer") -> list[fx.Graph]:
    found: list[fx.Graph] = []
    capture(function, args, {}, mode, found.append)
    return found


def names_in(graph: fx.Graph) -> str:
    return " ".join(str(n.target) for n in graph.nodes)


def test_attention_stays_one_operation_as_on_cuda() -> None:
    q = torch.empty(2, 4, 64, 32, dtype=torch.bfloat16)
    (graph,) = graphs_of(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert "_scaled_dot_product_cudnn_attention.default" in names_in(graph)
    mask = torch.ones(64, 64, dtype=torch.bool)
    (graph,) = graphs_of(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), q, mask)
    assert "_scaled_dot_product_cudnn_attention.default" in names_in(graph) and "bmm" not in names_in(graph)
    learned = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)
    (graph,) = graphs_of(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), q, learned, mode="train")
    assert "_scaled_dot_product_efficient_attention_backward.default" in names_in(graph)
    (graph,) = graphs_of(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), q)  # cuDNN takes sixteenths
    assert "_scaled_dot_product_flash_attention.default" in names_in(graph)
    q = torch.empty(2, 4, 64, 252, dtype=torch.bfloat16)  # more than cuDNN takes, and no multiple of 8
    (graph,) = graphs_of(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert "_scaled_dot_product_flash_attention.default" in names_in(graph)
    (graph,) = graphs_of(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), q, mask)
    assert "_scaled_dot_product_efficient_attention" in names_in(graph) and "bmm" not in names_in(graph)


def test_norms_and_dropout_trace_as_on_cuda() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rms, self.layer, self.dropout = nn.RMSNorm(64), nn.LayerNorm(64), nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.layer(self.rms(x)))  # type: ignore[no-any-return]

    model = Model().to(torch.bfloat16)
    (graph,) = graphs_of(model, torch.empty(8, 64, dtype=torch.bfloat16), mode="train")
    names = names_in(graph)
    assert "tangents" in names and "aten.rand" in names and "bernoulli" not in names
    rstd = [n for n in graph.nodes if "rsqrt" in str(n.target)]
    assert len(rstd) == 2 and all(n.meta["val"].dtype == torch.float32 for n in rstd)
    assert "aten.pow.Tensor_Scalar" in names
    assert not [n for n in graph.nodes if "pow" in n.name and n.meta.get("partitioner_tag") == "is_backward"]


def test_nothing_stays_patched() -> None:
    before = dict(torch.ops.aten.rms_norm.default.py_kernels)
    graphs_of(lambda x: F.rms_norm(x, [64]), torch.empty(8, 64))
    assert dict(torch.ops.aten.rms_norm.default.py_kernels) == before
    x = torch.randn(8, 64)
    assert torch.equal(torch.compile(lambda x: F.rms_norm(x, [64]) * 1, backend="eager")(x), F.rms_norm(x, [64]))


def test_graphs_after_a_break_are_captured() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.relu(x @ x)
        torch._dynamo.graph_break()
        return torch.exp(y @ y)

    first, second = graphs_of(f, torch.empty(64, 64))
    assert "relu" in names_in(first) and "exp" in names_in(second)


def test_capture_leaves_the_model_in_its_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    (graph,) = graphs_of(model, torch.empty(2, 8))
    assert model.training and "rand" not in names_in(graph)


BIG_MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Linear(16384, 16384, device="cuda") for _ in range(16)]).to(torch.bfloat16).cuda()
    assert torch.arange(4, device="cuda").sum().item() == 6
    return model, (torch.randn(1024, 16384, device="cuda", dtype=torch.bfloat16),)

def wrong():
    return 3
"""


def test_a_model_larger_than_memory_loads_and_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_big_model.py").write_text(BIG_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, args, kwargs = load("a_big_model:build")
    found: list[fx.Graph] = []
    capture(model, args, kwargs, "infer", found.append)
    assert len(found) == 1 and args[0].shape == (1024, 16384) and kwargs == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB; the weights are 17 GB in f32
    for spec, message in (
        ("a_big_model:wrong", "return"),
        ("a_big_model:none", "no function"),
        ("x", "MODULE:FUNCTION"),
    ):
        with pytest.raises(Unsupported, match=message):
            load(spec)


def region_of_relu(matrices: list[Tensor]) -> list[Tensor]:
    """Stands for the fused operation: relu of a product, and its sums over N."""
    raise NotImplementedError


def absorb_relu(graph: fx.Graph, _: Any) -> Report:
    """A rewriting in miniature: relu(mm) becomes one operation that also sums its rows."""
    relu = next(n for n in graph.nodes if n.target is torch.ops.aten.relu.default)
    product = relu.args[0]
    assert isinstance(product, fx.Node)
    with graph.inserting_before(relu):
        region = graph.call_function(region_of_relu, (list(product.args),))
        tile = graph.call_function(operator.getitem, (region, 0))
    region.meta["val"], tile.meta["val"] = [relu.meta["val"]], relu.meta["val"]
    relu.replace_all_uses_with(tile)
    graph.eliminate_dead_code()
    record = Region(
        n=N, dtype="f32", products=(Product("acc", 0, 1, K, "kn"),), operands=(Operand("r", "token", "f32"),),
        lets=(Let("y", "max", ("acc", 0.0)),), stores=(Store("y", "f32"),), reductions=(Reduction("y"),),
    )  # fmt: skip
    site = Site("r0", record, str(M), (), (relu.name,), (tile.name,), "model.py:1")
    return Report((site,), (Refusal("exp", "a reason", "model.py:2"),))


def test_what_a_region_absorbs_and_what_is_left() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = torch.relu(x @ w)
        return torch.exp(h @ v)

    args = (torch.empty(M, K), torch.empty(K, N), torch.empty(N, N))
    report = explain(f, args, {}, "infer", None, absorb_relu)
    (graph,) = report["graphs"]
    (region,) = graph["regions"]
    (left,) = graph["passes"]
    assert report["schema"] == 1 and graph["kind"] == "inference"
    assert (region["id"], region["n"], region["k"], region["m"]) == ("r0", N, K, str(M))
    assert region["bytes_before"] == 2 * TILE and region["bytes_after"] == 2 * 4 * M  # a vector in, a vector out
    assert left["what"] == "exp" and left["why"] == "a reason" and left["bytes"] == 2 * TILE
    assert left["source"] == "model.py:2"  # where the first condition failed
    assert report["totals"] == {
        "bytes_before": 4 * TILE, "bytes_after": 2 * TILE + 8 * M, "bytes_epilogues": 8 * M, "coverage": 0.5,
        "passes_left": 1, "saved_bytes": 0, "saved_bytes_inductor": 0, "regions": 1, "kernels_before": 2,
        "kernels_after": 1,
    }  # fmt: skip
    assert json.loads(json.dumps(report)) == report
    assert "r0" in render(report) and "a reason" in render(report)
    assert report["estimates"] == []  # no card runs the reference
    assert render(report).splitlines() == [
        "for reference: 1 region",
        "  memory-bound bytes    2.10 MB -> 1.05 MB, -50 %",
        "    of kernels          2.10 MB -> 1.05 MB",
        "    of epilogues        4.10 kB beside their products",
        "  coverage              50.0 %: the share of the bytes before that no kernel moves any more",
        "  other kernels         2 -> 1, 1 of them over M x N tensors",
        "",
        "graph 0 (inference)",
        "  r0",
        "      [512, 256] K=128: 1 store, 1 sum                1.05 MB -> 4.10 kB, -99.6 %  model.py:1",
        "  left to Inductor, with the first condition that failed:",
        "      1 x 1.05 MB   a reason  model.py:2",
        "                    exp",
    ]


def test_a_sum_is_as_long_as_what_is_left_of_the_tile() -> None:
    product, totals = Product("acc", 0, 1, K, "nk"), (Reduction("acc"), Reduction("acc", "M"), Reduction("acc", "M"))
    region = Region(N, "bf16", (product,), (), (), (Store("acc", "bf16"),), totals)
    facts = region_facts(Site("r0", region, str(M), (), (), (), "model.py:1"), {}, 0, None)
    assert facts["reductions"] == [f"f32[{M}]", f"f32[{N}]", f"f32[{N}]"]
    assert facts["bytes_after"] == 4 * (M + 2 * N)  # beyond one tile


def test_a_kernel_that_is_absorbed_in_part_counts_by_tensor() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x @ w)
        return y, y + b

    args = (torch.empty(M, K), torch.empty(K, N), torch.empty(M, N))
    totals = explain(f, args, {}, "infer", None, absorb_relu)["totals"]
    # One kernel reads the product and b, and writes two tiles. relu read the product and wrote y; b and y + b stay.
    assert totals["bytes_before"] == 4 * TILE and totals["coverage"] == 0.5


def test_a_graph_that_is_declined_is_refused_as_a_whole() -> None:
    def decline(graph: fx.Graph, _: Any) -> Report:
        raise Unsupported("not today", where="model.py:3")

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    report = explain(model, (torch.empty(512, 64),), {}, "train", None, decline)
    totals = report["totals"]
    assert report["graphs"][0]["kind"] == "joint" and "not today" in report["graphs"][0]["refused"][0]["reason"]
    assert totals["coverage"] == 0 and totals["bytes_after"] == totals["bytes_before"] > 0
    assert totals["saved_bytes"] == totals["saved_bytes_inductor"] > 0


def test_amounts_are_of_one_unit_where_they_compare() -> None:
    assert amounts(8_310_000, 6_040_000, 0) == "8.31 MB -> 6.04 MB -> 0 MB"
    assert amounts(133_340_000_000, 89_050_000_000, 50_000_000) == "133 GB -> 89.0 GB -> 0.05 GB"
    assert amounts(2_010_000_000, 262_144, 64) == "2.01 GB -> 262 kB -> 0.064 kB"
    assert amounts(99_999_999, 9_996_000, 999_600) == "100 MB -> 10.0 MB -> 1.00 MB"
    assert amounts(0) == "0 kB"


def test_passes_of_other_sizes_are_no_equal_ones() -> None:
    """An embedding's gradient begins with zeros of 1 GB, and with numbers of its rows, of 1 MB. What reads the same
    is one line: the first layer may read a few bytes more."""
    alike: dict[str, Any] = {"why": "", "source": "", "what": "full", "module": "embed"}
    passes = [alike | {"bytes": b} for b in (1_050_673_152, 1_026_048, 1_050_673_160)]
    assert [(p["bytes"], p["count"]) for p in same_passes(passes)] == [(1_050_673_152, 2), (1_026_048, 1)]


def test_why_a_cast_to_8_bits_is_left() -> None:
    """In one layout it is Inductor's: the scale is the largest of what is cast."""
    model = by("rowwise_with_gw_hp", Mlp())
    facts = explain(model, (torch.empty(1024, WIDTH, dtype=torch.bfloat16),), {}, "infer", Settings(target="sm_90a"))
    assert BY_ITS_LARGEST in {p["why"] for graph in facts["graphs"] for p in graph["passes"]}


def test_products_of_integers_are_left_by_name() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch._int_mm(x, w)

    args = torch.zeros(32, 64, dtype=torch.int8), torch.zeros(64, 64, dtype=torch.int8)
    (graph,) = explain(f, args, {}, "infer", Settings(target="sm_90a"))["graphs"]
    assert [r["reason"] for r in graph["refused"]] == ["it has no matrix product but of integers (aten._int_mm)"]


def test_what_is_kept_is_no_parameter() -> None:
    """The backward reads the second weight transposed, which is a view of it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.down(torch.sin(self.up(x))))

    totals = explain(Model(), (torch.empty(512, 64),), {}, "train", Settings(target="sm_90a"))["totals"]
    assert totals["saved_bytes_inductor"] == 512 * (128 + 128 + 64) * 4  # both products, and what the second reads
