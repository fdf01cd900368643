"""Loops of norms as Inductor makes them, and with their rows held in registers (schedule/held.py).

    python bench/held.py [WIDTH ...] [--out FILE]

Of bfloat16, 16384 rows (8192 of more than 4096 columns): a residual with an RMSNorm, with a LayerNorm, or with an
RMSNorm that is cast to FP8, each row with a scale of its own, and the gradients of both norms, added to a stream's. A
JSON line for each: "looped_us" and "held_us", the mean of nine calls by the profiler, the lower of two such means.
"held" says whether such rows are held. Three sets of tensors by turns, more than the L2 has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.profiler import ProfilerActivity, profile

from coda_inductor.codegen.target import SM_90A
from coda_inductor.schedule import held

WIDTHS = (1536, 2048, 2560, 4096, 5120, 8192)
LONGEST = SM_90A.longest_held


def rms(x: Tensor, y: Tensor, w: Tensor) -> Any:
    h = x + y
    return h, F.rms_norm(h, h.shape[-1:], w, 1e-5)


def layer(x: Tensor, y: Tensor, w: Tensor) -> Any:
    h = x + y
    return h, F.layer_norm(h, h.shape[-1:], w, w, 1e-5)


def rms_to_fp8(x: Tensor, y: Tensor, w: Tensor) -> Any:
    h, n = rms(x, y, w)
    scale = n.abs().amax(-1, keepdim=True).double().clamp(1e-12).reciprocal() * 448.0
    scale = torch.exp2(torch.floor(torch.log2(scale.float())))
    return h, scale, (n.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def rms_gradient(x: Tensor, g: Tensor, w: Tensor, r: Tensor, stream: Tensor) -> Tensor:
    xf, gf = x.float(), g.float() * w.float()
    total = (gf * xf * r).sum(-1, keepdim=True)
    return stream + ((gf - xf * r * total / x.shape[-1]) * r).to(x.dtype)


def layer_gradient(x: Tensor, g: Tensor, w: Tensor, r: Tensor, stream: Tensor) -> Tensor:
    n, gf = (x.float() - r) * r, g.float() * w.float()
    return stream + ((gf - gf.mean(-1, keepdim=True) - n * (gf * n).mean(-1, keepdim=True)) * r).to(x.dtype)


FORWARD, BACKWARD = (rms, layer, rms_to_fp8), (rms_gradient, layer_gradient)


def drawn(rows: int, width: int, backward: bool) -> list[Tensor]:
    """What one of them is given."""
    x, y, z = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    w, r = torch.randn(width, device="cuda", dtype=torch.bfloat16), torch.rand(rows, 1, device="cuda") + 0.5
    return [x, y, w, r, z] if backward else [x, y, w]


def made(f: Callable[..., Any], given: list[Tensor], longest: int) -> Callable[..., Any]:
    """The function as Inductor compiles it, with rows of up to so many columns held."""
    inner = held.rows_held(compile_fx_inner, longest)
    torch._dynamo.reset()
    compiled = torch.compile(f, backend=lambda gm, inputs: compile_fx(gm, inputs, inner))  # type: ignore[arg-type]
    compiled(*given)
    return compiled


def measured(run: Callable[..., Any], sets: list[list[Tensor]]) -> tuple[float, bool]:
    """The microseconds of one call's kernels; does one hold rows?"""
    means, names = list[float](), set[str]()
    for _ in range(2):
        for given in sets:
            run(*given)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for i in range(9):
                run(*sets[i % len(sets)])
            torch.cuda.synchronize()
        kernels = [e for e in seen.events() if "CUDA" in str(e.device_type)]
        means.append(sum(e.device_time for e in kernels) / 9)
        names |= {e.name for e in kernels}
    return round(min(means), 1), any(name.startswith("triton_per") for name in names)


def row(f: Callable[..., Any], width: int) -> dict[str, Any]:
    """One function at one width."""
    rows = 16384 if width <= 4096 else 8192
    sets = [drawn(rows, width, f in BACKWARD) for _ in range(3)]
    (looped, _), (held_us, holds) = (measured(made(f, sets[0], longest), sets) for longest in (0, LONGEST))
    return {
        "case": f"{f.__name__}, {rows} x {width}", "held": holds, "looped_us": looped, "held_us": held_us,
        "machine": torch.cuda.get_device_name(), "versions": {name: version(name) for name in ("torch", "triton")},
        "command": f"bench/held.py {width}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("widths", nargs="*", type=int, default=WIDTHS, metavar="WIDTH", help="columns of the rows")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    args = parser.parse_args()
    inductor_config.fx_graph_cache = False
    for width in args.widths:
        for f in FORWARD + BACKWARD:
            line = json.dumps(row(f, width))
            print(line, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
