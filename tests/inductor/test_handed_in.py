"""Gradients that are handed into a compiled backward: each is read once, by the backward it is of, and left nowhere."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from compiling import close
from scores_returned import STRICT, USES, Head, given, gradients
from torch import Tensor, fx
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.settings import Settings
from coda_inductor.inductor.undefined import detach_large
from coda_inductor.ops import gradients as ops
from coda_inductor.ops.gradients import ADD_GRADIENT_OF, HAND_IN, SLOTS

pytestmark = pytest.mark.usefixtures("all_are_large")


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
        monkeypatch.setattr(ops, "current_backward", lambda task=task: task)
        times[task] = HAND_IN(torch.full((3,), float(task)), number)
    for task in (1, 2):
        monkeypatch.setattr(ops, "current_backward", lambda task=task: task)
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
