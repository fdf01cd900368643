"""torch.ops.coda.region: one functional operation for every Region.
torch.ops.coda.stored: a value that is in memory. torch.ops.coda.kept: a copy. torch.ops.coda.added_up: a product that
is added to others. torch.ops.coda.added_region: one that a Region's kernel adds. torch.ops.coda.after: a value that is
computed after others.

Their eager meaning is the interpreter, on every device (the oracle of Inductor's own accuracy tools); compiled
graphs call `launch`, which runs the generated kernel. A stored value is the value, and so is a kept one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.utils.flop_counter import register_flop_formula

from coda_inductor.core import blocks
from coda_inductor.core.blocks import empty_rows, pitch
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region, parse

_library = torch.library.Library("coda", "DEF")
_library.define("region(Tensor[] inputs, str region, str target) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


def _eager(inputs: list[Tensor], region: str, target: str) -> list[Tensor]:
    r = parse(region)
    outs = interpret(r, inputs)
    if target == "reference" or pitch(r.width) == r.width:
        return outs
    return [_store(r, x, x.shape[0], x.dtype, target).copy_(x) if x.dim() > 1 else x for x in outs]


def _fake(inputs: list[Tensor], region: str, target: str) -> list[Tensor]:
    r = parse(region)
    x = inputs[r.products[0].a]
    _require_shapes(r, inputs)
    m = r.m(inputs)
    tiles = [_store(r, x, m, DTYPES[s.dtype], target) for s in r.stores]
    return tiles + [x.new_empty((r.length(s, m),), dtype=r.compute) for s in r.reductions]


def _store(r: Region, like: Tensor, m: int, dtype: torch.dtype, target: str) -> Tensor:
    """Memory for a store: dense on the reference target, which is torch; else as a kernel writes it."""
    if target == "reference":
        return like.new_empty((m, r.width), dtype=dtype)
    return empty_rows(like, m, r.width, dtype)


def _require_shapes(r: Region, inputs: list[Tensor]) -> None:
    """Raises BrokenInvariant, while compiling, for inputs that are not what the Region says. Static sizes only."""
    wanted = {a: (1 if p.a_layout == "mk" else 0, k) for p in r.products for a, _, k in p.terms}
    wanted |= {b: (1, k if p.b_layout == "nk" else r.n) for p in r.products for _, b, k in p.terms}
    sizes = {"feature": (0, r.width), "sample": (1, r.n), "tile": (1, r.n), "table": (1, 2 * r.half)}
    wanted |= {i: sizes[o.extent] for i, o in enumerate(r.operands, r.matrices) if o.extent != "token"}
    for i, (dim, size) in wanted.items():
        rank = 1 if i >= r.matrices and r.operands[i - r.matrices].extent == "feature" else 2
        if inputs[i].dim() != rank or (isinstance(inputs[i].shape[dim], int) and inputs[i].shape[dim] != size):
            raise BrokenInvariant(f"input {i} is {list(inputs[i].shape)}, dimension {dim} of {rank} should be {size}")
    m = r.m(inputs)
    for i, o in enumerate(r.operands, r.matrices):
        samples = inputs[i].shape[0]
        if o.tokens and isinstance(m, int) and isinstance(samples, int) and samples != -(-m // o.tokens):
            raise BrokenInvariant(f"input {i} is of {samples} samples of {o.tokens} tokens beside {m} rows")


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

_library.define("after(Tensor x, Tensor[] others) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("after", lambda x, others: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("coda::after", lambda x, others: torch.empty_like(x), lib=_library)

AFTER = torch.ops.coda.after.default
"""after(x, others) -> x. Compiled graphs start to compute it when all others are in memory: what was only read for them
has given its memory back."""

_library.define("add_product_(Tensor(a!) into, Tensor left, Tensor right) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("added_up(Tensor? into, Tensor left, Tensor right) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    if into.is_cuda and left.dtype != into.dtype:
        torch.addmm(into, left, right, out_dtype=into.dtype, out=into)
    else:
        into.addmm_(left.to(into.dtype), right.to(into.dtype))


def _added_up(into: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    wide = WIDE.get(left.dtype, left.dtype)
    if into is not None:
        _add_product(made := into.clone(), left, right)
        return made
    if left.is_cuda and left.dtype != wide:
        return torch.mm(left, right, out_dtype=wide)
    return torch.mm(left.to(wide), right.to(wide))


def _fake_added_up(into: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=WIDE.get(left.dtype, left.dtype))


WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_library.impl("add_product_", _add_product, "CompositeExplicitAutograd")
_library.impl("added_up", _added_up, "CompositeExplicitAutograd")
torch.library.register_fake("coda::add_product_", lambda into, left, right: None, lib=_library)
torch.library.register_fake("coda::added_up", _fake_added_up, lib=_library)

ADDED_UP, ADD_PRODUCT_ = torch.ops.coda.added_up.default, torch.ops.coda.add_product_.default
"""added_up(into, left [M, K], right [K, N]) -> into + left @ right [M, N], or the product alone if `into` is None: in
float32 if the matrices have 16 bits. Compiled graphs add in the memory of `into`, by add_product_."""

_ADDS = "Tensor left, Tensor right, str region, str target"
_library.define(f"add_region_(Tensor(a!) into, {_ADDS}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(f"added_region(Tensor into, {_ADDS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _add_region(into: Tensor, left: Tensor, right: Tensor, region: str, target: str) -> None:
    blocks.into(parse(region), [left, right], [into])


def _added_region(into: Tensor, left: Tensor, right: Tensor, region: str, target: str) -> Tensor:
    _add_region(made := into.clone(), left, right, region, target)
    return made


_library.impl("add_region_", _add_region, "CompositeExplicitAutograd")
_library.impl("added_region", _added_region, "CompositeExplicitAutograd")
torch.library.register_fake("coda::add_region_", lambda *_: None, lib=_library)
torch.library.register_fake("coda::added_region", lambda into, *_: torch.empty_like(into), lib=_library)

ADD_REGION_, ADDED_REGION = torch.ops.coda.add_region_.default, torch.ops.coda.added_region.default
"""added_region(into, two matrices, region: Region.text, target) -> into + what the Region makes of them, in float32.
Compiled graphs launch its kernel on the memory of `into`, by add_region_."""


@register_flop_formula(torch.ops.coda.added_region)
def _flops_added_region(
    into: object, left: torch.Size, right: torch.Size, region: str, *_: object, **__: object
) -> int:
    return _flops([left, right], region, "")


@register_flop_formula(torch.ops.coda.added_up)
def _flops_added_up(into: object, left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    return 2 * left[0] * left[1] * right[1]


@register_flop_formula(torch.ops.coda.region)
def _flops(inputs: list[torch.Size], region: str, target: str, *_: object, **__: object) -> int:
    """What the partitioner weighs against memory, under an activation memory budget."""
    r = parse(region)
    i, dim = r.m_axis
    return sum(2 * inputs[i][dim] * r.n * k for p in r.products for _, _, k in p.terms)
