"""Which tiles belong into SM_90A.large: those that it has and others, in a busy GPU and by turns.

    python bench/tiles.py [CASE ...] [--out FILE]      (default: all of WORK, bench/results/tiles.jsonl)

One JSON line per Region and tile: "busy_ms" is what it adds to a busy GPU, "turns_ms" the median of a rotation of all
(timing.compared; tiles are chosen by the mean of both); of calls of timing.LONG_MS both are the time under a load that
lasts. The tile "mm" is torch.mm(out=). Tiles that spill much are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kernels import plain_products

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from codegen_cases import norm_backward, norm_producer, random_inputs, swiglu, swiglu_backward, token_scale  # noqa: E402

from coda_inductor.codegen import legality, target  # noqa: E402
from coda_inductor.codegen.target import SM_90A  # noqa: E402
from coda_inductor.codegen.tiles import Config  # noqa: E402
from coda_inductor.core import blocks  # noqa: E402
from coda_inductor.core.region import Region  # noqa: E402
from coda_inductor.kernels import launch  # noqa: E402
from coda_inductor.kernels.prebuild import Job, prebuild  # noqa: E402
from coda_inductor.measure import timing, tune  # noqa: E402

TILES = (
    *dict.fromkeys(SM_90A.large + SM_90A.deep),
    Config(128, 256, 1, 2, False),
    Config(128, 256, 1, 1, False),
    Config(256, 128, 2, 1, False),
    Config(256, 128, 1, 2, False),
    Config(256, 160, 2, 1, False),
    Config(256, 192, 2, 1, False),
    Config(128, 208, 2, 1, True),
    Config(128, 192, 1, 2, True),
    Config(192, 128, 2, 1, True),
)
WORK = {  # tokens, Region
    "o, 2048": (16384, norm_producer(2048, 2048)),
    "q after a norm, 2048": (16384, token_scale(2048, 2048)),
    "gate|up, 2048": (16384, swiglu(5504, 2048, train=False)),
    "gate|up in training, 2048": (16384, swiglu(5504, 2048)),
    "down, 2048": (16384, norm_producer(2048, 5504)),
    "SwiGLU's backward, 2048": (16384, swiglu_backward(5504, 2048)),
    "norm's backward, 2048": (16384, norm_backward(2048, 5504)),
    "gate|up in training, Llama 1B": (8192, swiglu(8192, 2048)),
    "down, Llama 1B": (8192, norm_producer(2048, 8192)),
    "SwiGLU's backward, Llama 1B": (8192, swiglu_backward(8192, 2048)),
    "gate|up, 4096": (16384, swiglu(11008, 4096, train=False)),
    "down, 4096": (16384, norm_producer(4096, 11008)),
    "SwiGLU's backward, 4096": (16384, swiglu_backward(11008, 4096)),
    "q after a norm, 8192": (16384, token_scale(8192, 8192)),
    "gate|up, 8192": (16384, swiglu(22016, 8192, train=False)),
    "gate|up in training, 8192": (16384, swiglu(22016, 8192)),
}


def rows(name: str, m: int, region: Region) -> Iterator[dict[str, Any]]:
    """The product alone and every tile that is right and does not spill much, the best first."""
    kernel, inputs = launch.kernel(region.text), random_inputs(region, m, "cuda")
    configs, outs = [c for c in TILES if legality.is_legal(region, c)], blocks.outputs(region, inputs)
    found = [tune.examine(kernel, config, inputs, outs) for config in configs]
    calls = {"mm": plain_products(region, inputs)}
    for config, row in zip(configs, found, strict=True):
        if "why" not in row:
            calls[str(config)] = lambda c=config: kernel.run_in(c, inputs, outs)  # type: ignore[misc]
    times = timing.compared([*calls.values()], 7)
    for tile, time in sorted(zip(calls, times, strict=True), key=lambda timed: timed[1].mean):
        yield {"case": name, "m": m, "tile": tile, "busy_ms": time.busy, "turns_ms": time.turns}


def main() -> None:
    """All Regions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*WORK])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "tiles.jsonl"))
    args = parser.parse_args()
    work = {name: WORK[name] for name in args.cases}
    prebuild([Job(region, c) for _, region in work.values() for c in TILES if legality.is_legal(region, c)])
    command = " ".join(["python", *sys.argv])
    said = {"machine": torch.cuda.get_device_name(), "versions": target.versions(), "command": command}
    with Path(args.out).open("a") as file:
        for name, (m, region) in work.items():
            for row in rows(name, m, region):
                print(row, flush=True)
                print(json.dumps(row | said), file=file, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
