"""Sweeps as they stand beside attention, at any width, and tensors for them."""

from __future__ import annotations

import torch
from torch import Tensor

from coda_inductor.core.region import DTYPES, Let
from coda_inductor.core.sweep import Extent, Output, Part, Read, Sweep, Write, verify_sweep


def apart(n: int) -> Sweep:
    """Of gradients of q and of k, each of n columns: a bias's gradient, a norm's statistic with what the forward made,
    and both their sums with a vector, added up."""
    parts = tuple(
        Part(
            n,
            0,
            (Read("z", 3 * i, "tile"), Read("x", 3 * i + 1, "tile"), Read("u", 3 * i + 2, "feature")),
            (Let("v0", "mul", ("z", "x")), Let("v1", "mul", ("z", "u")), Let("v2", "add", ("v1", 0.5))),
            (Write("z", 3 * i), Write("v0", 3 * i + 1), Write("v2", 2)),
        )
        for i in range(2)
    )
    inputs = (("bf16", n), ("bf16", n), ("f32", n)) * 2
    sums = (Output("feature", n, "f32"), Output("token", 0, "f32"))
    return verify_sweep(Sweep(inputs, parts, (*sums, Output("token", 0, "f32"), *sums)))


def packed(n: int) -> Sweep:
    """Three gradients put side by side, scaled for each token, their sums over the tokens, and a statistic of all
    three."""
    parts = tuple(
        Part(
            n,
            0,
            (Read("z", i, "tile"), Read("x", 3, "tile", i * n), Read("s", 4, "token")),
            (Let("v0", "mul", ("s", "z")), Let("v1", "mul", ("v0", "x"))),
            (Write("v0", 0, i * n), Write("v0", 1, i * n), Write("v1", 2)),
        )
        for i in range(3)
    )
    outputs = (Output("tile", 3 * n, "bf16"), Output("feature", 3 * n, "f32"), Output("token", 0, "f32"))
    return verify_sweep(Sweep((("bf16", n),) * 3 + (("bf16", 3 * n), ("f32", 0)), parts, outputs))


def rotary(n: int) -> Sweep:
    """The gradient of heads of 16 turned back, by tables of the positions, its statistic before, a bias's gradient; and
    beside it the statistic of what is not turned."""
    tile: Extent = "tile"
    table: Extent = "table"
    reads = [Read(f"g{i}", 0, tile, 0, i) for i in (0, 1)] + [Read(f"x{i}", 1, tile, 0, i) for i in (0, 1)]
    reads += [Read(f"c{i}", 2, table, 0, i) for i in (0, 1)] + [Read(f"s{i}", 3, table, 0, i) for i in (0, 1)]
    lets = (
        Let("a0", "mul", ("g0", "c0")), Let("b0", "mul", ("g1", "s1")), Let("t0", "add", ("a0", "b0")),
        Let("a1", "mul", ("g1", "c1")), Let("b1", "mul", ("g0", "s0")), Let("t1", "sub", ("a1", "b1")),
        Let("p0", "mul", ("g0", "x0")), Let("p1", "mul", ("g1", "x1")),
    )  # fmt: skip
    writes = [Write(f"t{i}", 0, 0, i) for i in (0, 1)] + [Write(f"t{i}", 1, 0, i) for i in (0, 1)]
    writes += [Write("p0", 2), Write("p1", 2)]
    turned = Part(n // 2, 8, tuple(reads), lets, tuple(writes))
    plain = Part(n, 0, (Read("g", 4, tile), Read("x", 5, tile)), (Let("p", "mul", ("g", "x")),), (Write("p", 3),))
    inputs = (("bf16", n), ("bf16", n), ("bf16", 16), ("f32", 16), ("f16", n), ("f32", n))
    outputs = (Output("tile", n, "bf16"), Output("feature", n, "f32"), Output("token", 0, "f32"))
    return verify_sweep(Sweep(inputs, (turned, plain), (*outputs, Output("token", 0, "f32"))))


def headed(n: int) -> Sweep:
    """Gradients that lie head by head, heads of 16 of which the halves are read apart: put into rows, and summed; what
    lies in rows gives the number of tokens."""
    reads = (Read("x", 0, "tile"), Read("g", 1, "heads", inner=16), Read("k", 2, "heads", n, inner=16))
    lets = (Let("a", "mul", ("x", "g")), Let("b", "add", ("g", "k")))
    part = Part(n, 0, reads, lets, (Write("b", 0), Write("g", 1), Write("a", 2)))
    pairs = (Read("y0", 3, "heads", 0, 0, 16), Read("y1", 3, "heads", 0, 1, 16))
    turned = Part(n // 2, 8, pairs, (), (Write("y1", 3, 0, 0), Write("y0", 3, 0, 1)))
    tile, token = Output("tile", n, "bf16"), Output("token", 0, "f32")
    inputs = (("f32", n), ("bf16", n), ("bf16", 2 * n), ("f16", n))
    return verify_sweep(Sweep(inputs, (part, turned), (tile, Output("feature", n, "f32"), token, tile)))


def only_headed(n: int) -> Sweep:
    """Gradients that lie head by head and nothing else, heads of 8: put into rows, and summed."""
    reads = (Read("g", 0, "heads", inner=8),)
    part = Part(n, 0, reads, (), (Write("g", 0), Write("g", 1)))
    return verify_sweep(Sweep((("bf16", n),), (part,), (Output("tile", n, "bf16"), Output("feature", n, "f32"))))


CASES = (apart, packed, rotary, headed, only_headed)


def tensors(sweep: Sweep, m: int, device: str, seed: int = 0) -> list[Tensor]:
    """Random inputs; tables have one row for every eight tokens, or for all."""
    torch.manual_seed(seed)
    extents = {read.input: read.extent for part in sweep.parts for read in part.reads}
    rows = {"tile": m, "heads": m, "token": m, "feature": 1, "table": m // 8 if m % 8 == 0 else m}
    made = []
    for i, (dtype, width) in enumerate(sweep.inputs):
        inner = next(read.inner for part in sweep.parts for read in part.reads if read.input == i)
        length = m // 8 if m % 8 == 0 else m
        sizes = (m // length * width // inner, length, inner) if inner else (rows[extents[i]], width) if width else (m,)
        made.append(torch.randn(sizes, device=device).to(DTYPES[dtype]))
    return made
