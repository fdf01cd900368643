"""torch.ops.coda.region: one functional operation for every Region.

Its eager meaning is the interpreter, on every device (the oracle of Inductor's own accuracy tools); compiled graphs
call `launch`, which runs the generated kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import DTYPES, parse

_library = torch.library.Library("coda", "DEF")
_library.define("region(Tensor[] inputs, str region, str target) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _eager(inputs: list[Tensor], region: str, target: str) -> list[Tensor]:
    return interpret(parse(region), inputs)


def _fake(inputs: list[Tensor], region: str, target: str) -> list[Tensor]:
    r = parse(region)
    x = inputs[r.products[0].a]
    tiles = [x.new_empty((x.shape[0], r.n), dtype=DTYPES[s.dtype]) for s in r.stores]
    return tiles + [x.new_empty((x.shape[0] if s.over == "N" else r.n,), dtype=r.compute) for s in r.reductions]


_library.impl("region", _eager, "CompositeExplicitAutograd")
torch.library.register_fake("coda::region", _fake, lib=_library)

REGION = torch.ops.coda.region.default
"""region(inputs: matrices then operands, region: Region.text, target) -> stores [M, N], then reductions [M]."""
