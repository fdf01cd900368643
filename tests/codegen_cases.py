"""The Regions of the package's cases, and random ones; random inputs for them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from coda_inductor.codegen.cases import *  # noqa: F403  (what other tests take from here)
from coda_inductor.codegen.cases import CASES as CASES
from coda_inductor.codegen.cases_of_8_bits import EIGHT_BITS as EIGHT_BITS
from coda_inductor.core import blocks
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.ops import OF_PAIRS, OPS, OVER_HEAD
from coda_inductor.core.region import Extent, Let, Operand, Product, Reduction, Region, Store
from coda_inductor.core.verify import verify


def random_region(seed: int, n: int = 24, k: int = 16) -> Region:
    """A well-formed Region of up to twelve lets over one or two products. Never divides by or takes roots of 0."""
    rng = random.Random(seed)
    pair = rng.random() < 0.4
    products = (Product("g", 0, 1, k, "nk"), Product("u", 0, 2, k, "nk")) if pair else (Product("acc", 0, 1, k, "nk"),)
    extents: list[Extent] = ["token", "feature"] if pair else ["token", "feature", "tile"]
    count = rng.randint(0, 4)
    operands = tuple(Operand(f"in_{i}", rng.choice(extents), rng.choice(["bf16", "f32"])) for i in range(count))
    names = [p.name for p in products] + [o.name for o in operands]
    tiles = [p.name for p in products] + [o.name for o in operands if o.extent == "tile"]
    lets: list[Let] = []
    chained: dict[str | float, int] = dict.fromkeys(names, 0)
    for i in range(rng.randint(1, 12)):
        op = rng.choice([o for o, row in OPS.items() if not row.positive and o not in (*OF_PAIRS, OVER_HEAD)])
        args: list[str | float] = [rng.choice(names) for _ in range(OPS[op].arity)]
        if len(args) == 2 and rng.random() < 0.25:
            args[1] = rng.choice([0.0, 0.5, -1.25])
        far = max(args, key=lambda a: chained.get(a, 0))
        if op == "exp" or chained.get(far, 0) > 3:  # bounded, so that nothing overflows, whichever rows there are
            lets.append(Let(f"b{i}", "tanh", (far,)))
            names.append(f"b{i}")
            args = [f"b{i}" if a == far else a for a in args]
            chained[f"b{i}"] = 0
        lets.append(Let(f"let_{i}", op, tuple(args)))
        names.append(f"let_{i}")
        chained[f"let_{i}"] = 1 + max(chained.get(a, 0) for a in args)
        tiles += [x.name for x in lets[-2:] if x.name not in tiles and any(a in tiles for a in x.args)]
    wide = ["bf16"] if pair else ["bf16", "f32"]
    stores = tuple(Store(rng.choice(tiles), rng.choice(wide)) for _ in range(rng.randint(0, 3)))
    totals = [rng.choice(tiles) for _ in range(rng.randint(0 if stores else 1, 2))]
    sums = tuple(Reduction(value, "M" if not pair and rng.random() < 0.5 else "N") for value in totals)
    if not pair and rng.random() < 0.25:
        sums += (Reduction(rng.choice(tiles), "N", "logsumexp"),)
    return verify(Region(n, "bf16", products, operands, tuple(lets), stores, sums))


def random_inputs(region: Region, m: int, device: str, *, seed: int = 0, up_first: bool = False) -> list[Tensor]:
    """Matrices and operands, about 1 in size; token vectors are positive. `up_first`: the second weight lies lower, but
    of two products that are summed the left operands lie as they come. Where samples are summed, M is of whole ones."""
    m = whole(region, m)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    of_left, of_right = (DTYPES[dtype] for dtype in region.dtypes)
    matrices: dict[int, Tensor] = {}
    for p in region.products:
        for a, b, k in p.terms:
            matrices[a] = laid_out(normal(*((m, k) if p.a_layout == "mk" else (k, m))).to(of_left))
            weight = normal(region.width, k) if p.b_layout == "nk" else normal(k, region.n)
            matrices[b] = laid_out((weight / k**0.5).to(of_right))
    for side, turned in zip(zip(*region.products[0].pairs, strict=True), (False, up_first), strict=True):
        if region.summed and not region.unlike:
            order = side[::-1] if turned else side
            both = torch.stack([matrices[i] for i in order])
            rows = laid_out(both.flatten(0, 1)).unflatten(0, both.shape[:2])
            matrices |= zip(order, rows.unbind(), strict=True)
    if len(region.products) == 2 and not region.half:  # both weights inside one allocation, which fixes their order
        first, second = (p.b for p in (reversed(region.products) if up_first else region.products))
        both = laid_out(torch.cat([matrices[first], matrices[second]]))
        matrices[first], matrices[second] = both[: region.n], both[region.n :]
    operands = []
    for o in region.operands:
        value = normal(*region.shape(o, m))
        value = (value.abs() + 0.5 if o.extent == "token" else value).to(DTYPES[o.dtype])
        operands.append(laid_out(value) if value.dim() == 2 else value)
    return [matrices[i] for i in range(region.matrices)] + operands


def whole(region: Region, m: int) -> int:
    """At least `m` rows, of whole samples."""
    return region.rows(m) if region.multiple > 1 else m


def laid_out(x: Tensor) -> Tensor:
    """A matrix in rows that a kernel reads: those of no multiple of 8 lie farther apart."""
    rows = blocks.empty_rows(x, x.shape[0], x.shape[1], x.dtype)
    return x if rows.stride() == x.stride() else rows.copy_(x)


def blank_outputs(region: Region, m: int, device: str) -> list[Tensor]:
    """Outputs full of NaN: what a kernel does not write is seen. Zeros, if it adds to them."""
    m = whole(region, m)
    x = torch.empty((m, 8)[:: -1 if region.m_axis[1] else 1], dtype=DTYPES[region.dtype], device=device)
    blocks.poison(region, outs := blocks.outputs(region, [x] * region.matrices))
    return outs


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Frobenius; 0 if both are zero, NaN if anything is."""
    found, wanted = found.double(), wanted.double()
    size = wanted.norm()
    return float((found - wanted).norm() / size) if size else float((found - wanted).norm())
