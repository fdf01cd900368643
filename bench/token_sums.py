"""What stands beside attention's backward in a layer with biases: statistics of a norm, and the biases' gradients as
Inductor takes them (in one kernel with the statistics, where it can), in blocks as inductor/blocks.py writes them, and
by Inductor in kernels of their own.

    python bench/token_sums.py [--out FILE]      (default: bench/results/token_sums.jsonl)

A JSON line per case, "ms" of each way by turns, from a CUDA graph, after the L2 cache was flushed: two sums over the
features (one of them of q, k and v each, then of all) and three gradients; "packed" writes them as one tensor first.
"kernels" are how many each way launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1])]

from coda_inductor.codegen import target  # noqa: E402
from coda_inductor.inductor.blocks import SIZES  # noqa: E402

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {  # sequences, their length, heads, features of a head
    "BERT-large": (16, 512, 16, 64), "ViT-L": (64, 197, 16, 64), "GPT-2": (8, 1024, 12, 64),
    "GPT-2 XL": (8, 1024, 25, 64),
}  # fmt: skip
TURNS = 61
Ways = dict[str, Callable[..., Sequence[Tensor]]]


def by_blocks(x: Tensor) -> Tensor:
    size = next(n for n in SIZES if len(x) % n == 0)
    return x.view(-1, size, x.shape[1]).sum(1).sum(0)


def over_tokens(x: Tensor) -> Tensor:
    return x.sum(0)


def rows(grads: Sequence[Tensor]) -> list[Tensor]:
    """Attention's gradients, [B, H, S, D], as [tokens, width]."""
    return [g.transpose(1, 2).reshape(-1, g.shape[1] * g.shape[3]) for g in grads]


def separate(summed: Callable[[Tensor], Tensor]) -> Callable[..., Sequence[Tensor]]:
    """q, k and v are products of their own."""

    def run(*args: Tensor) -> Sequence[Tensor]:
        grads, forward, bias, shift = rows(args[:3]), args[3:6], args[6:9], args[9]
        wide = [g.to(F32) for g in grads]
        dots = [(g * x.to(F32)).sum(1) for g, x in zip(wide, forward, strict=True)]
        other = sum(g * b for g, b in zip(wide, bias, strict=True)).sum(1)  # type: ignore[union-attr]
        return [sum((d - shift) * shift for d in dots), other, *(summed(g).to(BF16) for g in wide)]  # type: ignore[list-item]

    return run


def packed(summed: Callable[[Tensor], Tensor]) -> Callable[..., Sequence[Tensor]]:
    """They are one product."""

    def run(*args: Tensor) -> Sequence[Tensor]:
        whole, forward, bias = torch.cat(rows(args[:3]), 1), torch.cat(args[3:6], 1), torch.cat(args[6:9])
        wide = whole.to(F32)
        return whole, (wide * forward.to(F32)).sum(1), (wide * bias).sum(1), summed(wide).to(BF16)

    return run


def row(name: str, make: Callable[..., Callable[..., Sequence[Tensor]]]) -> dict[str, Any]:
    """One case; all ways must agree."""
    b, s, h, d = SHAPES[name]
    grads = [torch.randn(b, s, h, d, device="cuda", dtype=BF16).transpose(1, 2) for _ in range(3)]
    forward = [torch.randn(b * s, h * d, device="cuda", dtype=BF16) for _ in range(3)]
    args = [*grads, *forward, *(torch.randn(h * d, device="cuda") for _ in range(3)), torch.randn(b * s, device="cuda")]
    ways = {"inductor": (over_tokens, True), "in blocks": (by_blocks, True), "alone": (over_tokens, False)}
    graphs, counts, wanted = dict[str, torch.cuda.CUDAGraph](), dict[str, int](), make(over_tokens)(*args)
    for way, (summed, mixed) in ways.items():
        torch._dynamo.reset()
        with inductor_config.patch({"triton.mix_order_reduction": mixed}):
            call = torch.compile(make(summed))
            for got, want in zip(call(*args), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0.02, atol=0.5)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call(*args)
            torch.cuda.synchronize()
        counts[way] = sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profile.events())
        graphs[way] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[way]):
            call(*args)
    return {
        "case": f"{name}, {make.__name__}", "tokens": b * s, "width": h * d, "ms": by_turns(graphs), "kernels": counts,
        "machine": torch.cuda.get_device_name(), "versions": target.versions(),
        "command": "python bench/token_sums.py",
    }  # fmt: skip


def by_turns(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    flush, times = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), dict[str, list[float]]()
    for _ in range(TURNS):
        for way, graph in graphs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.setdefault(way, []).append(start.elapsed_time(end))
    return {way: statistics.median(ms) for way, ms in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "token_sums.jsonl"))
    given = parser.parse_args()
    with open(given.out, "a") as file:
        for name in SHAPES:
            for make in (separate, packed):
                found = row(name, make)
                print(json.dumps(found), file=file, flush=True)
                print({key: found[key] for key in ("case", "ms", "kernels")}, flush=True)


if __name__ == "__main__":
    main()
