"""Errors inside of a compile, at every stage: Inductor gets the graph as it was, and one warning says what failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import HERE, REFERENCE, close, half, left_to_inductor, raised, run, streams
from pretended_machine import pretended as pretended
from torch import Tensor, fx, nn

from coda_inductor.core import errors
from coda_inductor.core.errors import BrokenInvariant, CodaWarning, warn
from coda_inductor.core.region import parse
from coda_inductor.inductor import joint, notes, settle
from coda_inductor.inductor.joint_pass import JointPass
from coda_inductor.ops import lowering
from coda_inductor.patterns.lift import lift
from coda_inductor.plan import search

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached")


STAGES: list[tuple[str, Any, str]] = [
    ("lift", settle, "lift"),
    ("plan", settle, "plan"),
    ("build", search, "build"),
    ("emit", joint, "emit"),
    ("report", joint, "absorbed"),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("stage", "module", "name"), STAGES, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("error", [RuntimeError("provoked"), BrokenInvariant("provoked"), RecursionError("provoked")])
def test_exception_inside_the_pass(
    monkeypatch: pytest.MonkeyPatch, stage: str, module: Any, name: str, error: Exception
) -> None:
    """Before anything, at every stage, and after the graph has been changed."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setattr(module, name, fail)
    ran = left_to_inductor("provoked (a bug of ours, please report it; CODA_INDUCTOR=0", torch.float64)
    assert HERE in ran[0] and (isinstance(error, BrokenInvariant) or type(error).__name__ in ran[0])
    raised(monkeypatch, HERE, "BrokenInvariant: ", "provoked", "CODA_INDUCTOR=0", dtype=torch.float64)


@pytest.mark.parametrize("after", ["region", "supply", "lint"])
def test_exception_in_the_middle_of_writing_restores_the_graph(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """Inductor gets what it would have got: the same text, names included."""
    graphs: list[str] = []

    class Watched(JointPass):
        def __call__(self, graph: fx.Graph) -> None:
            module = notes.owner(graph)
            graphs.append(str(module.graph))
            super().__call__(graph)
            graphs.append(str(module.graph))
            assert all("val" in n.meta for n in module.graph.nodes if n.op == "call_function")

    import coda_inductor.inductor.compile
    from coda_inductor.write import emit

    def fail_after(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            method(*args, **kwargs)
            raise RuntimeError("provoked")

        return call

    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    monkeypatch.setattr(coda_inductor.inductor.compile, "JointPass", Watched)
    owner = fx.Graph if after == "lint" else emit.Emission
    with monkeypatch.context() as patch:
        patch.setattr(owner, after, fail_after(getattr(owner, after)))
        model, x = half(), streams()
        if after == "lint":  # Dynamo lints its graphs, too

            def lint(graph: fx.Graph) -> None:
                if any("coda" in str(n.target) for n in graph.nodes):
                    raise RuntimeError("provoked")

            patch.setattr(fx.Graph, "lint", lint)
        ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) == 1 and "provoked" in ran[0]
    assert len(graphs) == 2 and graphs[0] == graphs[1] and "coda" not in graphs[1]


@pytest.mark.parametrize("where", ["lowering", "writing"])
def test_exception_in_what_inductor_makes_of_a_region(
    pretended: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """After the pass, the graph is compiled again without it."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("provoked")

    if where == "lowering":
        monkeypatch.setattr(lowering, "_layouts", fail)
    else:
        monkeypatch.setattr(lowering.RegionKernel, "codegen", fail)
    model, x = half(BF16), streams(BF16)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert (
        len(ran) == 1
        and "a graph is left to Inductor: " in ran[0]
        and "provoked" in ran[0]
        and "CODA_INDUCTOR=0" in ran[0]
    )
    assert torch.equal(ran.output, run(model, *x, backend="inductor").output)
    raised_text = raised_by_inductor(monkeypatch)
    assert "provoked" in raised_text


def raised_by_inductor(monkeypatch: pytest.MonkeyPatch) -> str:
    """Under STRICT Inductor's own error, which names the operation."""
    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    with pytest.raises(Exception, match="provoked") as caught:
        run(half(BF16), *streams(BF16))
    return str(caught.value)


def test_a_graph_that_inductor_cannot_compile_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error reaches the user once, and nothing is blamed on us."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Inductor's own")

    monkeypatch.setattr(torch._inductor.graph.GraphLowering, "run", fail)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Exception, match="Inductor's own"):
        warnings.simplefilter("always", CodaWarning)
        run(half(), *streams(), options=REFERENCE)
    assert not [w for w in caught if w.category is CodaWarning]


def test_a_guard_of_ours_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_TARGET", "reference")
    counts = iter(range(100))
    monkeypatch.setattr(joint, "guards_of", lambda graph: next(counts))
    left_to_inductor("the rewrite added a guard", torch.float64)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = half(), half()

    def forward(self, a: Tensor, r: Tensor) -> Tensor:
        h = self.first(a, r)
        torch._dynamo.graph_break()
        return self.second(a, h)  # type: ignore[no-any-return]


def test_graph_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is rewritten; one that fails does not take the other with it."""
    model, x = Breaks(), streams()
    wanted = model(*x).detach()
    ran = run(model, *x, options=REFERENCE)
    close(ran.output, wanted)
    assert ran == [] and ran.regions == [3, 3]

    calls: list[object] = []
    whole = lift

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("provoked")
        return whole(*args, **kwargs)

    monkeypatch.setattr(settle, "lift", fails_once)
    ran = run(model, *x, options=REFERENCE)
    close(ran.output, wanted)
    assert len(ran) == 1 and ran.regions == [3]


def test_two_failures_are_two_warnings_and_one_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["provoked at 0x7f3a", "provoked at 0x11", "another", "another"])

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(next(texts))

    monkeypatch.setattr(settle, "lift", fail)
    ran = run(Breaks(), *streams(), options=REFERENCE)
    assert len(ran) == 1
    ran = run(Breaks(), *streams(), options=REFERENCE)
    assert len(ran) == 1 and "another" in ran[0]


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        ("products of f16", "products of f32", 2),
        ("no bf16 on sm_90a", "no bf16 on sm_80a", 2),
        ("in2 is dead", "in3 is dead", 2),
        ("model.py:41: 128 tokens", "model.py:7: 64 tokens", 1),
        ("a.py:1: region 00c0ffee00c0ffee at 0x7f3a", "a.py:1: region 0badcafe0badcafe at 0x11", 1),
    ],
)
def test_only_numbers_make_no_new_warning(one: str, other: str, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(one)
        warn(other)
    assert len(caught) == kinds


def test_warnings_as_errors_stop_the_compile() -> None:
    """As Python's -W error promises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CodaWarning)
        with pytest.raises(CodaWarning, match="coda_inductor: told"):
            warn("told")


def test_half_has_the_regions_that_these_tests_count() -> None:
    ran = run(half(), *streams(), options=REFERENCE)
    assert ran == [] and ran.regions == [3]
    assert [len(parse(s.region.text).products) for s in ran.reports[0].sites] == [1, 2, 1]
