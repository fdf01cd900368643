"""A large output beside a loss: its gradient may be undefined, and is then no tensor of zeros."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from compiling import REFERENCE, close
from scores_returned import STRICT, TOKENS, USES, WIDTH, WORDS, Head, given, gradients
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.exc import OperatorIssue

import coda_inductor.inductor.compile
from coda_inductor.core.errors import CodaWarning
from coda_inductor.core.settings import Settings
from coda_inductor.explain import capture
from coda_inductor.inductor import undefined
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.undefined import detach_large
from coda_inductor.ops.gradients import ADD_GRADIENT_OF, GRADIENT_OF, SLOTS

pytestmark = pytest.mark.usefixtures("all_are_large")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["", "two"])
@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_eager(use: str, kind: str) -> None:
    torch.manual_seed(1)
    model = Head(kind).double()
    with functorch_config.patch(donated_buffer=False):  # as who calls a backward twice must
        found = gradients(torch.compile(model, backend="coda", options=STRICT), model, USES[use])
    for mine, theirs in zip(found, gradients(model, model, USES[use]), strict=True):
        close(mine, theirs)
    gc.collect()
    assert not SLOTS


def test_calls_do_not_mix_their_gradients() -> None:
    """Two calls, one backward: each takes its own."""
    torch.manual_seed(1)
    model = Head().double()
    found = []
    for call in (torch.compile(model, backend="coda", options=STRICT), model):
        x, targets = given()
        model.zero_grad()
        (a, first), (b, second) = call(x, targets), call(x * 2, targets)
        (a + 3 * first.sum() + second.square().sum() - b).backward()
        found.append([t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None])
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)


def test_sizes_may_vary() -> None:
    model = Head().double()
    call = torch.compile(model, backend="coda", options=STRICT, dynamic=True)
    for rows in (2, 3):
        x, targets = torch.randn(rows, TOKENS, WIDTH, dtype=torch.float64), torch.randint(0, WORDS, (rows, TOKENS))
        for use in (USES["the loss"], USES["both"]):
            found = []
            for each in (call, model):
                model.zero_grad()
                use(*each(x, targets))
                found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            for mine, theirs in zip(*found, strict=True):
                close(mine, theirs)


def joint(kind: str, **settings: Any) -> fx.Graph:
    """The joint graph, after the stage."""
    graphs = list[fx.Graph]()
    given_settings = Settings(target="reference", **settings)
    capture.capture(Head(kind).double(), given(), {}, "train", graphs.append, given_settings)
    undefined.add_where_read(graphs[0])
    return graphs[0]


def shapes(graph: fx.Graph) -> list[tuple[int, ...]]:
    """Of the gradients that come in."""
    nodes = graph.find_nodes(op="placeholder")
    return [tuple(n.meta["val"].shape) for n in nodes if "tangent" in str(n.target)]


SCORES, HIDDEN = (2, TOKENS, WORDS), (2, TOKENS, WIDTH)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("", [(), (1,)]),
        ("two", [(), (1,), (1,)]),
        ("beside the loss", [(), (1,)]),
        ("alone", [SCORES]),
        ("twice", [(), (1,)]),  # Dynamo returns it once
        ("no gradient", [()]),
        ("no loss", [(2, 2), SCORES]),
        ("a router's", [(), SCORES]),
    ],
)
def test_what_a_backward_takes(kind: str, wanted: list[tuple[int, ...]]) -> None:
    """A key in place of a large gradient, if a loss is made of it, and no other output is the same memory."""
    assert shapes(joint(kind)) == wanted


@pytest.mark.parametrize("kind", ["with a view", "an input"])
def test_what_shares_memory_stays(kind: str) -> None:
    assert (1,) not in shapes(joint(kind))


def test_what_is_small_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 8 * 2 * TOKENS * WORDS
    for large, wanted in ((size, (1,)), (size + 1, SCORES)):
        monkeypatch.setattr(undefined, "LARGE", large)
        assert shapes(joint("")) == [(), wanted]


def test_it_can_be_switched_off() -> None:
    assert shapes(joint("", disable=frozenset({"undefined"}))) == [(), SCORES]


def test_what_it_is_added_to_takes_it() -> None:
    """No tensor is made of it beside the gradient of the loss; where it is the only gradient it is one."""
    assert [len(joint("").find_nodes(op="call_function", target=t)) for t in (ADD_GRADIENT_OF, GRADIENT_OF)] == [1, 0]
    found = joint("beside the loss")
    assert [len(found.find_nodes(op="call_function", target=t)) for t in (ADD_GRADIENT_OF, GRADIENT_OF)] == [1, 0]


@pytest.mark.parametrize("config", [{}, {"triton.cudagraphs": True}, {"cpp_wrapper": True}, {"packed": True}])
def test_dynamos_graph_is_restored(config: dict[str, Any]) -> None:
    """And is not touched where nobody can decide at run time, or a file is written."""
    seen = list[bool]()

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        before = gm.print_readable(print_output=False)
        detached = detach_large(gm, Settings(), config)
        seen.append(detached is not None)
        if detached is not None:
            assert gm.print_readable(print_output=False) != before
            detached.restore()
        assert gm.print_readable(print_output=False) == before
        return gm

    with functorch_config.patch(bundled_autograd_cache="packed" in config):
        torch.compile(Head().double(), backend=backend)(*given())
    assert seen == [not config]


def test_where_the_compile_fails_inductor_gets_the_users_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gm: fx.GraphModule, inputs: Any, *_: Any, **__: Any) -> Any:
        assert len(gm.graph.output_node().args[0]) == 4  # type: ignore[arg-type]
        raise RuntimeError("behind the pass")

    monkeypatch.setattr(coda_inductor.inductor.compile, "compile_fx", failing)
    model = Head().double()
    with pytest.warns(CodaWarning, match="behind the pass"):
        found = gradients(torch.compile(model, backend="coda", options=REFERENCE), model, USES["both"])
    assert not REPORTS
    for mine, theirs in zip(found, gradients(model, model, USES["both"]), strict=True):
        close(mine, theirs)


def test_inductor_writes_no_operation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would for one without a lowering: all that 16 layers are made of, for minutes."""

    def written(*_: Any) -> str:
        raise AssertionError("an operation without a lowering")

    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(written))
    model = Head().double()
    gradients(torch.compile(model, backend="coda", options=STRICT), model, USES["both"])
