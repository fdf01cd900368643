"""What finishes the sums of an epilogue: the kernel behind it (codegen/finish.py), against torch on the same partial
results behind the same kernel without sums.

    python bench/finish.py [--out FILE]      (default: bench/results/finish.jsonl)

One JSON line per case: "ms" by turns and "host_us" (the least of 30) of both, and of the kernel without sums alone. The
first also takes the sums in its epilogue, the second does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from codegen_cases import norm_gradients, norm_producer, random_inputs, scores  # noqa: E402

from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.core import blocks  # noqa: E402
from coda_inductor.core.interpret import REDUCTIONS  # noqa: E402
from coda_inductor.core.region import Region  # noqa: E402
from coda_inductor.kernels import launch  # noqa: E402
from coda_inductor.measure import timing  # noqa: E402

WAYS = ("finished", "by torch", "without sums")
WORK: tuple[tuple[Callable[[int, int], Region], int, int, int], ...] = (
    (norm_producer, 16384, 2048, 2048), (norm_producer, 8192, 1024, 1024), (norm_gradients, 8192, 2048, 2048),
    (norm_gradients, 8192, 1024, 4096), (scores, 8192, 128256, 2048),
)  # fmt: skip
"""The epilogue, tokens, width and depth."""


def host_us(call: Callable[[], object]) -> float:
    """The least time that the host takes to launch a call."""
    least = float("inf")
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return 1e6 * least


def row(make: Callable[[int, int], Region], m: int, n: int, k: int) -> dict[str, Any]:
    """One case, in its first tile."""
    region = make(n, k)
    plain, inputs = replace(region, reductions=()), random_inputs(region, m, "cuda")
    config = legality.candidates(region, legality.bucket(m))[0]
    launches = [launcher(r, config, inputs) for r in (region, plain)]
    wholes, parts = blocks.outputs(region, inputs)[len(region.stores) :], []
    for r in region.reductions:
        sizes = (-(-m // config.tile_m), n) if r.over == "M" else (m, -(-n // config.tile_n))
        parts.append(torch.randn(sizes, device="cuda"))

    def by_torch() -> None:
        launches[1]()
        for part, whole, r in zip(parts, wholes, region.reductions, strict=True):
            REDUCTIONS[r.of](part, 0 if r.over == "M" else 1, out=whole)

    calls = [launches[0], by_torch, launches[1]]
    times = timing.by_turns(calls, 41, timing.launching(calls))
    return {
        "case": make.__name__, "m": m, "n": n, "k": k, "tile": str(config), "sums": len(parts),
        "ms": dict(zip(WAYS, times, strict=True)), "host_us": dict(zip(WAYS, map(host_us, calls), strict=True)),
        "machine": torch.cuda.get_device_name(), "versions": target.versions(), "command": "python bench/finish.py",
    }  # fmt: skip


def launcher(region: Region, config: Any, inputs: list[torch.Tensor]) -> Callable[[], None]:
    """The kernel on these inputs in this tile."""
    kernel, outs = launch.kernel(region.text), blocks.outputs(region, inputs)
    return lambda: kernel.run_in(config, inputs, outs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "finish.jsonl"))
    given = parser.parse_args()
    with open(given.out, "a") as file:
        for work in WORK:
            found = row(*work)
            print(json.dumps(found), file=file, flush=True)
            print({key: found[key] for key in ("case", "m", "n", "tile", "ms", "host_us")}, flush=True)


if __name__ == "__main__":
    main()
