"""Wrong kernels that numbers alone do not show: each is refused on a card that no target was run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import CASES, norm_producer, random_inputs, token_scale
from torch import Tensor
from untested_card import At37, Outs, Right, untested_card

from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import CodaWarning, Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Let, Region, Store
from coda_inductor.kernels import launch, proof

(maximum,) = (make for make in CASES if make.__name__ == "max_over_n")
TILE = Config(128, 128, 1, 1, False)


def refused(region: Region, kernel: type[Right], directory: Path) -> bool:
    made: Any = kernel(region, TILE, directory)
    try:
        found = [*proof.measured(region, TILE, made)]
    except Unsupported:
        return True
    return not all(error.within(proof.allowed(region)) for error in found)


class Beside(Right):
    """Writes on behind its last output."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        out = outs[-1]
        out.as_strided((out.numel() + 8,), (1,))[out.numel() :] = 7


class Before(Right):
    """Writes in front of its first output."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        out = outs[0]
        out.as_strided((8,), (1,), out.storage_offset() - 8).zero_()


class Destructive(Right):
    """Overwrites an operand at few rows."""

    def __call__(self, inputs: Any, outs: Outs) -> None:
        super().__call__(inputs, outs)
        if len(inputs[0]) < 64:
            inputs[-1].zero_()


class Idle(Right):
    """Does not multiply."""

    def __call__(self, inputs: Any, outs: Outs) -> None:
        super().__call__([torch.zeros_like(inputs[0]), *inputs[1:]], outs)


class ZerosAtTheEdge(Right):
    """Takes zeros past the edge into a maximum."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        for out, r in zip(outs[len(self.region.stores) :], self.region.reductions, strict=True):
            if r.of == "max":
                out.clamp_(min=0.0)


def faint(region: Region) -> Region:
    """Its tile and a thousandth of its product."""
    lets = (Let("few", "mul", ("acc", 1e-3)), Let("sum", "add", ("few", region.operands[0].name)))
    return Region(region.n, region.dtype, region.products, region.operands[:1], lets, (Store("sum", "bf16"),), ())


@pytest.mark.parametrize("kernel", [Beside, Before, Destructive, Idle, ZerosAtTheEdge, Right])
def test_it_is_seen(kernel: type[Right], tmp_path: Path) -> None:
    region = {Idle: faint(norm_producer(64, 64)), ZerosAtTheEdge: maximum(64, 64)}.get(kernel, token_scale(64, 64))
    assert refused(region, kernel, tmp_path) is (kernel is not Right)
    assert not refused(region, Right, tmp_path)


def test_another_card_of_the_target_is_compared_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one process, whatever was seen on the first."""
    cards = {0: "a card", 1: "another"}
    here = [0]

    class OnOne(At37):
        def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
            if here[0]:
                outs[0] *= 1.1

    untested_card(monkeypatch, tmp_path, OnOne)
    monkeypatch.setattr(launch, "_device", lambda: here[0])
    monkeypatch.setattr(proof, "card", lambda: cards[here[0]])
    region = token_scale(64, 32)
    inputs, out = random_inputs(region, 8, "cpu"), torch.empty(8, 64, dtype=torch.bfloat16)
    for here[0] in (0, 1, 0):
        with pytest.warns(CodaWarning, match="wrong on this card") if here[0] else monkeypatch.context():
            launch.kernel(region.text, str(tmp_path / "kernels"))(inputs, [out])
        assert torch.equal(out, interpret(region, inputs)[0])
    assert launch.LAUNCHES[region.digest] == 2
