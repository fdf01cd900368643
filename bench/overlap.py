"""Kernels that begin before the one before them has ended: Regions that read one tensor, as queries, keys and values
do, in one line of a compiled graph and one after the other, and the bare products.

    python bench/overlap.py [CASE ...] [--out FILE]      (default: all of WORK, bench/results/overlap.jsonl)

A JSON line per case: "ms" in one rotation and "sustained_ms", each repeated alone (of what takes 0.1 ms at
least), of all three.
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
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from codegen_cases import random_inputs, rotary_alone, token_scale  # noqa: E402

from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.codegen.tiles import Config  # noqa: E402
from coda_inductor.core import blocks  # noqa: E402
from coda_inductor.core.region import Region  # noqa: E402
from coda_inductor.kernels import launch  # noqa: E402
from coda_inductor.measure import timing  # noqa: E402

WAYS = ("overlapping", "in turn", "products")
TILES = {rotary_alone: Config(128, 128, 1, 2, True), token_scale: Config(128, 128, 2, 1, True)}
Head = Callable[[int, int], Region]
QKV: tuple[Head, ...] = (rotary_alone, rotary_alone, token_scale)
WORK: dict[str, tuple[int, int, tuple[Head, ...], tuple[int, ...]]] = {  # tokens, depth, Regions, their widths
    "q, k, v, 2048": (16384, 2048, QKV, (2048, 2048, 2048)),
    "q, k, v, 4096": (16384, 4096, QKV, (4096, 4096, 4096)),
    "q, k, v, Llama 1B": (8192, 2048, QKV, (2048, 512, 512)),
    "q, k, v, Llama 8B": (8192, 4096, QKV, (4096, 1024, 1024)),
    "q, k, v, Llama 8B, 256 tokens": (256, 4096, QKV, (4096, 1024, 1024)),
    "q, k, v, Llama 8B, 16 tokens": (16, 4096, QKV, (4096, 1024, 1024)),
}


def sized(make: Head, width: int, depth: int) -> Region:
    """The Region of that many columns, exactly."""
    region = make(width, depth)
    return replace(region, n=width // 2 if region.half else width)


def row(case: str) -> dict[str, Any]:
    """One case; both ways must give the same bits."""
    m, k, makes, widths = WORK[case]
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    regions = [sized(make, width, k) for make, width in zip(makes, widths, strict=True)]
    work, configs = list[tuple[launch.Kernel, list[Tensor], list[Tensor]]](), []
    for make, region in zip(makes, regions, strict=True):
        config = TILES[make] if m > 1024 else legality.candidates(region, m)[0]
        kernel, inputs = launch.kernel(region.text), [a, *random_inputs(region, m, "cuda")[1:]]
        kernel.compiled(config)
        kernel.use(legality.bucket(m), config)
        work.append((kernel, inputs, blocks.outputs(region, inputs)))
        configs.append(config)
    weights = [inputs[1].t() for _, inputs, _ in work]
    products = [(w, torch.empty(m, w.shape[1], device="cuda", dtype=a.dtype)) for w in weights]

    def in_turn() -> None:
        for kernel, inputs, outs in work:
            kernel(inputs, outs)

    def plain() -> None:
        for w, out in products:
            torch.mm(a, w, out=out)

    in_turn()
    wanted = [out.clone() for *_, outs in work for out in outs]
    launch.together(work)
    assert all(torch.equal(out, want) for out, want in zip((o for *_, outs in work for o in outs), wanted, strict=True))
    calls = [lambda: launch.together(work), in_turn, plain]
    turns = timing.by_turns(calls, 41, timing.launching(calls))
    sustained = timing.repeated(calls, turns) if min(turns) > 0.1 else [None] * 3
    return {
        "case": case, "tokens": m, "depth": k, "widths": widths, "tiles": list(map(str, configs)),
        "ms": dict(zip(WAYS, turns, strict=True)), "sustained_ms": dict(zip(WAYS, sustained, strict=True)),
        "machine": torch.cuda.get_device_name(), "versions": target.versions(), "command": "python bench/overlap.py",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(WORK))
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "overlap.jsonl"))
    given = parser.parse_args()
    with open(given.out, "a") as file:
        for case in given.cases:
            found = row(case)
            print(json.dumps(found), file=file, flush=True)
            print({key: found[key] for key in ("case", "ms", "sustained_ms")}, flush=True)


if __name__ == "__main__":
    main()
