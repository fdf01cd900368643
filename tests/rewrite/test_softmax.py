"""A loss's normaliser in the epilogue of its head: what is shortened, that nothing else changes, that it is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, pretend, run
from evaluate import Read, captured
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render
from coda_inductor.explain.offline import rewrite_for
from coda_inductor.inductor.joint import rewrite
from coda_inductor.patterns.graph import aten
from coda_inductor.plan.built import Built
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits
from coda_inductor.rewrite.softmax import shorten, written_out
from coda_inductor.tuning.verdicts import Decisions

TOKENS, WIDTH, WORDS = 320, 64, 152
LSE = aten.logsumexp.default

pytestmark = pytest.mark.usefixtures("interpreted")


class Classifier(nn.Module):
    """A layer, a head, and the mean cross-entropy of its scores in float32 or wider; some tokens are not counted."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = self.head(F.silu(self.layer(x)))
        return F.cross_entropy(z.float() if z.dtype != torch.float64 else z, labels)


def inputs(dtype: torch.dtype = torch.float64, words: int = WORDS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, words, (TOKENS,))
    labels[::7] = -100
    return torch.randn(TOKENS, WIDTH).to(dtype), labels


def results(model: nn.Module, x: Tensor, labels: Tensor, **compile_with: Any) -> tuple[list[Tensor], list[set[str]]]:
    """The loss and all gradients, and the laws of each Region; eager without options."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    if compile_with:
        ran = run(model, x, labels, grad=True, **compile_with)
        loss, laws = ran.output, [set(s.laws) for r in ran.reports for s in r.sites]
    else:
        loss, laws = model(x, labels), []
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())], laws  # type: ignore[list-item,union-attr]


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_loss_and_gradients(scale: float) -> None:
    """Also where exp of a score would be infinite."""
    model = Classifier().double()
    with torch.no_grad():
        model.head.weight *= scale
    wanted, _ = results(model, *inputs())
    for off, law in (({"disable": "loss"}, {"softmax"}), ({"disable": "softmax"}, set())):
        found, laws = results(model, *inputs(), options={**REFERENCE, "strict": True, **off})
        assert all(distance(f, w) < 1e-10 for f, w in zip(found, wanted, strict=True))
        assert set().union(*laws) == law


def test_in_bf16_no_worse_than_eager() -> None:
    model, x = Classifier().double(), inputs()
    exact, _ = results(model, *x)
    model, x = model.bfloat16(), inputs(torch.bfloat16)
    eager, _ = results(model, *x)
    found, laws = results(model, *x, options={**REFERENCE, "strict": True, "disable": "loss"})
    assert {"softmax"} in laws
    for f, e, w in zip(found, eager, exact, strict=True):
        assert distance(f, w) <= 1.5 * distance(e, w)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_in_float32_the_gradients_of_large_scores_are_a_rounding_worse(scale: float) -> None:
    """The normaliser is rounded as a number of the scores' size, 300 here; without the law differences are."""
    model, x = Classifier(), inputs(torch.float32)
    with torch.no_grad():
        model.head.weight *= scale
    eager, _ = results(model, *x)
    found, laws = results(model, *x, options={**REFERENCE, "strict": True, "disable": "loss"})
    exact, _ = results(model.double(), x[0].double(), x[1])
    assert {"softmax"} in laws
    for f, e, w in zip(found[1:], eager[1:], exact[1:], strict=True):  # the loss is one number: chance
        assert distance(f, w) <= 2.5 * distance(e, w)


def test_the_normaliser_is_that_of_the_stored_scores() -> None:
    """They are rounded before it is taken, and only then: the Region's other values are as they leave the product."""
    for dtype, count in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float64, 0)):
        ran = run(Classifier().to(dtype), *inputs(dtype), options={**REFERENCE, "strict": True})
        (region,) = (s.region for s in ran.reports[0].sites if "softmax" in s.laws)
        rounded = [let.name for let in region.lets if let.op in ("bf16", "f16")]
        assert len(rounded) == count
        assert region.reductions[0].value == (rounded or ["acc0"])[0] and region.stores[0].value == "acc0"


def test_through_a_contest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other side of the contest is what the user wrote: a maximum and a sum, no operation of ours."""
    pretend(monkeypatch, tmp_path, inductor=True)
    compiled = list[str]()
    from coda_inductor.tuning import benchmark

    real = benchmark._compile

    def noted(module: Any, tensors: list[Tensor], longest: int) -> Any:
        compiled.append(module.code)
        return real(module, tensors, longest)

    monkeypatch.setattr(benchmark, "_compile", noted)
    model, x = Classifier().bfloat16(), inputs(torch.bfloat16)
    wanted, _ = results(model, *x)
    found, laws = results(model, *x, options={"strict": True})
    assert {"softmax"} in laws and all(distance(f, w) < 2e-2 for f, w in zip(found, wanted, strict=True))
    (baseline,) = (code for code in compiled if "amax" in code)
    assert "exp" in baseline and "logsumexp" not in baseline


OFF = Settings(target="reference", disable=frozenset({"softmax", "elementwise"}))


def test_what_no_epilogue_takes_is_written_as_it_was() -> None:
    """151 columns, and a vector of as many numbers of 16 bits: no kernel reads that."""
    model, x = Classifier(151), inputs(torch.bfloat16, 151)
    model.head = nn.Linear(WIDTH, 151)
    model = model.bfloat16()
    for settings in (Settings(target="sm_90a"), OFF):
        (graph,) = captured(model, *x)
        rewrite_for(graph.graph, settings)
        targets = [n.target for n in graph.graph.nodes]
        assert LSE not in targets and targets.count(aten.amax.default) == targets.count(aten.log.default) == 1
    (graph,) = captured(model, *x)
    before = str(graph.graph)
    normalisers = shorten(graph.graph)
    assert len(normalisers) == 1 and LSE in [n.target for n in graph.graph.nodes]
    normalisers[0].restore()
    assert str(graph.graph) == before


def legal_without(model: Callable[..., Any], *args: Tensor) -> None:
    """The law may not cost a Region that is there without it."""
    found = []
    for disable in (frozenset[str](), frozenset({"softmax"})):
        (graph,) = captured(model, *args)
        report = rewrite_for(graph.graph, Settings(target="sm_90a", disable=disable))
        found.append([s.region.text for s in report.sites])
        names = {n.name for n in graph.graph.nodes}
        assert not any("logsumexp" in name for s in report.sites for name in s.absorbed if name not in names)
    assert found[0] == found[1] and found[0]


def test_a_region_that_cannot_take_it_stays_without_it() -> None:
    """A logsumexp beside two products is illegal, and over the tokens it is none of a row."""
    h, y = torch.randn(320, 64).bfloat16(), torch.randint(0, 152, (320,))
    w, v = (nn.Linear(64, 152, bias=False).bfloat16() for _ in range(2))
    legal_without(lambda h, y: F.cross_entropy((w(h) * F.silu(v(h))).float(), y), h, y)
    legal_without(lambda h: F.log_softmax(F.silu(w(h)).float(), 0)[:5].sum(), h)


def test_a_region_that_loses_with_it_is_tried_without_it() -> None:
    """And the contest is asked again, about the graph as it was."""
    asked = list[set[str]]()

    def decide(plan: Plan, builts: list[Built]) -> Limits:
        with_it = [b for b in builts if any(r.of == "logsumexp" for r in b.region.reductions)]
        asked.append({r.of for b in builts for r in b.region.reductions})
        return Limits({acc.bit: "slower" for b in with_it for acc in b.draft.space.accs})

    w = nn.Linear(64, 152).bfloat16()
    (graph,) = captured(lambda h: (F.log_softmax((z := w(h)).float(), -1), F.silu(z)), torch.randn(320, 64).bfloat16())
    report = rewrite(graph.graph, Settings(), decisions=Decisions(decide=decide))
    assert asked == [{"logsumexp"}, set()] and len(report.sites) == 1
    assert LSE not in [n.target for n in graph.graph.nodes]


@pytest.mark.parametrize("dim", [-1, 0])
def test_what_another_region_reads(dim: int) -> None:
    """The normaliser is taken where its scores are made, or the graph is as it was: right in any case."""
    torch.manual_seed(0)
    a, b = (nn.Linear(WIDTH, WORDS, bias=False).double() for _ in range(2))
    p = nn.ParameterList(torch.randn(19, 8, dtype=torch.float64) for _ in range(3))
    x, teacher = inputs()[0], torch.randn(TOKENS, WORDS, dtype=torch.float64)

    def logs() -> Tensor:
        return sum((F.log_softmax(q, dim) for q in p), torch.zeros(()))

    for f in (
        lambda x: b(F.silu((a(x).view(TOKENS, 19, 8) + logs()).view(TOKENS, WORDS)) @ a.weight),
        lambda x: F.silu((a(x).view(TOKENS, 19, 8) + F.log_softmax(p[0], dim)).view(TOKENS, WORDS)),
        lambda x: F.silu((a(x).view(TOKENS, 19, 8) + (p[0] - p[0].amax(dim, True) + p[1] - p[2])).view(TOKENS, WORDS)),
        lambda x: F.silu((a(x).view(TOKENS, 19, 8) * (p[0] - p[0].amax(dim, True)).exp()).view(TOKENS, WORDS)),
        lambda x: F.log_softmax(teacher, dim) * a(x),
        lambda x: F.mse_loss(a(x), F.log_softmax(teacher, dim)),
        lambda x: F.silu(a(x)) * F.log_softmax(b(x), dim),
    ):
        with torch.no_grad():
            wanted = f(x)
            assert distance(run(f, x, options={**REFERENCE, "strict": True}).output, wanted) < 1e-12


@pytest.mark.parametrize(
    "cap", [lambda z: z.float(), lambda z: 30 * torch.tanh(z.float() / 30), lambda z: z.float() * 1.5]
)
def test_no_loss_is_negative(cap: Callable[[Tensor], Tensor]) -> None:
    """In bf16, of labels that are nearly certain: the normaliser belongs to the very scores that it is taken from."""
    torch.manual_seed(0)
    head, x = nn.Linear(WIDTH, WORDS, bias=False).bfloat16(), 8 * torch.randn(TOKENS, WIDTH).bfloat16()

    def losses(x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Without labels the capped scores are read as they are, and stored in float32."""
        z = cap(head(x))
        return F.cross_entropy(z, z.argmax(-1) if labels is None else labels, reduction="none")

    with torch.no_grad():
        certain = cap(head(x)).argmax(-1)
        for given in ((x,), (x, certain)):
            found = run(losses, *given, options={**REFERENCE, "strict": True}).output
            assert float(found.min()) > -1e-3


def scores(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def log_sum(s: Tensor, dim: int = -1) -> Tensor:
    return s.exp().sum(dim, keepdim=True).log()


@pytest.mark.parametrize(
    ("f", "count"),
    [
        (lambda x: F.log_softmax(x, -1), 1),
        (lambda x: (y := F.log_softmax(x, -1)) + y.exp(), 1),
        (lambda x: F.log_softmax(x, 0), 1),
        (lambda x: F.log_softmax(F.log_softmax(x, -1), -1), 1),
        (lambda x: F.log_softmax(30 * torch.tanh(x / 30), -1), 1),
        (lambda x: F.log_softmax(x * x.mean(0), -1), 0),  # not of the product's numbers alone
        (lambda x: F.log_softmax(x.view(3, 4, 12)[None], -1), 1),
        (lambda x: F.softmax(x, -1), 0),
        (lambda x: (s := scores(x)) - log_sum(s), 1),
        (lambda x: ((s := scores(x)) - log_sum(s), s), 0),  # read by others
        (lambda x: ((s := scores(x)) - (t := log_sum(s)), t), 0),
        (lambda x: ((s := x - (m := x.amax(-1, keepdim=True))) - log_sum(s), m), 0),
        (lambda x: (s := scores(x)) - log_sum(s, 0), 0),  # over another dimension
        (lambda x: (s := x - x.t().amax(-1, keepdim=True)) - log_sum(s), 0),  # of something else
        (lambda x: torch.sub(s := scores(x), log_sum(s), alpha=2), 0),
        (lambda x: log_sum(s := scores(x)) - s, 0),
    ],
)
def test_what_is_shortened(f: Callable[..., Any], count: int) -> None:
    """And the shorter graph computes the same, also when it is written out again."""
    x, w = torch.randn(12, 8, dtype=torch.float64) * 100, torch.randn(8, 12, dtype=torch.float64)
    for short in (False, True):
        (graph,) = captured(lambda x, w: f(x @ w), x, w)
        assert len(shorten(graph.graph)) == count
        if not short:
            written_out(graph.graph)
        assert [n.target for n in graph.graph.nodes].count(LSE) == (count if short else 0)
        graph.graph.lint()
        made = torch.fx.GraphModule(torch.nn.Module(), graph.graph)(*graph.inputs)
        wanted = f(x @ w)
        for found, want in zip(made, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            assert torch.allclose(found, want, rtol=1e-12, atol=1e-12)


def test_the_firing_is_an_equality() -> None:
    (graph,) = captured(
        lambda x, w: F.log_softmax(x @ w, -1), *(torch.randn(s, dtype=torch.float64) for s in ((12, 8), (8, 24)))
    )
    (normaliser,) = shorten(graph.graph)
    read = Read(graph)
    terms, term = read.lifted.terms, read.lifted.term
    before, after = terms.add(term[normaliser.maximum], term[normaliser.log]), term[normaliser.node]
    assert after.name == "logsumexp" and before is not after
    assert float((read.value(after) - read.value(before)).abs().max()) < 1e-12


def test_it_is_said() -> None:
    model, args, off = Classifier().bfloat16(), inputs(torch.bfloat16), frozenset({"softmax"})
    facts = explain(model, args, {}, "train", Settings(target="sm_90a"))
    (region,) = (r for r in facts["graphs"][0]["regions"] if "softmax" in r["laws"])
    assert region["reductions"] == [f"f32[{TOKENS}]"] and "softmax" in render(facts)
    without = explain(model, args, {}, "train", Settings(target="sm_90a", disable=off))
    read = 2 * TOKENS * WORDS
    assert facts["totals"]["bytes_after"] < without["totals"]["bytes_after"] - 0.9 * read
    assert facts["totals"]["passes_left"] == without["totals"]["passes_left"] - 1
