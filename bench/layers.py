"""Layers as plain nn.Modules: backend="coda" against torch.compile's default and the bare products, interleaved.

    python bench/layers.py [half|layer] [WIDTH ...] [--out FILE]

One JSON line per case: "ms" is ours, "baseline_ms" torch.compile's, "floor_ms" the graph's own products as mm(out=) plus
attention, all medians of one rotation in one process. "regions" are the kernels that ran, counted at launch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.codegen import launch, target
from coda_inductor.inductor.joint_pass import REPORTS

WIDTHS = {2048: (8192, 16, 8), 4096: (14336, 32, 8), 8192: (28672, 64, 8)}  # hidden: feed-forward, heads, key-value heads
TOKENS = 8192
SETS = 3  # of inputs, in rotation, so that no run finds its inputs in the L2 cache
ROUNDS = 40


class RMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * h.to(x.dtype)


class HalfLayer(nn.Module):
    """o-proj, residual, RMSNorm, gate and up, SwiGLU, down, residual."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.o, self.down = nn.Linear(d, d, bias=False), nn.Linear(ff, d, bias=False)
        self.gate, self.up = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.norm = RMSNorm(d)

    def forward(self, attention: Tensor, x: Tensor) -> Tensor:
        h = x + self.o(attention)
        n = self.norm(h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))


def half(d: int) -> tuple[nn.Module, list[tuple[Tensor, ...]], Callable[[], None]]:
    """The half layer, its inputs, and its floor: the four products."""
    ff = WIDTHS[d][0]
    model = HalfLayer(d, ff).to("cuda", torch.bfloat16)
    inputs = [tuple(torch.randn(2, TOKENS // 2, d, device="cuda", dtype=torch.bfloat16) for _ in "ax") for _ in range(SETS)]
    return model, inputs, products(model, [d, d, d, ff], [m.weight for m in (model.o, model.gate, model.up, model.down)])


def layer(d: int) -> tuple[nn.Module, list[tuple[Tensor, ...]], Callable[[], None]]:
    """A whole layer of transformers' Llama, its inputs, and its floor: seven products and attention."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    ff, heads, kv = WIDTHS[d]
    config = LlamaConfig(
        hidden_size=d, intermediate_size=ff, num_attention_heads=heads, num_key_value_heads=kv, attn_implementation="sdpa"
    )

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            out = self.layer(x, position_embeddings=self.rotary(x, positions))
            return out[0] if isinstance(out, tuple) else out

    model = Layer().to("cuda", torch.bfloat16)
    positions = torch.arange(TOKENS // 2, device="cuda").expand(2, -1)
    inputs = [(torch.randn(2, TOKENS // 2, d, device="cuda", dtype=torch.bfloat16), positions) for _ in range(SETS)]
    a, m = model.layer.self_attn, model.layer.mlp
    weights = [p.weight for p in (a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj)]
    mms = products(model, [w.shape[1] for w in weights], weights)
    q, k, v = (torch.randn(2, n, TOKENS // 2, d // heads, device="cuda", dtype=torch.bfloat16) for n in (heads, kv, kv))

    def floor() -> None:
        mms()
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return model, inputs, floor


def products(model: nn.Module, ks: list[int], weights: list[Tensor]) -> Callable[[], None]:
    """The bare products, on preallocated tensors."""
    xs = {k: torch.randn(TOKENS, k, device="cuda", dtype=torch.bfloat16) for k in set(ks)}
    outs = [torch.empty(TOKENS, w.shape[0], device="cuda", dtype=torch.bfloat16) for w in weights]

    def run() -> None:
        for k, w, out in zip(ks, weights, outs, strict=True):
            torch.mm(xs[k], w.t(), out=out)

    return run


def rotation(calls: list[Callable[[int], object]]) -> list[float]:
    """Median ms of each call, in rotation."""
    for s in range(SETS):
        for call in calls:
            call(s)
    torch.cuda.synchronize()
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for r in range(ROUNDS):
        torch.cuda._sleep(2_000_000)
        for j in range(len(calls)):
            i = (r + j) % len(calls)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[i](r % SETS)
            end.record()
            marks[i].append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(s.elapsed_time(e) for s, e in m) for m in marks]


def run(case: str, d: int) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs, floor = {"half": half, "layer": layer}[case](d)
    seconds = {}
    compiled = {}
    with torch.no_grad():
        for backend in ("inductor", "coda"):
            start = time.perf_counter()
            compiled[backend] = torch.compile(model, backend=backend)
            compiled[backend](*inputs[0])
            torch.cuda.synchronize()
            seconds[backend] = time.perf_counter() - start
        report = REPORTS[-1]
        launch.LAUNCHES.clear()
        ours, theirs = compiled["coda"](*inputs[0]), compiled["inductor"](*inputs[0])
        launched = dict(launch.LAUNCHES)
        calls = [lambda s, f=compiled[b]: f(*inputs[s]) for b in ("coda", "inductor")]
        ms, baseline, bare = rotation([*calls, lambda s: floor()])
    difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    chosen = {s.region.digest: {str(k.config(TOKENS)) for k in launch.KERNELS.values() if k.region == s.region} for s in report.sites}
    return {
        "case": f"{case} {d}", "mode": "infer", "baseline": "torch.compile default", "ms": ms, "baseline_ms": baseline,
        "floor_ms": bare, "speedup": baseline / ms, "over_floor": ms / bare,
        "recovered": (baseline - ms) / (baseline - bare), "difference": difference,
        "regions": {s.name: [s.region.digest, launched.get(s.region.digest, 0), *sorted(chosen[s.region.digest])] for s in report.sites},
        "lost": sorted({r.reason for r in report.refused if "slower" in r.reason}),
        "compile_s": {"coda": seconds["coda"], "inductor": seconds["inductor"]},
        "machine": torch.cuda.get_device_name(), "versions": {**target.versions(), "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip


def main() -> None:
    """Runs the cases and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["half", "layer"])
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", str(Path(__file__).parent / "results")), "layers.jsonl"))
    args = parser.parse_args()
    for case in args.cases:
        for d in args.widths:
            row = run(case, d)
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{row['case']:14s} {row['ms']:8.3f} ms, torch.compile {row['baseline_ms']:8.3f} ({row['speedup']:.3f}x), "
                  f"floor {row['floor_ms']:8.3f} ({row['over_floor']:.3f}x), compile {row['compile_s']}")  # fmt: skip
            print("   ", row["regions"], row["lost"], f"difference {row['difference']:.1e}", flush=True)


if __name__ == "__main__":
    main()
