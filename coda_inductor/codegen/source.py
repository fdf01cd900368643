"""Region -> the text of a Python module with one epilogue function over the accumulator. Text only, no compiler.

The function is plain Python over one element (two accumulators if two products share the tile): CuTeDSL traces it into
the kernel, and tests call it on torch tensors. Operands are always pinned to their kind, because quack's guess from
shapes is ambiguous when M = N. Names are positional and the text holds no extent, so that Regions which do the same to
different products share one kernel.

The one thing to know: sums are not masked where a tile hangs over the edge of the matrix. In the columns past N
accumulators, tiles and feature vectors read 0, token vectors do not; in the rows past M feature vectors do not, and
nor do token vectors of 16 bits. `needs_mask` proves the summed value 0 past the end of the summed axis, or the sum is a
masked one. So is a maximum, unless it is one of sizes, and of 8-bit matrices (`past_the_edge`).
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.core.dtypes import DTYPES, EIGHT_BITS, FORMATS
from coda_inductor.core.heads import ACC, columns, over_heads, summand
from coda_inductor.core.ops import OPS, at_zero
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Let, Operand, Reduction, Region

# Helpers of OPS' spellings, included where used. Relative error below 7e-7; the hardware's tanh.approx has 5e-4. The
# shorter tanh's absolute error is below 2e-7, with exact exp2 and rcp; in GELU's backward (H200, 8192 x 6400 x 1600) it
# spares 50 us of 420.
HELPERS = {
    "sigmoid": '''def sigmoid(x):
    """1 / (1 + exp(-x))"""
    return cute.arch.rcp_approx(cute.math.exp2(x * -1.4426950408889634, fastmath=True) + 1.0)
''',
    "tanh": '''def tanh(x):
    """(1 - exp(-2|x|)) / (1 + exp(-2|x|)) with x's sign, and near 0, where that cancels, five terms of the series."""
    s = x * x
    near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    e = cute.math.exp2(cute.arch.fmax(x, -x, nan=True) * -2.8853900817779268, fastmath=True)
    far = (1.0 - e) * cute.arch.rcp_approx(1.0 + e)
    return select_(s < 0.0625, near, select_(x < 0.0, -far, far))
''',
    "tanh_beside_one": '''def tanh_beside_one(x):
    """2 / (1 + exp(-2x)) - 1: near 0, where that cancels, as exact as a sum with 1 is."""
    return 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * -2.8853900817779268, fastmath=True) + 1.0) - 1.0
''',
    "erf": '''def erf(x):
    """x * p(x^2) / q(x^2), fitted to the least relative error up to 3.85; then 1, but for 5e-8."""
    s = cute.arch.fmin(x * x, 14.8225, nan=True)
    p = 0.010874247 + s * (0.00027692868 + s * -1.58473597e-06)
    p = 1.12837875 + s * (0.37861976 + s * (0.0742447004 + s * p))
    q = 1.0 + s * (0.668865442 + s * (0.188808948 + s * (0.0293847695 + s * 0.0025709304)))
    y = x * p * cute.arch.rcp_approx(q)
    return cute.arch.fmin(cute.arch.fmax(y, -1.0, nan=True), 1.0, nan=True)
''',
}
# A "col" vector varies over M: it is what token vectors are, and what is left of a sum over N.
OPS_OF_EXTENT = {
    "token": "ColVecLoad", "feature": "RowVecLoad", "sample": "SampleVector", "tile": "TileLoad",
    "table": "RotaryCosSinTMALoad",
}  # fmt: skip
# What the kernel of two summed products is told of their matrices (device._Summed).
SPANS = ("a_apart", "b_apart", "a_turned", "b_turned")
SECONDS = ("a_second", "b_second", "first_steps")  # and of two of unlike K (unlike.Unlike)
DOORS = ("entrance", "way_out")  # what every kernel is told: addresses, or 0 (doors.py, device._Overlapping)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where quack finds the Region's inputs and outputs. One tile operand is "c", one store is "D": both have
    slots of their own in the mainloop's interface; the others are x0.., y0.., and sums are r0... With two products
    there is neither (every store is half of the doubled tile), but of neighbours: their store is the tile."""

    operands: tuple[str, ...]
    stores: tuple[str, ...]
    sums: tuple[str, ...]


def slots(region: Region) -> Slots:
    """The names in the generated module, in the Region's order."""
    single = len(region.products) == 1
    tiles = [i for i, o in enumerate(region.operands) if o.extent == "tile"]
    operands = tuple("c" if single and tiles[:1] == [i] else f"x{i}" for i in range(len(region.operands)))
    whole = single or region.neighbours
    stores = tuple("D" if whole and i == 0 else f"y{i}" for i in range(len(region.stores)))
    return Slots(operands, stores, tuple(f"r{i}" for i in range(len(region.reductions))))


def second(slot: str) -> str:
    """The slot of a store's second value, in a Region of halves."""
    return f"{slot}s"


def whole(slot: str) -> str:
    """The slot of a finished sum."""
    return f"{slot}w"


def render(region: Region, target: Target = SM_90A, *, swapped: bool = False) -> str:
    """The module. `swapped`: the second product's weight lies first in memory, so it is the first lane."""
    names = slots(region)
    pair, half = len(region.products) == 2, region.half
    spelled = dict(zip((o.name for o in region.operands), names.operands, strict=True))
    lanes = [p.name for p in (reversed(region.products) if swapped else region.products)]
    body = []
    if pair:
        spelled |= {lanes[0]: "a0", lanes[1]: "a1"}
        body.append("a0, a1 = unpack(acc)")
        # Feature vectors arrive as pairs too, beside two weights of one value twice (device.LaneVector).
        features = {o.name for o in region.operands if o.extent in ("feature", "sample") and not half}
        spelled |= {name: f"{spelled[name]}.a" for name in features}
    else:
        spelled[lanes[0]] = "acc"
    late, heads = rounded_late(region), over_heads(region)
    spelled |= {let.name: f"h{i}.a" if pair else f"h{i}" for i, let in enumerate(heads)}
    for i, let in enumerate(region.lets):
        if let.name not in late and let not in heads:
            body.append(f"t{i} = {_expression(region, let, spelled)}")
            spelled[let.name] = f"t{i}"
    leaves, sums = _leaves(region, spelled), []
    for slot, total in zip(names.sums, region.reductions, strict=True):
        rounding = late.get(total.value)
        r = replace(total, value=str(rounding.args[0])) if rounding else total
        scaled, value = _summed(region, r, spelled, pair)
        options = [f'"{slot}"', *([str(r.tokens)] if r.tokens else []), *(["scaled=True"] if scaled else [])]
        if REDUCTIONS[r.of].selects:
            options += [f'rounded="{FORMATS[rounding.op].cute}"'] if rounding else []
            options += ["masked=True"] if past_the_edge(region, r) else []
        sums.append(f'"{slot}": {_sink(region, r)}({", ".join(options)})')
        leaves.append(f'"{slot}": {value}')
    pins = [f'"{slot}": {_pin(region, o, slot)}'
            for slot, o in zip(names.operands, region.operands, strict=True) if slot != "c"]  # fmt: skip
    pins += [f'"h{i}": HeadSum("h{i}", {columns(region, let)})' for i, let in enumerate(heads)]
    leaving = [f'LaneStore("{s}")' if pair and region.n % 8 else f'"{s}"' for s in names.stores if s != "D"]
    if region.halved:
        leaving = [
            f'HalfStore("{s}", {i}, {half})' for slot in names.stores for i, s in enumerate((slot, second(slot)))
        ]
    outputs = "".join(f"{s}, " for s in leaving)
    before = _prepass(region, heads)
    helpers = "\n\n".join(text for name, text in HELPERS.items() if any(f"{name}(" in line for line in [*body, before]))
    return TEMPLATE.format(
        device=device_digest(target),
        module=target.device,
        names=", ".join(NAMES),
        sinks=SINKS,
        types=", ".join(row.cute for row in FORMATS.values() if row.cute),
        helpers=f"\n\n{helpers}" if helpers else "",
        decorator=_decorator(region),
        outputs=f"({outputs})",
        ops=f"{{{', '.join(pins)}}}",
        sums=f"{{{', '.join(sums)}}}",
        half=f"\n    half={half}," if half else "",
        before=before,
        prepass=f"\n    prepass=prepass,\n    prepass_outs={head_slots(region)}," if heads else "",
        args="".join(f", {slot}" for slot in (*names.operands, *head_slots(region))),
        body="\n    ".join([*body, f"return {{{', '.join(leaves)}}}"]),
    )


SAMPLED = "SampleReduce"  # the class of sinks.py that adds up the rows of each sample
NAMES = sorted({name for row in REDUCTIONS.values() for name in row.sinks.values()} | {SAMPLED})
NAMES += sorted(f"Masked{name}" for row in REDUCTIONS.values() for name in row.sinks.values() if row.linear)
SINKS = ", ".join(["HeadSum", *NAMES])
"""Of sinks.py, what a generated module imports."""
NAMES = ["HalfStore", "HalfVector", "LaneStore", "LaneVector", "SampleVector"]
NAMES += ["neighbours", "one_product", "summed_products", "two_products", "unlike_products"]
"""Of a target's device code, what a generated module imports."""

TEMPLATE = '''"""Generated by coda_inductor (device code {device})."""

import cutlass.cute as cute
from coda_inductor.codegen.{module} import (
    {names},
)
from coda_inductor.codegen.sinks import (
    {sinks},
)
from cutlass import {types}, select_
from quack.epilogue.math import pack, unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad, TileLoad
from quack.epilogue.rotary import RotaryCosSinTMALoad
{helpers}

{before}@{decorator}(
    outputs={outputs},
    ops={ops},
    reduces={sums},{half}{prepass}
)
def epilogue(acc{args}):
    {body}
'''


def head_slots(region: Region) -> tuple[str, ...]:
    """The names of the sums over heads in the generated module."""
    return tuple(f"h{i}" for i in range(len(over_heads(region))))


def _prepass(region: Region, heads: list[Let]) -> str:
    """The function of one accumulator that says what the sums over heads add up."""
    slot = dict(zip((o.name for o in region.operands), slots(region).operands, strict=True))
    body, leaves, read = list[str](), list[str](), dict[str, None]()
    if not heads:
        return ""
    for i, total in enumerate(heads):
        of = summand(region, total)
        spelled = slot | {ACC: "acc"} | {let.name: f"{let.name}_{i}" for let in of.lets}
        body += [f"{spelled[let.name]} = {_expression(region, let, spelled)}" for let in of.lets]
        leaves.append(f'"h{i}": {spelled[of.value]}')
        read |= dict.fromkeys(slot[a] for let in of.lets for a in let.args if a in slot)
    args = "".join(f", {name}" for name in read)
    lines = [*body, f"return {{{', '.join(leaves)}}}"]
    return f"def prepass(acc{args}):\n    " + "\n    ".join(lines) + "\n\n\n"


def _decorator(region: Region) -> str:
    """The function of the device code that makes an epilogue of the function."""
    if region.neighbours:
        return "neighbours"
    if region.unlike:
        return "unlike_products"
    return "two_products" if len(region.products) == 2 else "summed_products" if region.summed else "one_product"


def _leaves(region: Region, spelled: dict[str, str]) -> list[str]:
    """What the function returns to be stored, by slot: of halves both values, of neighbours as one pair."""
    found = []
    for slot, s in zip(slots(region).stores, region.stores, strict=True):
        if region.neighbours:
            found.append(f'"{slot}": pack({spelled[s.value]}, {spelled[s.second]})')
            continue
        found.append(f'"{slot}": {spelled[s.value]}')
        if region.halved:
            found.append(f'"{second(slot)}": {spelled[s.second]}')
    return found


def _expression(region: Region, let: Let, spelled: dict[str, str]) -> str:
    """`let` in CuTeDSL; literals as Python floats, which survive a round trip through repr."""
    spelling = OPS[let.op].cute
    if let.op == "tanh" and only_beside_one(region, let.name):
        spelling = "tanh_beside_one({0})"
    return spelling.format(*(spelled[a] if isinstance(a, str) else literal(a) for a in let.args))


def only_beside_one(region: Region, name: str) -> bool:
    """Is a value, or its square, only added to 1 or taken from it, as in GELU? Then digits below 1's last do not
    matter."""
    uses = [let for let in region.lets if name in let.args]
    leaves = any(name in (s.value, s.second) for s in region.stores) or any(name == r.value for r in region.reductions)

    def beside(let: Let) -> bool:
        if let.op in ("add", "sub"):
            return 1.0 in let.args
        return (let.op == "neg" or let.args == (name, name)) and only_beside_one(region, let.name)

    return bool(uses) and not leaves and all(map(beside, uses))


def rounded_late(region: Region) -> dict[str, Let]:
    """The roundings, by name, of which nothing but the largest is asked: it is rounded in their place. (H100, SwiGLU
    backwards with four of them, 16384 x 8192 x 2048: with that, and where nothing is masked, 810 us, else 882.)"""
    lets = {let.name: let for let in region.lets if let.op in FORMATS and isinstance(let.args[0], str)}
    used = {a for let in region.lets for a in let.args} | {v for s in region.stores for v in (s.value, s.second)}
    used |= {r.value for r in region.reductions if not REDUCTIONS[r.of].selects}
    return {name: let for name, let in lets.items() if name not in used}


def literal(x: float) -> str:
    """A number that survives a round trip through repr."""
    return repr(float(x)) if math.isfinite(x) else f'float("{x}")'


def _pin(region: Region, operand: Operand, slot: str) -> str:
    """How the operand is read."""
    if operand.extent == "feature" and len(region.products) == 2:
        if region.halved:
            return f'HalfVector("{slot}", {region.half})'
        if not region.half:
            return f'LaneVector("{slot}")'
    if operand.extent == "sample":
        return f'SampleVector("{slot}", {len(region.products)})'
    return f'{OPS_OF_EXTENT[operand.extent]}("{slot}")'


def _sink(region: Region, total: Reduction) -> str:
    """The class that adds up."""
    if total.tokens:
        return SAMPLED
    masked = REDUCTIONS[total.of].linear and needs_mask(region, total)
    return f"{'Masked' if masked else ''}{REDUCTIONS[total.of].sinks[total.over]}"


def _summed(region: Region, total: Reduction, spelled: dict[str, str], pair: bool) -> tuple[bool, str]:
    """(is it two factors?, what the function returns to be summed). A product of two names is returned as its factors:
    quack folds them with one fma and the product is never rounded. With two products the second lane is neutral."""
    value = total.value
    if pair:
        return False, f"({spelled[value]}, {spelled[value] if REDUCTIONS[total.of].repeats else 0.0})"
    if not REDUCTIONS[total.of].linear:
        return False, spelled[value]
    factors = next((let.args for let in region.lets if let.name == value and let.op == "mul"), ())
    if len(factors) == 2 and all(isinstance(f, str) for f in factors) and not needs_mask(region, total):
        return True, "({}, {})".format(*(spelled[str(f)] for f in factors))
    return False, spelled[value]


UNKNOWN = "unknown"  # some finite number: it comes from real data alone, which the edge does not cut off
Outside = float | str | None
"""A value past the end of an axis: known, UNKNOWN, or None (not known to be finite)."""
REAL = {"N": ("token",), "M": ("feature", "sample")}
"""The operands that are real data past the end of an axis."""


def needs_mask(region: Region, total: Reduction) -> bool:
    """False only if the summed value is provably 0 where the last tile covers columns past N, or rows past M, or if
    whole tiles of rows make it up."""
    if total.tokens:
        return False
    real = {o.name for o in region.operands if o.extent in REAL[total.over]}
    outside: dict[str, Outside] = {p.name: 0.0 for p in region.products}
    outside |= {o.name: UNKNOWN if o.name in real else _read_past(o, total.over) for o in region.operands}
    for let in region.lets:
        if all(not isinstance(a, str) or a in real for a in let.args):
            real.add(let.name)
        outside[let.name] = _outside(let, outside, let.name in real)
    return outside[total.value] != 0.0


def past_the_edge(region: Region, total: Reduction) -> bool:
    """Might what is selected lie past the edge? The largest of sizes does not, where 0 stands there. Only of 8-bit
    matrices: 0 times an infinite scale is NaN, and there the cast by such a scale has made the row itself NaN."""
    made = {let.name: let.op for let in region.lets}
    size = made.get(total.value) == "abs" and REDUCTIONS[total.of].passes_over_zeros
    eight_bits = all(DTYPES[dtype] in EIGHT_BITS for dtype in region.dtypes)
    return not (size and eight_bits) or needs_mask(region, total)


def _read_past(operand: Operand, over: str) -> Outside:
    """What an operand that ends with the axis reads behind its end: 0, but for what vectors of 16 bits read past an odd
    M. They are copied in words of 4 bytes, so that row has what comes next in memory. (N is even beside such.)"""
    return None if over == "M" and operand.extent == "token" and operand.dtype != "f32" else 0.0


def _outside(let: Let, outside: dict[str, Outside], real: bool) -> Outside:
    """0 times a finite unknown is 0; any other mix of the known and the unknown might overflow, so it is None. What is
    made of real data alone is as finite here as in the columns or rows that count."""
    args = [outside[a] if isinstance(a, str) else a for a in let.args]
    if real:
        return UNKNOWN
    if None in args:
        return None
    known = tuple(a for a in args if not isinstance(a, str))
    if len(known) < len(args):
        return 0.0 if let.op in ("mul", "scaled") and 0.0 in known else None
    return at_zero(let.op, known)


COMMON = ("device.py", "finish.py", "sinks.py", "unlike.py")
"""The device code that all targets' kernels depend on."""


def device_digest(target: Target = SM_90A) -> str:
    """Names a target and the content of its kernels' hand-written device code: part of every generated module's text,
    and so of its name, because quack's fingerprint of a function leaves out what is imported from site-packages."""
    names = dict.fromkeys((*COMMON, f"{target.device}.py"))
    texts = (Path(__file__).with_name(name).read_bytes() for name in names)
    return hashlib.sha256(b"\0".join((target.name.encode(), *texts))).hexdigest()[:16]


def form(region: Region) -> str:
    """What the compiler sees of a Region beside the module's text: no extent is in either."""
    layouts = [(p.a_layout, p.b_layout) for p in region.products]
    return json.dumps(
        [
            *region.dtypes,
            region.fast,
            region.adds,
            layouts,
            [o.dtype for o in region.operands],
            [s.dtype for s in region.stores],
        ]
    )


def module_name(text: str, kind: str = "epilogue") -> str:
    """Equal text, equal name. `kind`: what is generated."""
    return f"coda_{kind}_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
