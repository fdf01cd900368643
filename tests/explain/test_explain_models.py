"""explain on real models at real widths, for the target, without a GPU: what is covered, what is left, and why."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from coverage_models import llama_of
from torch import Tensor, fx, nn

from coda_inductor.codegen.target import TARGETS
from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render
from coda_inductor.explain.capture import capture
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.schedule.model import kernels

SM_90A, REFERENCE = Settings(target="sm_90a"), Settings(target="reference")
LAYERS = 2


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, Tensor]:
    return llama_of(LAYERS)


@pytest.mark.parametrize("settings", [SM_90A, REFERENCE], ids=lambda s: s.target)
def test_llama_at_real_widths(llama: tuple[nn.Module, Tensor], settings: Settings) -> None:
    report = explain(llama[0], (llama[1],), {}, "infer", settings)
    totals, (graph,) = report["totals"], report["graphs"]
    assert report["target"] == settings.target
    assert totals["coverage"] >= 0.88  # two layers read the embedding three times
    assert totals["regions"] == 6 * LAYERS  # and lm_head, less the first v: no product feeds its norm
    assert totals["passes_left"] == len(graph["passes"]) == 1  # the first norm
    assert [p["why"] for p in graph["passes"]] == ["no product's result is read here"]
    assert {c["reason"] for c in graph["refused"]} == {p["why"] for p in graph["passes"]}
    heads = [r for r in graph["regions"] if "first 64 of 128" in r["products"][0]]
    assert len(heads) == 2 * LAYERS and {r["loads"][-1] for r in heads} == {"bf16[8192, 128]"}  # cosines and sines
    text = render(report)
    assert text.startswith(f"for {settings.target}: 12 regions")
    assert "transformers/models/llama/modeling_llama.py" in text and "site-packages" not in text


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, row in TARGETS.items() if not row.tested])
def test_llama_for_a_target_that_no_kernel_was_run_on(llama: tuple[nn.Module, Tensor], name: Any) -> None:
    """What is derived is the same, as far as its tiles hold it; the text says what is not known."""
    report, tested = (explain(llama[0], (llama[1],), {}, "infer", Settings(target=of)) for of in (name, "sm_90a"))
    assert report["totals"] == tested["totals"] and report["graphs"] == tested["graphs"]
    assert tested["estimates"] and not report["estimates"]  # of bandwidths that were measured
    assert render(report).startswith(f"for {name} (compiled, not yet run on such a card): 12 regions")
    assert "not yet run" not in render(tested)


def test_llama_of_16_layers_is_covered() -> None:
    model, ids = llama_of(16)
    start = time.perf_counter()
    totals = explain(model, (ids,), {}, "infer", SM_90A)["totals"]
    assert totals["coverage"] >= 0.985 and totals["passes_left"] == 1 and totals["regions"] == 96
    assert time.perf_counter() - start < 30


def module_of(node: fx.Node) -> str:
    """The innermost module that made the node."""
    stack = node.meta.get("nn_module_stack") or {}
    return str([*stack.values()][-1][0]) if stack else ""


def test_no_pass_stands_between_the_products_of_a_llama_layer(llama: tuple[nn.Module, Tensor]) -> None:
    left: set[str] = set()

    def on_graph(graph: fx.Graph) -> None:
        rewrite_for(graph, SM_90A)
        left.update(module_of(n) for kernel in kernels(graph) for n in kernel.nodes)

    capture(llama[0], (llama[1],), {}, "infer", on_graph)
    places = {name.rpartition("layers.")[2] if "layers." in name else name.rpartition(".")[2] for name in left}
    attention = {f"{i}.self_attn" for i in range(LAYERS)}
    allowed = {"", "model", "embed_tokens", "rotary_emb", "0.input_layernorm", *attention}
    assert places <= allowed, places


class Narrow(nn.Module):
    """Widths of which a weight's rows are no multiple of 16 bytes, which are copied, or rows that are returned."""

    def __init__(self, width: int = 1028) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 256, bias=False), nn.Linear(256, width, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.down(x)), torch.relu(self.up(y))


def test_what_the_target_cannot_do_is_refused_with_its_condition_and_line() -> None:
    model, inputs = Narrow().to(torch.bfloat16), [torch.empty(512, n, dtype=torch.bfloat16) for n in (1028, 256)]
    report = explain(model, inputs, {}, "infer", SM_90A)
    refused = {r["reason"]: r["source"] for r in report["graphs"][0]["refused"]}
    assert report["totals"]["regions"] == 1 and 0 < report["totals"]["coverage"] < 1
    returned = "n = 1028 is not a multiple of 8, and the graph returns what is made, or asks where it lies"
    returned += " (pad the weight, or return less)"
    assert refused.keys() == {returned, "no product's result is read here"}  # the second is of the weight's copy
    assert all(__file__.endswith(source.rsplit(":", 1)[0]) for source in refused.values())
    assert explain(model, inputs, {}, "infer", REFERENCE)["totals"]["coverage"] == 1


def test_few_tokens_are_left_to_inductor_as_when_compiling() -> None:
    model, inputs = Narrow(1024).to(torch.bfloat16), [torch.empty(16, n, dtype=torch.bfloat16) for n in (1024, 256)]
    (graph,) = explain(model, inputs, {}, "infer", SM_90A)["graphs"]
    assert (
        "16 tokens (rows of its products), fewer than 256" in graph["refused"][0]["reason"]
        and len(graph["refused"]) == 1
    )
    assert "16 tokens" in graph["passes"][0]["why"]


def test_a_graph_without_products_has_no_regions() -> None:
    report = explain(lambda x: torch.relu(x) + 1, (torch.empty(1 << 21),), {}, "infer", SM_90A)
    (graph,) = report["graphs"]
    assert graph["regions"] == [] and graph["refused"][0]["reason"] == "it has no matrix product"


def test_what_is_not_understood_is_named() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        return torch.cumsum(x @ w, 1)

    args = (torch.empty(512, 256, dtype=torch.bfloat16), torch.empty(256, 256, dtype=torch.bfloat16))
    (graph,) = explain(f, args, {}, "infer", SM_90A)["graphs"]
    (refused,) = graph["refused"]
    assert refused["reason"] == "aten.cumsum.default is not an operation that we lift"
    assert refused["source"].rpartition(":")[0].endswith("test_explain_models.py")


def test_products_within_one_call_of_torchs_are_named() -> None:
    """nn.TransformerEncoder's fast path in inference: one operation for a layer."""
    layer = nn.TransformerEncoderLayer(256, 4, batch_first=True, dtype=torch.bfloat16)
    x = torch.empty(2, 256, 256, dtype=torch.bfloat16)
    (graph,) = explain(layer, (x,), {}, "infer", SM_90A)["graphs"]
    assert "inside of torch's fast path" in graph["refused"][0]["reason"] and graph["regions"] == []
    assert "set_fastpath_enabled(False)" in graph["refused"][0]["reason"]
    (graph,) = explain(layer, (x,), {}, "train", SM_90A)["graphs"]
    assert graph["regions"]


def test_what_follows_a_batched_product_says_so() -> None:
    """Attention written out: its softmax reads a batched product."""
    mha, x = nn.MultiheadAttention(256, 4, batch_first=True, dtype=torch.bfloat16), torch.empty(2, 256, 256)

    def f(x: Tensor) -> Any:
        return mha(x, x, x, average_attn_weights=False)

    (graph,) = explain(f, (x.bfloat16(),), {}, "train", SM_90A)["graphs"]
    assert "it follows a batched product" in {p["why"] for p in graph["passes"]}


def test_training_llama_at_real_widths() -> None:
    """Deferral and the triangle leave nothing but attention's side, where gradients come through the rotary embedding;
    less is kept than by Inductor, and every Region has a kernel."""
    model, ids = llama_of(3)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    report = explain(Loss(), (ids,), {}, "train", SM_90A)
    totals, (graph,) = report["totals"], report["graphs"]
    assert totals["regions"] == 30 and totals["saved_bytes"] < 0.96 * totals["saved_bytes_inductor"]
    laws = {law for region in graph["regions"] for law in region["laws"]}
    assert laws == {"adjoint", "bilinearity", "triangle"}
    between = [p["source"] for p in graph["passes"] if "activations.py" in p["source"] or ":175" in p["source"]]
    assert len(between) <= 2, between  # statistics beside attention, which carry a line of the product that reads them
