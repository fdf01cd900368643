"""A large output beside a loss: its gradient may be undefined, and is then no tensor of zeros."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE, close
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch_config
from torch._inductor.exc import OperatorIssue
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import coda_inductor.inductor.compile
from coda_inductor.core.errors import BrokenInvariant, CodaWarning
from coda_inductor.core.settings import Settings
from coda_inductor.explain import capture
from coda_inductor.inductor import undefined
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.undefined import detach_large
from coda_inductor.ops import gradients as ops
from coda_inductor.ops.gradients import ADD_GRADIENT_OF, GRADIENT_OF, HAND_IN, SLOTS

TOKENS, WIDTH, WORDS = 128, 16, 64
STRICT = REFERENCE | {"strict": True}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch, uncached: None) -> None:
    monkeypatch.setattr(undefined, "LARGE", 1)
    torch._dynamo.reset()
    REPORTS.clear()


class Head(nn.Module):
    """(loss, scores), as transformers' models return them; `kind` changes what is returned."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first, self.scores = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.kind = kind

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        hidden = F.gelu(self.first(x))
        scores = self.scores(hidden)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        others: dict[str, Any] = {
            "": (loss, scores),
            "alone": scores,
            "two": (loss, scores, hidden),
            "beside the loss": (scores.square().mean(), hidden),
            "twice": (loss, scores, scores),
            "with a view": (loss, scores, scores[0]),
            "an input": (loss, x),
            "no gradient": (loss, scores.detach()),
            "no loss": (loss.expand(2, 2), scores),
            "a router's": (self.first(x).square().mean(), scores),
            "rounded": (loss, scores.round()),
        }
        return others[self.kind]


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(0, WORDS, (2, TOKENS))


def gradients(call: Callable[..., Any], model: nn.Module, use: Callable[..., Any]) -> list[Tensor]:
    """What `use` of the outputs leaves: outputs, and gradients of input and weights."""
    x, targets = given()
    model.zero_grad()
    outputs = call(x, targets)
    use(*outputs)
    return [o.detach() for o in outputs] + [t.grad for t in (x, *model.parameters()) if t.grad is not None]


USES: dict[str, Callable[..., Any]] = {
    "the loss": lambda loss, scores, *_: loss.backward(),
    "both": lambda loss, scores, *_: (loss + scores.square().sum()).backward(),
    "the scores": lambda loss, scores, *_: scores.sin().sum().backward(),
    "an expanded gradient": lambda loss, scores, *_: (2 * loss + scores.sum()).backward(),
    "one after the other": lambda loss, scores, *_: (loss.backward(retain_graph=True), scores.exp().sum().backward()),
    "the scores first": lambda loss, scores, *_: (scores.exp().sum().backward(retain_graph=True), loss.backward()),
    "all": lambda *outputs: sum(o.square().sum() for o in outputs).backward(),
}


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


def test_a_gradient_is_read_once() -> None:
    (key, number), gradient = ops.GRADIENT_KEY(torch.ones(3)), torch.ones(3)
    times = HAND_IN(gradient, number)
    assert ops.handed_in(torch.zeros_like(times), number) is None  # of another backward, which no gradient reaches
    found = ops.handed_in(times, number)
    assert found is not None and found[0].equal(gradient) and found[1] == 1
    with pytest.raises(BrokenInvariant, match="read before"):
        ops.handed_in(times, number)
    unread = HAND_IN(gradient, number)
    del times, unread
    with pytest.raises(BrokenInvariant, match="lost"):
        ops.handed_in(torch.ones_like(key), number)


def rounds(scores: Tensor) -> Tensor:
    raise ValueError("of the user's")


def test_what_nobody_reads_is_not_kept() -> None:
    """After a backward that raised, and where the gradient ends at an operation that has none."""
    for kind in ("", "rounded"):
        call, (x, targets) = torch.compile(Head(kind).double(), backend="coda", options=STRICT), given()
        loss, scores = call(x, targets)
        if not kind:
            loss.register_hook(rounds)
        total = loss + scores.exp().sum()
        if kind:
            total.backward()
        else:
            with pytest.raises(ValueError, match="of the user's"):
                total.backward()
        del total
        gc.collect()
        assert not SLOTS  # while the outputs are there
        del loss, scores


def test_a_second_backward_raises_as_eager_does() -> None:
    loss, scores = torch.compile(Head().double(), backend="coda", options=STRICT)(*given())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        (loss + scores.sum()).backward()


def slots() -> int:
    gc.collect()
    return len(SLOTS)


def test_gradients_with_a_graph_leave_nothing() -> None:
    """And a second backward raises as torch's own does."""
    call, (x, targets), weak = torch.compile(Head().double(), backend="coda", options=STRICT), given(), []
    with functorch_config.patch(donated_buffer=False):
        for _ in range(2):
            loss, scores = call(x, targets)
            (found,) = torch.autograd.grad(loss + scores.square().sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="backward"):
                found.sum().backward()
            weak.append(weakref.ref(scores))
            del loss, scores, found
    assert not slots() and [ref() for ref in weak] == [None, None]


def test_hooks_may_lower_the_precision_of_what_is_kept() -> None:
    """Numbers are integers, and no such hook changes them."""
    model, (x, targets) = Head("two").double(), given()
    call = torch.compile(model, backend="coda", options=STRICT)
    for _ in range(600):
        ops.GRADIENT_KEY(x)  # numbers that bfloat16 has not

    def lower(t: Tensor) -> Tensor:
        return t.bfloat16() if t.is_floating_point() else t

    def higher(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    with saved_tensors_hooks(lower, higher):
        loss, scores, hidden = call(x, targets)
    (loss + scores.sum() + 3 * hidden.sum()).backward()
    assert not slots()


def test_a_backward_within_a_backward_takes_its_own() -> None:
    """The inner one, in a hook, knows of no gradient of the scores, and leaves the outer one's where it is."""
    torch.manual_seed(1)
    model = Head("two").double()

    def within(loss: Tensor, scores: Tensor, hidden: Tensor) -> None:
        def once(gradient: Tensor) -> None:
            handle.remove()
            loss.backward(retain_graph=True)

        handle = scores.register_hook(once)
        (loss + scores.exp().sum() + hidden.sum()).backward(retain_graph=True)

    with functorch_config.patch(donated_buffer=False):
        found = gradients(torch.compile(model, backend="coda", options=STRICT), model, within)
        stock = gradients(torch.compile(model, backend="inductor"), model, within)
    for mine, theirs in zip(found, stock, strict=True):
        close(mine, theirs)


def test_two_backwards_of_one_graph_take_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As threads may run at a time: autograd numbers them."""
    _, number = ops.GRADIENT_KEY(torch.ones(3))
    times = {}
    for task in (1, 2):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda task=task: task)
        times[task] = HAND_IN(torch.full((3,), float(task)), number)
    for task in (1, 2):
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda task=task: task)
        found = ops.handed_in(times[task], number)
        assert found is not None and found[0].eq(task).all()


def scaled(loss: Tensor, scores: Tensor) -> None:
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda given: tuple(None if x is None else x * 0.5 for x in given))
    (loss + scores.exp().sum()).backward()


def test_what_comes_into_a_backward_may_be_scaled() -> None:
    """By a hook of the graph's node: the gradient that is handed in counts as often."""
    torch.manual_seed(1)
    model = Head().double()
    found = gradients(torch.compile(model, backend="coda", options=STRICT), model, scaled)
    stock = gradients(torch.compile(model, backend="inductor"), model, scaled)
    for mine, theirs in zip(found, stock, strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("use", ["the loss", "both"])
def test_a_backward_may_be_compiled(use: str) -> None:
    """By compiled autograd, twice by the same graph."""
    torch.manual_seed(1)
    model = Head().double()
    call = torch.compile(model, backend="coda", options=STRICT)

    def run(loss: Tensor, scores: Tensor) -> None:
        with compiled_autograd._enable(partial(torch.compile, backend="eager")):
            USES[use](loss, scores)

    for _ in range(2):
        for mine, theirs in zip(gradients(call, model, run), gradients(model, model, USES[use]), strict=True):
            close(mine, theirs)


@pytest.mark.parametrize("config", [{"activation_memory_budget": 0.0}, {"aggressive_recomputation": True}])
def test_a_key_is_not_computed_again(config: dict[str, Any]) -> None:
    """Where the partitioner would rather compute than keep, the backward reads the forward's number."""
    torch.manual_seed(1)
    model = Head().double()
    with functorch_config.patch(config):
        found = gradients(torch.compile(model, backend="coda", options=STRICT), model, USES["both"])
    for mine, theirs in zip(found, gradients(model, model, USES["both"]), strict=True):
        close(mine, theirs)


def test_a_tensor_of_another_class_is_left_to_torch() -> None:
    """What memory it has is its own affair."""
    seen = list[object]()

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(detach_large(gm, Settings(), {}))
        return gm

    x, targets = given()
    torch.compile(Head().double(), backend=backend)(TwoTensor(x.detach(), x.detach()).requires_grad_(), targets)
    assert seen == [None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_may_stand_around_it(reentrant: bool) -> None:
    """The forward runs twice; keys are of the second."""
    torch.manual_seed(1)
    model = Head().double()
    found = []
    for call in (torch.compile(model, backend="coda", options=STRICT), model):
        around = partial(checkpoint, call, use_reentrant=reentrant)
        found.append(gradients(around, model, USES["both"]))
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)


def test_what_others_read_is_not_added_to() -> None:
    """The compiled operation works in the memory of what it adds to only if nobody else reads that."""
    ops.register()
    _, number = ops.GRADIENT_KEY(x := torch.ones(8, 8))
    times = HAND_IN(torch.full((8, 8), 2.0), number)

    def call(x: Tensor, times: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 3
        return y, ADD_GRADIENT_OF(y, times, number)

    y, total = torch.compile(call, backend="inductor")(x, times, number)
    assert y.eq(3).all() and total.eq(5).all()


def test_where_the_compile_fails_inductor_gets_the_users_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
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
