"""torch.ops.coda.region: one functional operation for every Region.
torch.ops.coda.stored: a value that is in memory. torch.ops.coda.kept: a copy.

Their eager meaning is the interpreter, on every device (the oracle of Inductor's own accuracy tools); compiled
graphs call `launch`, which runs the generated kernel. A stored value is the value, and so is a kept one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.utils.flop_counter import register_flop_formula

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region, parse

_library = torch.library.Library("coda", "DEF")
_library.define("region(Tensor[] inputs, str region, str target) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _eager(inputs: list[Tensor], region: str, target: str) -> list[Tensor]:
    return interpret(parse(region), inputs)


def _fake(inputs: list[Tensor], region: str, target: str) -> list[Tensor]:
    r = parse(region)
    x = inputs[r.products[0].a]
    _require_shapes(r, inputs)
    m = r.m(inputs)
    tiles = [x.new_empty((m, r.width), dtype=DTYPES[s.dtype]) for s in r.stores]
    return tiles + [x.new_empty((m if s.over == "N" else r.n,), dtype=r.compute) for s in r.reductions]


def _require_shapes(r: Region, inputs: list[Tensor]) -> None:
    """Raises BrokenInvariant, while compiling, for inputs that are not what the Region says. Static sizes only."""
    wanted = {a: (1 if p.a_layout == "mk" else 0, p.k) for p in r.products for a, _ in p.pairs}
    wanted |= {b: (1, p.k if p.b_layout == "nk" else r.n) for p in r.products for _, b in p.pairs}
    sizes = {"feature": (0, r.width), "tile": (1, r.n), "table": (1, 2 * r.half)}
    wanted |= {i: sizes[o.extent] for i, o in enumerate(r.operands, r.matrices) if o.extent != "token"}
    for i, (dim, size) in wanted.items():
        rank = 1 if i >= r.matrices and r.operands[i - r.matrices].extent == "feature" else 2
        if inputs[i].dim() != rank or (isinstance(inputs[i].shape[dim], int) and inputs[i].shape[dim] != size):
            raise BrokenInvariant(f"input {i} is {list(inputs[i].shape)}, dimension {dim} of {rank} should be {size}")


_library.impl("region", _eager, "CompositeExplicitAutograd")
torch.library.register_fake("coda::region", _fake, lib=_library)

REGION = torch.ops.coda.region.default
"""region(inputs: matrices then operands, region: Region.text, target) -> stores [M, width], then reductions."""

_library.define("stored(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("stored", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("coda::stored", torch.empty_like, lib=_library)

STORED = torch.ops.coda.stored.default
"""stored(x) -> x. Compiled graphs compute it once and read it from memory, whatever Inductor would do."""

_library.define("kept(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("kept", torch.clone, "CompositeExplicitAutograd")
torch.library.register_fake("coda::kept", torch.empty_like, lib=_library)

KEPT = torch.ops.coda.kept.default
"""kept(x) -> a copy of x in memory of its own, as x lies; Inductor takes a clone that nobody returns for x itself."""
has_side_effect(KEPT)  # or a partitioner would take for the backward's own what the forward does not read


@register_flop_formula(torch.ops.coda.region)
def _flops(inputs: list[torch.Size], region: str, target: str, *_: object, **__: object) -> int:
    """What the partitioner weighs against memory, under an activation memory budget."""
    r = parse(region)
    i, dim = r.m_axis
    return sum(2 * inputs[i][dim] * r.n * p.k for p in r.products for _ in p.pairs)
