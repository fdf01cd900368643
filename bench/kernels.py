"""Every tile of the Regions of a Llama layer beside the bare products: one JSON line per Region and tile.

    python bench/kernels.py [FILE]      (default: bench/results/kernels.jsonl)

"ms" is the mean of the times by turns and in a busy GPU, of long calls the time under a load that lasts
(timing.compared), "floor_ms" that of torch.mm(out=) for the Region's products, "ratio" what the fused kernel takes of
that. About two minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from codegen_cases import norm_backward, norm_producer, random_inputs, swiglu  # noqa: E402

from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.core import blocks  # noqa: E402
from coda_inductor.core.region import Region  # noqa: E402
from coda_inductor.kernels import launch  # noqa: E402
from coda_inductor.kernels.prebuild import Job, prebuild  # noqa: E402
from coda_inductor.measure import tune  # noqa: E402

M = 8192
WIDTHS = ((2048, 8192), (4096, 14336), (8192, 28672))  # hidden, feed-forward


def cases(d: int, ff: int) -> Iterator[tuple[str, Region]]:
    yield f"o {d}", norm_producer(d, d)
    yield f"gate|up {d} {ff}", swiglu(ff, d)
    yield f"down {d} {ff}", norm_producer(d, ff)
    if d == 4096:
        yield f"dqkv {d}", norm_backward(d, d)


def plain_products(region: Region, inputs: list[Tensor]) -> Callable[[], None]:
    """The Region's products alone, one cuBLAS call each, into one preallocated output."""
    out = inputs[0].new_empty(inputs[0].shape[0], region.n)
    weights = [inputs[p.b].t() if p.b_layout == "nk" else inputs[p.b] for p in region.products]

    def call() -> None:
        for weight in weights:
            torch.mm(inputs[0], weight, out=out)

    return call


def host_microseconds(kernel: launch.Kernel, inputs: list[Tensor], outs: list[Tensor]) -> float:
    """Python and driver time of one launch, the GPU kept busy behind it."""
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    began = time.perf_counter()
    for _ in range(50):
        kernel(inputs, outs)
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return spent / 50 * 1e6


def rows(name: str, region: Region) -> Iterator[dict[str, Any]]:
    """Rows of one Region: all large tiles, those that spill too."""
    began = time.perf_counter()
    kernel, inputs = launch.kernel(region.text), random_inputs(region, M, "cuda")
    configs = legality.candidates(region, M)
    found = tune.measure(kernel, inputs, configs, beside=[plain_products(region, inputs)], rounds=11, max_stack=1 << 20)
    best = min((r["ms"] for r in found if "ms" in r), default=None)
    host = None
    if best is not None:
        kernel.use(legality.bucket(M), configs[[r.get("ms") for r in found].index(best)])
        host = host_microseconds(kernel, inputs, blocks.outputs(region, inputs))
    for row in found:
        (floor,) = row.pop("beside")
        ratio = round(row["ms"] / floor, 4) if "ms" in row else None
        yield {
            "case": name, "m": M, "n": region.n, "k": region.products[0].k, **row, "baseline": "mm(out=)",
            "floor_ms": floor, "ratio": ratio, "best": row.get("ms") == best, "host_us": host,
            "seconds": round(time.perf_counter() - began, 1), "machine": torch.cuda.get_device_name(),
            "versions": target.versions(), "command": "python bench/kernels.py",
        }  # fmt: skip


def main() -> None:
    default = Path(__file__).parent / "results" / "kernels.jsonl"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    path.parent.mkdir(parents=True, exist_ok=True)
    work = [case for d, ff in WIDTHS for case in cases(d, ff)]
    began = time.perf_counter()
    failed = prebuild([Job(region, config) for _, region in work for config in legality.candidates(region, M)])
    print(f"kernels built in {time.perf_counter() - began:.1f} s", *failed.values(), sep="\n", flush=True)
    with path.open("w") as file:
        for name, region in work:
            for row in rows(name, region):
                print(json.dumps(row), file=file, flush=True)
                print(summary(row), flush=True)


def summary(row: dict[str, Any]) -> str:
    mark, floor = "*" if row["best"] else " ", row["floor_ms"] * 1e3
    found = f"{row['ms'] * 1e3:8.1f} us = {row['ratio']:.3f} x {floor:.1f}" if "ms" in row else row["why"]
    details = f"stack {row.get('stack')}, stages {row['stages']}, host {row['host_us'] or 0:.1f} us"
    return f"{mark} {row['case']:20} {row['config']:14} {found} ({details})"


if __name__ == "__main__":
    main()
