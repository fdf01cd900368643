"""explain --mode infer on common models at real widths: what is left is what stands before the first product or after
the last one, whatever the depth, so a deep model is covered all but for these."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from coverage_models import Loss, build

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

SM_90A = Settings(target="sm_90a")
FIRST = "no product's result is read here"  # embedding or patches, and the first norm: no product of ours comes before
LAST = "it needs a sum over the row that its own product is still making"  # a norm that no product of ours reads
SLICED = "nothing of it could be made in an epilogue"  # the statistic of a norm of which only the last token is read


@dataclass(frozen=True)
class Case:
    """`regions` of a layer and beside the layers (the first q, k, v is one less: its norm comes before any product);
    the reasons of what is left; the coverage of two layers, and of all of them."""

    name: str
    regions: tuple[int, int]
    left: tuple[str, ...]
    two: float
    deep: float


CASES = (
    Case("nanogpt", (4, -1), (FIRST, SLICED), 0.86, 0.95),  # at full depth: 0.995
    Case("vit_l", (4, -1), (FIRST, LAST), 0.84, 0.95),  # 0.988
    Case("vit_hf", (6, -3), (FIRST, LAST), 0.83, 0.95),  # 0.977
    Case("bert_large", (6, -2), (FIRST, LAST), 0.86, 0.90),  # 0.957
    Case("clip_l", (6, -3), (FIRST,), 0.91, 0.90),  # 0.993
    Case("gpt2", (4, -1), (FIRST, LAST), 0.83, 0.90),  # 0.994
)


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_what_is_left_stands_outside_the_layers(case: Case) -> None:
    for layers in (2, 3):
        model, args = build(case.name, layers)
        report = explain(model, args, {}, "infer", SM_90A)
        totals, (graph,) = report["totals"], report["graphs"]
        per_layer, beside = case.regions
        assert totals["regions"] == per_layer * layers + beside
        assert sorted(c["reason"] for c in graph["refused"]) == sorted(case.left)
        assert all(c["source"].rpartition(":")[2].isdigit() for c in (*graph["refused"], *graph["passes"]))
        assert totals["passes_left"] == len(case.left)
        assert totals["coverage"] >= case.two


@pytest.mark.parametrize("case", [c for c in CASES if c.name == "vit_l"], ids=lambda c: c.name)
def test_full_depth(case: Case) -> None:
    model, args = build(case.name)
    totals = explain(model, args, {}, "infer", SM_90A)["totals"]
    assert totals["coverage"] >= case.deep


@pytest.mark.parametrize(
    ("name", "first", "passes"),
    [("vit_hf", 2, 3), ("vit_l", 2, 2), ("bert_large", 3, 3), ("gpt2", 2, 2), ("llama", 2, 3)],
)
def test_passes_of_a_layer_left_in_training(name: str, first: int, passes: int) -> None:
    """All beside attention: the norm's statistics, the gradients of the biases of q, k and v, rotary embeddings turned
    back, and for one weight their gradients side by side."""
    left, covered = [], 0.0
    for layers in (first, first + 1):
        model, args = build(name, layers)
        totals = explain(Loss(name, model), args, {}, "train", SM_90A)["totals"]
        left.append(totals["passes_left"])
        covered = totals["coverage"]
    assert left[1] == left[0] + passes
    assert covered >= {"vit_hf": 0.85, "vit_l": 0.75, "bert_large": 0.75}.get(name, 0.0)
