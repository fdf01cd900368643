"""A generated module run on torch tensors, as its kernel would run it."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from codegen_cases import relative_error
from torch import Tensor

from coda_inductor.codegen import source
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.heads import columns, over_heads
from coda_inductor.core.interpret import interpret
from coda_inductor.core.ops import OPS
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Product, Region

HANGING = 8  # rows and columns by which the simulated last tile hangs over the edge
LOADS: tuple[str, ...] = ("LaneVector", "ColVecLoad", "RowVecLoad", "TileLoad")
SINKS = {kind: (row, over) for row in REDUCTIONS.values() for over, kind in row.sinks.items()}
SINKS[source.SAMPLED] = REDUCTIONS["sum"], "M"
"""By the name of a class of codegen/sinks.py: what is taken, and over what."""
OF_VECTORS = ("HalfStore", "HalfVector", "HeadSum", "SampleVector", "RotaryCosSinTMALoad")


class Pair(NamedTuple):
    """quack's value of two lanes."""

    a: Tensor
    b: Tensor


def as_float(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A torch function that takes and ignores CuTeDSL's keyword arguments, and accepts literals."""
    return lambda *args, **_: f(*(a if isinstance(a, Tensor) else torch.tensor(a, dtype=torch.float32) for a in args))


def standin() -> dict[str, Any]:
    """The names a generated module imports, on torch. Sinks and loads are strings; the decorator keeps them."""
    used = {name for op in OPS.values() for name in re.findall(r"cute\.math\.(\w+)", op.cute)}
    math = types.SimpleNamespace(**{name: as_float(getattr(torch, name)) for name in {*used, "exp2", "tanh", "erf"}})
    arch = types.SimpleNamespace(
        fmax=as_float(torch.maximum), fmin=as_float(torch.minimum), rcp_approx=as_float(torch.reciprocal)
    )
    names: dict[str, Any] = {"cute": types.SimpleNamespace(math=math, arch=arch), "select_": as_float(torch.where)}
    names |= {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}
    names["float32"] = as_float(torch.clone)
    names["unpack"], names["pack"] = lambda pair: pair, Pair
    for kind in (*LOADS, *SINKS, "MaskedColVecReduce", "MaskedRowVecReduce"):
        names[kind] = lambda name, *_, kind=kind, **given: types.SimpleNamespace(kind=kind, given=given)
    names |= dict.fromkeys(OF_VECTORS, lambda *_: None)
    for decorator in ("one_product", "two_products", "summed_products", "unlike_products", "neighbours"):
        names[decorator] = lambda **given: lambda fn: (fn, given)
    return names


def head_sum(given: dict[str, Any], slot: str, width: int, accs: list[Tensor], values: dict[str, Any]) -> Any:
    """What the module's first function says, of each accumulator, added up over `width` of them in both lanes."""
    function, lanes = given["prepass"], len(accs)
    total = torch.zeros_like(accs[0])
    for lane, acc in enumerate(accs):
        read = {name: values[name] for name in inspect.signature(function).parameters if name != "acc"}
        read = {name: v[lane] if isinstance(v, Pair) else v for name, v in read.items()}
        total += function(acc, **read)[slot]
    heads = total[:, : total.shape[1] - HANGING].unflatten(1, (-1, width // lanes))
    full = torch.nn.functional.pad(heads.sum(2, keepdim=True).expand(heads.shape).flatten(1), (0, HANGING))
    return Pair(full, full) if lanes == 2 else full


def run(text: str, region: Region, inputs: list[Tensor], *, swapped: bool = False) -> list[Tensor]:
    """A generated module on torch tensors, as the kernel would run it: over tiles that hang HANGING rows and columns
    over the edge, where hardware fills what ends there with 0, and plain sums add up what they get. A token vector of
    16 bits is copied in pairs: past an odd M comes what lies behind it in memory."""
    names = standin()
    text = text.replace("Float32(", "float32(")  # a type and a function: torch has no one thing that is both
    exec(text[text.index("\n\n", text.index("from quack.epilogue.rotary")) :], names)
    function, given = names["epilogue"]

    def hang(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.float(), (0, HANGING) * x.dim())

    def halves(x: Tensor) -> tuple[Tensor, ...]:
        """Of what varies over 2n features in its first dimension: the two of each head."""
        heads = x.unflatten(0, (-1, 2, region.block))
        return heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)

    def product(p: Product) -> Tensor:
        pairs = [(inputs[a].float(), inputs[b].float()) for a, b in p.pairs]
        turned = [(x if p.a_layout == "mk" else x.t(), w if p.b_layout == "kn" else w.t()) for x, w in pairs]
        return torch.stack([x @ w for x, w in turned]).sum(0)

    products = [product(p) for p in region.products]
    if region.half:
        products = [x.t() for x in halves(products[0].t())]
    m = products[0].shape[0]
    accumulators = [hang(x) for x in (reversed(products) if swapped else products)]
    values: dict[str, Any] = {}
    for slot, o, x in zip(source.slots(region).operands, region.operands, inputs[region.matrices :], strict=True):
        if region.half and o.extent != "token":
            lanes = [t.float().t() for t in halves(x)] if x.dim() == 1 else [x[:, i::2].float() for i in (0, 1)]
            values[slot] = Pair(*(hang(t.expand(m, -1).repeat(1, region.n // t.shape[-1])) for t in lanes))
            continue
        shape = {"token": (-1, 1), "feature": (1, -1)}.get(o.extent, (m + HANGING, -1))
        if o.tokens:  # a tile reads the vector of its first row, also where it hangs over the edge
            x = x.repeat_interleave(o.tokens, 0)[:m]
        padded = hang(x)
        if o.tokens:
            padded[m:] = padded[m - 1]
        if o.extent == "token" and o.dtype != "f32" and m % 2:
            padded[m] = torch.nan
        full = padded.reshape(shape).expand(m + HANGING, region.n + HANGING)
        values[slot] = Pair(full, full) if len(products) == 2 and o.extent in ("feature", "sample") else full
    for slot, let in zip(source.head_slots(region), over_heads(region), strict=True):
        values[slot] = head_sum(given, slot, columns(region, let), accumulators, values)
    found = function(Pair(*accumulators) if len(products) == 2 else accumulators[0], **values)
    slots = source.slots(region)

    def stored(slot: str) -> Tensor:
        if region.neighbours:
            values = found[slot]
        else:
            values = [found[y] for y in ((slot, source.second(slot)) if region.half else (slot,))]
        both = [value[:m, : region.n] for value in values]
        return torch.stack([x.unflatten(1, (-1, region.block or 1)) for x in both], 2).flatten(1)

    stores = [stored(y).to(DTYPES[s.dtype]) for y, s in zip(slots.stores, region.stores, strict=True)]
    sums = []
    for slot, total in zip(slots.sums, region.reductions, strict=True):
        sink, value = given["reduces"][slot], found[slot]
        row, over = SINKS[sink.kind.removeprefix("Masked")]
        if len(products) == 2:
            value = row.join(*value)
        elif sink.given.get("scaled"):
            value = value[0] * value[1]
        dim, masked = 1 if over == "N" else 0, sink.kind.startswith("Masked") or sink.given.get("masked", False)
        size, left = (region.n, m) if over == "N" else (m, region.n)
        masked |= not (row.linear or row.selects)
        if sink.kind == source.SAMPLED:  # of whole tiles, none of which hangs over the edge
            sums.append(value[:m, : region.n].unflatten(0, (-1, total.tokens)).sum(1).flatten())
            continue
        found_one = row.torch(value.narrow(dim, 0, size) if masked else value, dim)[:left]
        rounded = sink.given.get("rounded")
        sums.append(found_one.to(names[rounded]).float() if rounded else found_one)
    return stores + sums


def agree(region: Region, found: list[Tensor], inputs: list[Tensor]) -> bool:
    wanted = interpret(region, inputs)
    return all(relative_error(f, w) < 1e-5 or _neighbours(f, w) for f, w in zip(found, wanted, strict=True))


def _neighbours(found: Tensor, wanted: Tensor) -> bool:
    """Of what was rounded to bfloat16: equal, but for a hundredth that rounds to the number beside it, as what lies
    halfway does where a function is 3e-6 off."""
    if wanted.dtype is not torch.bfloat16 or not wanted.isfinite().all():
        return False
    apart = (found.to(wanted.dtype).view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    return bool((apart <= 1).all()) and int((apart > 0).sum()) <= max(1, wanted.numel() // 100)
