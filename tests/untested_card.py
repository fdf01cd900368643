"""A card whose target was never run on one, pretended on the CPU: the interpreter is its kernels, right or wrong in one
way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from compiling import Interpreted, pretend
from torch import Tensor

from coda_inductor.codegen import target
from coda_inductor.codegen.target import SM_90A, SM_100A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.region import Region
from coda_inductor.kernels import library

ROW = SM_100A
Outs = Sequence[Tensor | None]


class Right(Interpreted):
    """A kernel that is right, and leaves machine code in the store as a compiler does: `code`, or its class's name."""

    code = ""

    def __init__(
        self, region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A
    ) -> None:
        super().__init__(region, config, directory)
        self.swapped, self.sizes = swapped, list[int]()
        place = library.folder(region, config, directory, swapped=swapped, target=target)
        (place / "made").mkdir(parents=True, exist_ok=True)
        (place / "made" / "kernel.o").write_text(self.code or type(self).__name__)

    def __call__(self, inputs: Sequence[Tensor], outs: Outs) -> None:
        m = int(self.region.m(inputs))
        self.sizes.append(m)
        before = [None if out is None else out.clone() for out in outs]
        super().__call__(inputs, outs)
        self.spoil(m, [out for out in outs if out is not None], [out for out in before if out is not None])

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        """What is wrong with it: nothing. `before`: what the outputs held."""


class LastRow(Right):
    """Wrong in the last row of many, by half."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        for out in outs:
            if m > 64 and len(out) == m:
                out[-1] *= 1.5


class At37(Right):
    """Wrong for one number of rows."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        if m == 37:
            outs[0] *= 1.1


class At1(Right):
    """Right for what tuning runs, wrong for a single row."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        if m == 1:
            outs[0] *= 1.1


class Unwritten(Right):
    """Leaves the end of its last output as it was, where that is long."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        if m > 1000:
            outs[-1].view(-1)[-1] = before[-1].view(-1)[-1]


class Swapped(Right):
    """Wrong if the second weight lies first."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        if self.swapped:
            outs[0] *= 1.1


class Everywhere(Right):
    """Wrong at every size."""

    def spoil(self, m: int, outs: list[Tensor], before: list[Tensor]) -> None:
        outs[0] *= 1.1


def untested_card(
    monkeypatch: pytest.MonkeyPatch, directory: Path, build: Callable[..., Any] = Right, *, asked: bool = True
) -> None:
    """This machine has such a card; with `asked` the settings name its target."""
    pretend(monkeypatch, directory, build)
    monkeypatch.setattr(target, "capability", lambda device=None: ROW.capability)
    if asked:
        monkeypatch.setenv("CODA_INDUCTOR_TARGET", ROW.name)
