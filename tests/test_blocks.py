"""Sums over tokens beside statistics over the features of the same tensors, which Inductor would mix with them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coverage_models
import pytest
import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.inductor import launching
from coda_inductor.inductor.blocks import in_blocks, mixes
from coda_inductor.inductor.offline import rewrite_for

aten = torch.ops.aten
SM90 = Settings(target="sm_90a")


def rewritten(f: Callable[..., Any], *args: Tensor) -> tuple[fx.GraphModule, list[tuple[int, ...]]]:
    """f's graph with the sums over tokens beside its sums over features in blocks; the sizes of all that is summed."""
    with torch.no_grad():
        module = make_fx(f, tracing_mode="fake")(*args)
    sums = list(module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList))
    in_blocks(module.graph, [n for n in sums if -1 in n.args[1] or 1 in n.args[1]])
    module.graph.eliminate_dead_code()
    module.graph.lint()
    left = module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    return module, [tuple(n.args[0].meta["val"].shape) for n in left]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keep", [True, False])
def test_the_sum_is_the_same(dtype: torch.dtype, keep: bool) -> None:
    """Also of a view of what the statistic reads, in whatever shape; bfloat16 is added up in float32."""
    x, w = torch.randn(16, 512, 10, 64, dtype=dtype), torch.randn(16, 512, 10, 64, dtype=dtype)

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x * w).view(8192, 640).sum(-1), x.view(8192, 640).sum([0], keepdim=keep)

    module, summed = rewritten(f, x, w)
    assert summed == [(8192, 640), (64, 128, 640), (64, 640)]
    statistic, total = module(x, w)
    exact = x.view(8192, 640).double().sum([0], keepdim=keep)
    assert torch.equal(statistic, f(x, w)[0]) and total.dtype == dtype and total.shape == exact.shape
    assert (total - exact).abs().max() <= (1e-10 if dtype == torch.float64 else 2**-8 * exact.abs().max())


def two(*sizes: int) -> tuple[Tensor, Tensor]:
    return torch.empty(*sizes, device="meta"), torch.empty(*sizes, device="meta")


def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (x * w).sum(-1), x.sum([0])


X, W = two(8192, 1024)
LEFT: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "nothing beside it": (lambda x, w: (w.sum(-1), x.sum([0])), (X, W)),
    "of another value": (lambda x, w: ((x * w).sum(-1), (x + 1).sum([0])), (X, W)),
    "columns turned": (lambda x, w: ((x * w).sum(-1), x.t().sum([0])), (X, W)),
    "over a part of the tokens": (lambda x, w: ((x * w).sum(-1), x.view(64, 128, 1024).sum([0])), (X, W)),
    "little": (both, two(8192, 512)),
    "as many columns as tokens": (both, two(4096, 4096)),
    "a prime number of tokens": (both, two(8191, 1024)),
    "transposed in memory": (both, (X.view(1024, 8192).t(), W)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(name: str) -> None:
    f, args = LEFT[name]
    with torch.no_grad():
        before = make_fx(f, tracing_mode="fake")(*args)
    module, _ = rewritten(f, *args)
    assert [n.target for n in module.graph.nodes] == [n.target for n in before.graph.nodes]


def test_nothing_changes_where_inductor_does_not_mix() -> None:
    with torch._inductor.config.patch({"triton.mix_order_reduction": False}):
        assert not mixes(8192, 1024)
        _, summed = rewritten(both, X, W)
    assert mixes(8192, 1024) and summed == [(8192, 1024)] * 2


class Ours(CustomGraphPass):
    """The rewriting, before Inductor's own schedule is asked for."""

    def __call__(self, graph: fx.Graph) -> None:
        rewrite_for(graph, SM90)

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize("name", ["vit_hf", "vit_l"])
def test_inductor_schedules_what_explain_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside attention's backward, in a real model at its real width: one kernel of statistics, which Inductor mixes
    with no bias's gradient."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    bench = importlib.import_module("inductor_bytes")

    def built() -> tuple[torch.nn.Module, tuple[Any, ...]]:
        model, args = coverage_models.build(name, 2)
        return coverage_models.Loss(name, model), args

    launching.register()
    with torch._inductor.config.patch(joint_custom_pre_pass=Ours()):
        own = bench.own_schedule(*built(), "train")
    model, args = built()
    (graph,) = explain(model, args, {}, "train", SM90)["graphs"]
    said = [p["bytes"] for p in graph["passes"] if "convert_element_type sum" in p["what"] or "mul sum" in p["what"]]
    ours = [row["bytes"] for row in own if any(o.startswith("sum_dim_int_list") for o in row["origins"])]
    tensors = 2 * args[0].shape[0] * 197 * 1024  # bytes of q, k or v, or a gradient
    for n in (6, 1) if name == "vit_hf" else (9, 3):
        wanted = 6 if n == 1 else 2
        assert [sum(b == pytest.approx(n * tensors, rel=0.02) for b in found) for found in (said, ours)] == [wanted] * 2
