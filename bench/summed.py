"""Two products in one sum, against the same with the second product apart, whose tile the epilogue reads.

    python bench/summed.py [CASE ...] [--out FILE]      (default: all of WORK, bench/results/summed.jsonl)

One JSON line per case: "turns_ms", "busy_ms" of the one kernel, of torch.mm(out=) and the other kernel ("apart"), and
of both products as mm(out=) alone ("floor"), by turns and in a busy GPU, of long calls under a load that lasts
(timing.compared), in one burst; each kernel in the tile that is fastest alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from codegen_cases import norm_gradients, random_inputs  # noqa: E402

from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.core import blocks  # noqa: E402
from coda_inductor.core.region import Let, Operand, Product, Region, Store  # noqa: E402
from coda_inductor.core.verify import verify  # noqa: E402
from coda_inductor.kernels import launch  # noqa: E402
from coda_inductor.kernels.prebuild import Job, prebuild  # noqa: E402
from coda_inductor.measure import timing, tune  # noqa: E402

ROUNDS, SIDES = 15, ("together", "apart", "floor")
Case = tuple[int, int, int, bool]
WORK: dict[str, Case] = {
    f"{what} {d}": (16384, d, k, norm)
    for d, ff in ((2048, 5504), (4096, 11008), (8192, 22016))
    for what, k, norm in (("gate|up", ff, True), ("k|v", d, False))
} | {"gate|up llama-1b": (8192, 2048, 8192, True), "k|v llama-1b": (8192, 2048, 512, False)}
"""Tokens, width, depth of each product, and is a norm's backward behind the sum?"""


def together(n: int, k: int, norm: bool) -> Region:
    """Both products in one accumulator."""
    plain = Region(n, "bf16", (Product("acc", 0, 1, k, "kn"),), (), (), (Store("acc", "bf16"),), ())
    return verify(replace(norm_gradients(n, k) if norm else plain, products=(Product("acc", 0, 1, k, "kn", (2, 3)),)))


def apart(region: Region) -> Region:
    """The same with the second product read as a tile, the last operand."""
    product, other = region.products[0], Operand("other", "tile", "bf16")

    def both(name: Any) -> Any:
        return "both" if name == product.name else name

    lets = tuple(Let(x.name, x.op, tuple(map(both, x.args))) for x in region.lets)
    return verify(replace(
        region, products=(replace(product, plus=None),), operands=(*region.operands, other),
        lets=(Let("both", "add", (product.name, "other")), *lets),
        stores=tuple(replace(s, value=both(s.value)) for s in region.stores),
        reductions=tuple(replace(r, value=both(r.value)) for r in region.reductions),
    ))  # fmt: skip


def row(name: str, case: Case) -> dict[str, Any]:
    """One case."""
    m, n, k, norm = case
    region = together(n, k, norm)
    inputs = random_inputs(region, m, "cuda")
    a, b, c, d, *operands = inputs
    tile, scrap = (torch.empty(m, n, dtype=a.dtype, device="cuda") for _ in range(2))
    torch.mm(c, d, out=tile)
    chained = [a, b, *operands, tile]
    tuned = [tune.tune(region, inputs, rounds=ROUNDS), tune.tune(apart(region), chained, rounds=ROUNDS)]
    runs = [launcher(region, inputs), launcher(apart(region), chained)]

    def chain() -> None:
        torch.mm(c, d, out=tile)
        runs[1]()

    def plain() -> None:
        torch.mm(c, d, out=tile)
        torch.mm(a, b, out=scrap)

    times = timing.compared([runs[0], chain, plain], 25)
    said = {who: {"turns_ms": t.turns, "busy_ms": t.busy} for who, t in zip(SIDES, times, strict=True)}
    return {
        "case": name, "m": m, "n": n, "k": k, **said, "tiles": [str(t.config) for t in tuned],
        "machine": torch.cuda.get_device_name(), "versions": target.versions(), "command": "python bench/summed.py",
    }  # fmt: skip


def launcher(region: Region, inputs: list[torch.Tensor]) -> Callable[[], None]:
    """The kernel on these inputs."""
    kernel, outs = launch.kernel(region.text), blocks.outputs(region, inputs)
    return lambda: kernel(inputs, outs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "summed.jsonl"))
    given = parser.parse_args()
    names = given.cases or list(WORK)
    regions = [r for name in names for r in (together(*WORK[name][1:]), apart(together(*WORK[name][1:])))]
    prebuild([Job(r, config) for r in regions for config in legality.candidates(r, 16384)])
    with open(given.out, "a") as file:
        for name in names:
            found = row(name, WORK[name])
            print(json.dumps(found), file=file, flush=True)
            mine, theirs = found["together"], found["apart"]
            ratios = ", ".join(f"{theirs[t] / mine[t]:.3f}" for t in ("turns_ms", "busy_ms"))
            print(f"{name}: apart takes {ratios} times as long, {found['tiles']}", flush=True)


if __name__ == "__main__":
    main()
