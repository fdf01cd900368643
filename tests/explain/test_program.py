"""graph: the steps of a program in order, their formulas and names, checked against the model's own arithmetic."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from conditioned_blocks import Chunks, inputs, model
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain.listing import render
from coda_inductor.explain.steps import program
from coda_inductor.passes import plain

D, FF, TOKENS = 32, 48, 12
REFERENCE = Settings(target="reference")


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Half(nn.Module):
    """What stands between attention and the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.o, self.down = nn.Linear(D, D, bias=False), nn.Linear(FF, D, bias=False)
        self.gate, self.up = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.norm = RMSNorm()

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        h = x + self.o(a)
        n = self.norm(h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


def facts_of(model: nn.Module, mode: Literal["infer", "train"] = "infer") -> dict[str, Any]:
    facts = program(model, (torch.randn(TOKENS, D), torch.randn(TOKENS, D)), {}, mode, REFERENCE)
    assert json.loads(json.dumps(facts)) == facts
    return facts


@pytest.fixture(scope="module")
def graph() -> dict[str, Any]:
    only: dict[str, Any]
    (only,) = facts_of(Half())["graphs"]
    return only


def test_steps_before_and_after(graph: dict[str, Any]) -> None:
    assert [s["kind"] for s in graph["before"]] == ["gemm", "pass", "gemm", "gemm", "pass", "gemm", "pass"]
    assert [s["time"] for s in graph["before"]] == [1, 1.2, 2, 2, 2.2, 3, 3.2]
    assert [(s["kind"], s["time"], s["laws"]) for s in graph["after"]] == [
        ("gemm", 1, []), ("gemm", 2, ["bilinearity"]), ("gemm", 3, []),
    ]  # fmt: skip
    assert graph["untouched"] == ""


def test_names_are_the_users_and_the_steps(graph: dict[str, Any]) -> None:
    o, gate_up, down = graph["after"]
    assert o["products"] == [{"name": "acc0", "a": "a", "b": "o.weight.T", "k": str(D)}]
    assert [(p["name"], p["b"]) for p in gate_up["products"]] == [("acc1a", "gate.weight.T"), ("acc1b", "up.weight.T")]
    assert sorted(o["loads"]) == ["norm.weight", "x"] and gate_up["loads"] == [o["sums"][0]["name"]] == ["s0"]
    assert gate_up["products"][0]["a"] in [s["name"] for s in o["stores"]]
    assert [s["to"] for s in down["stores"]] == [["output"]] and down["products"][0]["a"] == "y1"


def evaluate(formula: str, values: dict[str, Tensor]) -> Tensor:
    """A formula of the listing as Python over `values`."""
    names = "|".join(re.escape(name) for name in sorted(values, key=len, reverse=True))
    formula = re.sub(rf"(?<![\w.])({names})(?![\w.])", r"v['\1']", formula)
    formula = re.sub(r"\^(-?\d+)/(\d+)", r"**(\1/\2)", formula).replace("^", "**")
    result: Tensor = eval(formula, {"v": values, "exp": torch.exp})
    return result


def test_formulas_compute_the_model(graph: dict[str, Any]) -> None:
    """Step by step; the last store is the model's output."""
    model, a, x = Half(), torch.randn(TOKENS, D), torch.randn(TOKENS, D)
    values: dict[str, Tensor] = {"a": a, "x": x, **dict(model.named_parameters())}
    for step in graph["after"]:
        for p in step["products"]:
            values[p["name"]] = values[p["a"]] @ values[p["b"].removesuffix(".T")].T
        results = {s["name"]: evaluate(s["formula"], values) for s in step["stores"]}
        results |= {s["name"]: evaluate(s["formula"], values).sum(1, keepdim=True) for s in step["sums"]}
        values |= results
    torch.testing.assert_close(results[graph["after"][-1]["stores"][0]["name"]], model(a, x))


def test_laws_say_before_and_after(graph: dict[str, Any]) -> None:
    assert [(law["law"], law["at"]) for law in graph["laws"]] == [("bilinearity", "acc1a"), ("bilinearity", "acc1b")]
    law = graph["laws"][0]
    assert law["before"].endswith(" @ gate.weight)") and law["after"].endswith(" @ gate.weight)")
    assert "s0" in law["before"] and law["after"].startswith("(1e-05 + 0.03125*s0)^-1/2*(y0")


def test_training_graphs_are_listed_with_their_backward() -> None:
    (graph,) = facts_of(Half(), "train")["graphs"]
    assert graph["kind"] == "joint" and graph["untouched"] == ""
    assert graph["after"] != graph["before"] and sum(s["kind"] == "gemm" for s in graph["before"]) == 4 + 4 + 3


@pytest.mark.parametrize("before", [False, True])
def test_text_holds_every_step(before: bool) -> None:
    text = render(facts_of(Half()), before)
    assert text.count("\n[") == (7 if before else 3)
    assert ("sum over N of" in text) is not before and ("nodes add pow_1 mean" in text) is before
    assert ("4 products in 3 kernels (3 of them Regions), 0 memory-bound" in text) is not before
    assert ("laws that fired" in text) is not before


def test_a_root_is_named_by_the_square_that_is_read() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return torch.relu(x @ w).square() @ v

    args = tuple(torch.randn(s, dtype=torch.bfloat16).requires_grad_() for s in ((16, 32), (32, 48), (48, 32)))
    (graph,) = program(f, args, {}, "train", REFERENCE)["graphs"]
    (step,) = (s for s in graph["after"] if s["laws"] == ["root"])
    assert "y0" in step["loads"] and "sqrt(y0)" in step["stores"][0]["formula"]


def test_opaque_operations_and_passes_around_attention() -> None:
    def attend(q: Tensor, w: Tensor) -> Tensor:
        heads = (q @ w).view(2, 8, 2, 16).transpose(1, 2)
        out: Tensor = F.scaled_dot_product_attention(heads.cumsum(2), heads, heads)
        return out

    args = (torch.empty(16, 32, dtype=torch.bfloat16), torch.empty(32, 32, dtype=torch.bfloat16))
    (graph,) = program(attend, args, {}, "infer", REFERENCE)["graphs"]
    assert [(s["kind"], s["time"]) for s in graph["after"]] == [("gemm", 1), ("pass", 1.2), ("opaque", 1.9)]
    assert "attention" in graph["after"][2]["what"] and graph["after"][2]["loads"] == ["p1", "acc0"]
    assert graph["untouched"] == "nothing follows a product that an epilogue could do"


def test_a_graph_without_products_is_said_to_have_none() -> None:
    (graph,) = program(torch.relu, (torch.empty(8, 8),), {}, "infer", REFERENCE)["graphs"]
    assert graph["untouched"] == "it has no matrix product" and [s["kind"] for s in graph["after"]] == ["pass"]


def test_sums_of_samples_say_so() -> None:
    """The gradients of what each image's condition shifts and gates."""
    facts = program(model(Chunks), inputs(2, 128), {}, "train", REFERENCE)
    over = {s["over"] for step in facts["graphs"][0]["after"] for s in step.get("sums", ())}
    assert "each 128 of M" in over and {"M", "N"} & over
    assert "sum over each 128 of M of " in render(facts)


class Head(nn.Module):
    """A head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 208, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), y)


@pytest.mark.parametrize("disable", ["", "bare", "loss"])
def test_a_region_stands_in_each_block_of_rows(monkeypatch: pytest.MonkeyPatch, disable: str) -> None:
    """Under names of its own, of the block's rows; and the gradients of the weight are products that are added."""
    monkeypatch.setattr(plain, "ADDED_LEAST", 8)
    x, y = torch.randn(600, 16, dtype=torch.bfloat16, requires_grad=True), torch.randint(0, 208, (600,))
    settings = Settings(target="reference", chunk=128, disable=frozenset(filter(None, [disable])))
    facts = program(Head().bfloat16(), (x, y), {}, "train", settings)
    (graph,) = facts["graphs"]
    regions = [step for step in graph["after"] if "region" in step]
    assert [step["shape"] for step in regions] == ["[128, 208]"] * 4 + ["[88, 208]"]
    assert {step["region"] for step in regions} == {"r0"}
    names = [step["products"][0]["name"] for step in regions]
    assert names == [f"acc{step['id']}" for step in regions] and len({*names}) == 5
    formulas = [step["stores"][0]["formula"] for step in regions]
    assert all(name in formula for name, formula in zip(names, formulas, strict=True))
    added = [s for s in graph["after"] if [x["type"] for x in s["stores"]] == ["float32[208, 16]"]]
    assert [len(step["loads"]) for step in added] == [0, 1, 1, 1, 1]
    assert sum("digest" in step for step in added) == (0 if disable == "bare" else 4)
    assert render(facts)
