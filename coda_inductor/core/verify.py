"""Is this Region well formed? Run on every Region that is made; a complaint is a bug of ours."""

from __future__ import annotations

import keyword
from collections.abc import Callable

from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.ops import OF_PAIRS, OPS, OVER_HEAD
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Let, Region


def verify(region: Region) -> Region:
    """Returns the Region, or raises BrokenInvariant with the expected and the found."""

    def check(holds: bool, message: str) -> None:
        if not holds:
            raise BrokenInvariant(f"region {region.digest}: {message}")

    check(bool(region.products), "no product")
    check(bool(region.stores or region.reductions), "nothing leaves it")
    check(all(len(p.plus or (0, 0)) in (2, 3) for p in region.products), "a sum of what is no product")
    depths = [k for p in region.products for _, _, k in p.terms]
    check(region.n > 0 and all(k > 0 for k in depths), f"n={region.n}, k={depths}")
    _verify_products(region, check)
    check(bool(region.half) or not region.neighbours, "neighbouring features without halves of heads")
    if region.half:
        _verify_halves(region, check)
    for dtype in (*region.dtypes, *(o.dtype for o in region.operands), *(s.dtype for s in region.stores)):
        check(dtype in DTYPES, f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    tiles, defined, pairs = set(), set(), set()
    for name, extent in [(p.name, "tile") for p in region.products] + [(o.name, o.extent) for o in region.operands]:
        check(_is_name(name) and name not in defined, f"name {name!r} is taken or no identifier")
        check(extent in ("token", "feature", "sample", "tile", "table"), f"extent {extent!r} of {name}")
        check(extent != "table" or bool(region.half), f"a table {name} without halves of heads")
        defined.add(name)
        pairs |= {name} if region.half and extent in ("feature", "table") else set()
        tiles |= {name} if extent in ("tile", "table") else set()
    for o in region.operands:
        check((o.extent == "sample") == (o.tokens > 0), f"{o.name}, per {o.extent}, of samples of {o.tokens} tokens")
        check(o.extent != "sample" or not region.half, f"{o.name} of a sample beside halves of heads")
    for let in region.lets:
        check(_is_name(let.name) and let.name not in defined, f"name {let.name!r} is taken or no identifier")
        check(let.op in OPS, f"unknown operation {let.op!r}")
        check(
            len(let.args) == OPS[let.op].arity, f"{let.op} takes {OPS[let.op].arity} arguments, found {len(let.args)}"
        )
        names = [a for a in let.args if isinstance(a, str)]
        check(bool(names), f"{let.name} is a constant")
        odd = [a for a in let.args if not isinstance(a, str) and (type(a) is not float or a != a)]
        check(not odd, f"{let.name} = {let.op}{let.args}: literals are Python floats, not {odd}")
        check(all(a in defined for a in names), f"{let.name} = {let.op}{let.args} uses what is not defined before it")
        picks = let.op in OF_PAIRS
        check(all((a in pairs) == picks for a in names), f"{let.name} = {let.op}{let.args}: only pairs have halves")
        if let.op == OVER_HEAD:
            _verify_over_head(region, let, tiles, check)
        defined.add(let.name)
        tiles |= {let.name} if tiles.intersection(names) else set()
    check(
        all(r.of in REDUCTIONS and r.over in REDUCTIONS[r.of].sinks for r in region.reductions),
        f"reductions {[(r.of, r.over) for r in region.reductions]} that no epilogue takes",
    )
    check(all(r.over == "M" for r in region.reductions if r.tokens), "a sum over the columns of each sample")
    check(
        all(bool(s.second) == bool(region.half) for s in region.stores), "a store of two values is of halves of heads"
    )
    seconds = [s.second for s in region.stores if s.second]
    for value in [s.value for s in region.stores] + seconds + [r.value for r in region.reductions]:
        check(value in tiles, f"{value!r} leaves the region but is not a tile")
    return region


def _verify_products(region: Region, check: Callable[[bool, str], None]) -> None:
    """Matrices of the sizes that their products share, and of two that are summed, four of them. One that is added to
    memory is alone."""
    wide = "f64" if region.dtype == "f64" else "f32"
    alone = region.is_plain and region.stores[0].dtype == wide
    check(alone or not region.adds, f"what is added to memory is no product alone, in {wide}")
    pairs = [pair for p in region.products for pair in p.pairs]
    used = {i for pair in pairs for i in pair}
    check(used == set(range(region.matrices)), f"matrices {sorted(used)} are not 0..{region.matrices - 1}")
    check(all(a != b for a, b in pairs), "a matrix multiplied by itself")
    if any(p.plus for p in region.products):
        check(len(region.products) == 1, f"{len(region.products)} products in a tile that sums two")
        check(len(used) == 4, f"a sum of products of {pairs}")
        check(all(p.plus is None or p.plus[2:] != (p.k,) for p in region.products), "the same K, said twice")
    for p in region.products:
        check(p.b_layout in ("nk", "kn"), f"layout {p.b_layout!r} of {p.name}'s weight is neither nk nor kn")
        check(p.a_layout in ("mk", "km"), f"layout {p.a_layout!r} of {p.name}'s left operand is neither mk nor km")
        alone = len(region.products) == 1 and not p.plus
        check(p.a_layout == "mk" or alone, f"{p.name} and another product, with a left operand of [K, M]")
        ks = {q.k for q in region.products if q.a == p.a or q.b == p.b}
        check(len(ks) == 1, f"products that share a matrix contract {sorted(ks)}")


def _verify_halves(region: Region, check: Callable[[bool, str], None]) -> None:
    """One weight, of whole heads, and nothing summed."""
    weights = [(p.a, p.b, p.b_layout) for p in region.products]
    check(len(weights) == 2 and len(set(weights)) == 1, f"halves of heads of {weights}, not of one weight")
    check(weights[0][2] == "nk", "halves of heads of a [K, N] weight")
    check(region.half > 0 and region.n % region.half == 0, f"n = {region.n} is no multiple of {region.half}")
    check(not region.reductions, "a reduction beside halves of heads")


def _verify_over_head(region: Region, let: Let, tiles: set[str], check: Callable[[bool, str], None]) -> None:
    """Tiles, of both halves if there are such, over a width that divides the columns."""
    x, y, width = let.args
    check(x in tiles and (y in tiles if region.half else y == 0.0), f"{let.name}: a sum over heads of {x} and {y}")
    whole = isinstance(width, float) and width > 0 and width.is_integer() and region.n % width == 0
    check(whole, f"{let.name}: {region.n} columns are no heads of {width}")
    check(width == region.half or not region.half, f"{let.name}: halves of {region.half}, not of {width}")


def _is_name(name: str) -> bool:
    """May generated Python call something `name`?"""
    return name.isidentifier() and not keyword.iskeyword(name)
