"""What a program says, checks and logs happens in its order, and none of it is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from evaluate import compiled, error, strict_reference
from torch import Tensor

from coda_inductor.inductor.joint_pass import REPORTS

say = torch._higher_order_ops.print
SAID: list[int] = []


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    SAID.clear()
    yield
    SAID.clear()


@torch.library.custom_op("coda_effects::said", mutates_args=())
def said(x: Tensor, place: int) -> None:
    """An operation with an effect that no tensor shows."""
    SAID.append(place)


@said.register_fake
def _(x: Tensor, place: int) -> None:
    return None


torch.library._register_effectful_op("coda_effects::said", torch.library.EffectType.ORDERED)  # type: ignore[attr-defined]


def inputs() -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64) for shape in ((12, 8), (8, 8), (8, 8))]


def printing(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Two of the four wait for a product."""
    h = torch.relu(x @ w)
    say("first {}", h.sum())
    say("second {}", x.sum())
    y = torch.tanh(h @ v)
    say("third {}", y.sum())
    say("fourth {}", w.sum())
    return y


def effectful(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = torch.relu(x @ w)
    said(h, 0)
    said(x, 1)
    y = torch.tanh(h @ v)
    said(y, 2)
    said(w, 3)
    return y


@pytest.mark.parametrize("inductor", [False, True], ids=["interpreted", "inductor"])
@pytest.mark.parametrize("train", [False, True], ids=["infer", "train"])
def test_prints_keep_their_order(train: bool, inductor: bool, capsys: pytest.CaptureFixture[str]) -> None:
    args = [x.requires_grad_(train) for x in inputs()]
    with strict_reference(run=inductor), torch.set_grad_enabled(train):
        REPORTS.clear()
        y = torch.compile(printing, backend="coda")(*args)
        if train:
            y.sum().backward()
    assert re.findall(r"first|second|third|fourth", capsys.readouterr().out) == ["first", "second", "third", "fourth"]
    assert sum(len(report.sites) for report in REPORTS) >= 2


def test_operations_with_effects_keep_their_order() -> None:
    args = inputs()
    with torch.no_grad():
        wanted = effectful(*args)
    SAID.clear()
    found, reports = compiled(effectful, *args, run=False)
    assert error(found, wanted) < 1e-10 and list(range(4)) == SAID
    assert sum(len(report.sites) for report in reports) >= 1


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_check_that_fails_still_fails(broken: int) -> None:
    """Each of three: before a write, after it, and of what a product became."""

    def checked(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
        torch._assert_async(m.sum() > (1e9 if broken == 0 else -1e9), "check 0")
        h = m + x @ w
        m.zero_()
        torch._assert_async((m == 0).all() if broken != 1 else (m != 0).all(), "check 1")
        y = h + torch.relu(h @ v)
        torch._assert_async(y.isfinite().all() if broken != 2 else y.isnan().any(), "check 2")
        return y

    args: Any = [*inputs(), torch.randn(12, 8, dtype=torch.float64)]
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"check {broken}"):
        checked(*args)
    with pytest.raises(RuntimeError, match=f"check {broken}"):
        compiled(checked, *args, run=False)


def test_what_is_read_by_a_number_from_a_tensor() -> None:
    """A length that only the run knows, with the checks that it needs."""

    def cut(x: Tensor, w: Tensor, v: Tensor, m: Tensor, length: Tensor) -> Any:
        n = int(length.item())
        torch._check(n >= 0)
        torch._check(n <= x.shape[0])
        h = m + x @ w
        m[:n].zero_()
        return h + torch.relu(h @ v), m.sum(0)

    args = [*inputs(), torch.randn(12, 8, dtype=torch.float64), torch.tensor(5)]
    mine = [x.clone() for x in args]
    with torch.no_grad():
        wanted = cut(*args)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found, reports = compiled(cut, *mine, run=False)
    assert all(error(a, b) < 1e-10 for a, b in zip([*found, *mine], [*wanted, *args], strict=True))
    assert sum(len(report.sites) for report in reports) >= 1
