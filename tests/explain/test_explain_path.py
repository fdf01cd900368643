"""What explain says is what a compile does: the same refusals, the same graph, on whatever device the model is."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coda_inductor.codegen import legality
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Let, Operand, Product, Region, Store
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.capture import capture, load
from coda_inductor.inductor import joint_pass

SM_90A = Settings(target="sm_90a")
BF16 = torch.bfloat16
X, W = torch.empty(512, 256, dtype=BF16), torch.empty(256, 256, dtype=BF16)


def relu(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


REFUSED: dict[str, tuple[Settings, dict[str, Any], tuple[Tensor, Tensor]]] = {
    "switched off": (Settings(target="sm_90a", enabled=False), {}, (X, W)),
    "the wrapper is in C++": (SM_90A, {"cpp_wrapper": True}, (X, W)),
    "the wrapper is in C++, on torch": (Settings(target="reference"), {"cpp_wrapper": True}, (X, W)),
    "dtype": (SM_90A, {}, (X.float(), W.float())),
    "few tokens": (SM_90A, {}, (X[:16], W)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_a_compile_refuses_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, options, args = REFUSED[name]
    graphs: list[fx.Graph] = []
    capture(relu, args, {}, "infer", graphs.append)
    monkeypatch.setattr(joint_pass, "DEVICE", "cpu")
    with inductor_config.patch(options):
        with pytest.raises(Unsupported) as refusal:
            joint_pass.resolve(settings, graphs[0])
        report = explain(relu, args, {}, "infer", settings)
    (graph,) = report["graphs"]
    assert graph["refused"] == [{"node": "", "reason": str(refusal.value), "source": ""}]
    assert report["totals"]["regions"] == report["totals"]["coverage"] == 0


def test_a_region_whose_rows_are_known_when_it_runs_is_refused() -> None:
    """No contest can measure it."""

    def chosen(x: Tensor, mask: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x[mask] @ w), torch.exp(x @ v)

    args = X, torch.ones(512, dtype=torch.bool), W, W.clone()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explain(chosen, args, {}, "infer", SM_90A)
    (graph,) = report["graphs"]
    assert [r["m"] for r in graph["regions"]] == ["512"]
    assert [p for p in graph["passes"] if "is known only when the model runs" in p["why"]]


def test_the_users_own_pass_runs_first() -> None:
    def theirs(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = torch.ops.aten.cumsum.default
                node.args = (*node.args, 1)

    with inductor_config.patch(joint_custom_pre_pass=theirs):
        report = explain(relu, (X, W), {}, "infer", SM_90A)
    assert report["totals"]["regions"] == 0 and "cumsum" in report["graphs"][0]["refused"][0]["reason"]


def test_under_a_memory_budget_a_region_costs_something() -> None:
    found = list[bool]()
    with functorch_config.patch(activation_memory_budget=0.5):
        capture(nn.Linear(8, 8), (torch.empty(4, 8),), {}, "train",
                lambda graph: found.append(functorch_config.is_non_builtin_to_include))  # fmt: skip
    assert found == [True]


META = """
import torch
from torch import nn

class model(nn.Module):
    def __init__(self):
        super().__init__()
        first, last = nn.Linear(256, 1024), nn.Linear(1024, 512)
        self.layers, self.again = nn.Sequential(first, nn.RMSNorm(1024), last), nn.Linear(1024, 512)
        self.again.weight = last.weight
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.layers(x)

with torch.device("meta"):
    made, given = model(), torch.empty(512, 256, dtype=torch.bfloat16)

def on_cpu():
    return model(), (torch.empty(512, 256, dtype=torch.bfloat16),)

def in_context():
    with torch.device("meta"):
        return on_cpu()

def by_name():
    return model().to("meta"), (torch.empty(512, 256, dtype=torch.bfloat16, device=torch.device("meta")),)

def at_import():
    return made, (given,)
"""


@pytest.fixture
def meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_meta_model.py").write_text(META)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "a_meta_model", raising=False)
    return "a_meta_model"


@pytest.mark.parametrize("name", ["in_context", "by_name", "at_import"])
def test_a_model_on_the_meta_device_is_explained_as_any_other(meta: str, name: str) -> None:
    def facts(of: str) -> Any:
        return explain(*load(f"{meta}:{of}"), "train", SM_90A)["totals"]

    assert facts(name) == facts("on_cpu") and facts("on_cpu")["regions"] > 0


def test_what_was_one_parameter_on_meta_stays_one(meta: str) -> None:
    model: Any = load(f"{meta}:at_import")[0]
    assert model.again.weight is model.layers[2].weight and model.again.weight.requires_grad
    assert not any(p.is_meta for p in model.parameters())


def many_tiles(loads: int, stores: int) -> Region:
    operands = tuple(Operand(f"t{i}", "tile", "bf16") for i in range(loads))
    lets, last = list[Let](), "acc"
    for o in operands:
        lets.append(Let(f"y{o.name}", "mul", (last, o.name)))
        last = lets[-1].name
    out = tuple(Store(last, "f32") for _ in range(stores))
    return Region(4096, "bf16", (Product("acc", 0, 1, 4096, "nk"),), operands, tuple(lets), out, ())


def test_shared_memory_is_refused_in_words() -> None:
    """What, why, and what the user can do; no name of a tile."""
    with pytest.raises(Unsupported) as refusal:
        legality.check(many_tiles(9, 2))
    said = refusal.value.said
    assert said.startswith("beside the product it reads 9 matrices of 16 bits and writes 2 matrices of float32, which")
    assert "shared memory for" in said and "checkpoint the layer" in said
    assert not re.search(r"\d+x\d+(pp|co)", said)


def test_a_cross_entropy_counts_no_zeros() -> None:
    """Inductor writes none of [tokens, vocabulary]; nor does its gradient, which reads the logits and writes theirs."""
    rows, names = 512, 4096
    tile = rows * names

    def loss(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy((x @ w).float(), t)

    x, w = torch.empty(rows, 256, dtype=BF16), torch.empty(256, names, dtype=BF16, requires_grad=True)
    report = explain(loss, (x, w, torch.zeros(rows, dtype=torch.long)), {}, "train", SM_90A)
    before = report["totals"]["bytes_before"]
    assert before == pytest.approx(2 * tile + 4 * tile, rel=0.02)  # the loss reads 16 bits, its gradient writes as many
    assert not [p for p in report["graphs"][0]["passes"] if p["what"] == "full"]
