"""Inputs and weights that lie as no kernel reads them: they are copied or left, and the result is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import REFERENCE, close, half, pretend, run, streams
from pretended_machine import pretended as pretended
from torch import Tensor, nn

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("uncached")


def test_tensor_subclass_inputs() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model, (a, r) = half(), streams()
    x = TwoTensor(a, a + 1), TwoTensor(r, r - 1)
    with torch.no_grad():
        wanted = model(*x)
    ran = run(model, *x, options=REFERENCE)
    assert isinstance(ran.output, TwoTensor) and ran == []
    close(ran.output.a, wanted.a)
    close(ran.output.b, wanted.b)
    assert ran.regions and ran.regions[0] >= 3


VIEWS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("transposed", lambda x: x.t().contiguous().t()),
    ("every other row", lambda x: torch.stack((x, x), 1).flatten(0, 1)[::2]),
    ("every other column", lambda x: x.repeat_interleave(2, 1)[:, ::2]),
    ("one column in", lambda x: torch.nn.functional.pad(x, (1, 0))[:, 1:]),
    ("one row for all", lambda x: x[:1].expand_as(x)),
]


@pytest.mark.parametrize("view", [v for _, v in VIEWS], ids=[name for name, _ in VIEWS])
@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
def test_strides_of_inputs(
    view: Callable[[Tensor], Tensor], kernels: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dtype = BF16 if kernels else torch.float64
    if kernels:
        pretend(monkeypatch, tmp_path)
        monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")
    model, (a, r) = half(dtype), streams(dtype)
    x = view(a), view(r)
    ran = run(model, *x, options={} if kernels else REFERENCE)
    close(ran.output, model(*x).detach())
    (report,) = ran.reports  # what lies otherwise than in rows is left, with a reason, or copied, with a warning
    assert report.sites and (len(report.sites) == 3 or any("laid out" in r.reason for r in report.refused))
    assert all("an input was copied" in text for text in ran) and len(ran) <= 1


@pytest.mark.sampled
@pytest.mark.parametrize("view", [v for _, v in VIEWS], ids=[name for name, _ in VIEWS])
def test_strides_of_weights(view: Callable[[Tensor], Tensor], pretended: None) -> None:
    model, x = half(BF16), streams(BF16)
    for linear in (model.o, model.gate, model.up, model.down):
        linear.weight = nn.Parameter(view(linear.weight.detach()), requires_grad=False)
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) <= 1 and all("copied" in text or "two matrices" in text for text in ran)


def test_one_weight_twice(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are the same: there is no distance between them to encode."""
    model, x = half(BF16), streams(BF16)
    model.up = model.gate
    ran = run(model, *x)
    close(ran.output, model(*x).detach())
    assert len(ran) <= 1
