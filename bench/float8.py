"""Training steps and inference in FP8 as torchao's users write them: backend="coda" against torch.compile's default.

    python bench/float8.py WIDTH FFN [RECIPE ...] [--layers 2] [--batch 4] [--numerics default] [--out FILE]

WIDTH and FFN are 2048 8192, 4096 14336 or 8192 28672, say; a RECIPE is bf16 or one of torchao's for training (rowwise,
tensorwise, rowwise_with_gw_hp) or for inference (per_row, per_tensor: dynamic activations, weights cast once). Two
layers of TorchTitan's Llama (heads of 128, a quarter of them for keys and values, rotary embeddings as complex
products), 4 x 4096 tokens, forward and backward, no optimizer; of inference the forward. Needs torchao.

A JSON line per recipe: "ms" is ours, "baseline_ms" torch.compile's of the same recipe, each repeated alone for seconds,
by turns, medians; "again_ms" torch.compile's compiled again, whose distance from the baseline is the noise. "gib" are
the peaks over what lies there before a step; "difference" is the largest relative one of a gradient or an output.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

from coda_inductor.inductor.joint_pass import REPORTS

TOKENS, HEAD = 4096, 128
Backend = dict[str, Any]
"""What torch.compile is told."""
INFERENCE = {"per_row": PerRow, "per_tensor": PerTensor}


class Layer(nn.Module):
    """A Llama layer; q and k are turned as complex numbers."""

    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.heads, self.few = d // HEAD, max(d // HEAD // 4, 1)
        linear = lambda n, k: nn.Linear(n, k, bias=False)  # noqa: E731
        self.q, self.o = linear(d, d), linear(d, d)
        self.k, self.v = linear(d, self.few * HEAD), linear(d, self.few * HEAD)
        self.gate, self.up, self.down = linear(d, ff), linear(d, ff), linear(ff, d)
        self.first, self.second = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        n = F.rms_norm(x, x.shape[-1:], self.first, 1e-5)
        q, k, v = (w(n).unflatten(-1, (-1, HEAD)) for w in (self.q, self.k, self.v))
        q, k, v = turned(q, turns).transpose(1, 2), turned(k, turns).transpose(1, 2), v.transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = x + self.o(a.transpose(1, 2).flatten(2))
        n = F.rms_norm(h, h.shape[-1:], self.second, 1e-5)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """x [batch, tokens, heads, head], neighbouring features as complex numbers, times turns [tokens, head / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).type_as(x)


class Layers(nn.Module):
    """Some of them."""

    def __init__(self, count: int, d: int, ff: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(d, ff) for _ in range(count))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, turns)
        return x


def alone(steps: dict[str, Callable[[], Any]], seconds: float = 1.5, rounds: int = 3) -> dict[str, float]:
    """The median ms of each step, repeated alone for seconds, by turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            torch.cuda.synchronize()
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                for _ in range(4):
                    step()
                torch.cuda.synchronize()
                count += 4
            found[name].append((time.perf_counter() - start) / count * 1e3)
    return {name: sorted(ms)[len(ms) // 2] for name, ms in found.items()}


def stepping(recipe: str, model: nn.Module, backend: Backend, x: Tensor, turns: Tensor) -> Callable[[], list[Tensor]]:
    """A step of the model by the recipe: its output, or the gradients of its inputs and parameters."""
    if recipe in INFERENCE:
        quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=INFERENCE[recipe]()))
    elif recipe != "bf16":
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    compiled, given, go = torch.compile(model, **backend), x.clone().requires_grad_(), torch.randn_like(x)
    wanted = [given, *model.parameters()]

    @torch.no_grad()
    def forward() -> list[Tensor]:
        return [compiled(x, turns)]

    return forward if recipe in INFERENCE else lambda: [*torch.autograd.grad(compiled(given, turns), wanted, go)]


def measured(recipe: str, layers: int, batch: int, d: int, ff: int, ours: Backend) -> dict[str, Any]:
    """One recipe's row."""
    angles = torch.outer(torch.arange(TOKENS), 500000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
    turns = torch.polar(torch.ones_like(angles), angles).cuda()
    x = torch.randn(batch, TOKENS, d, device="cuda", dtype=torch.bfloat16)
    steps, seconds, peaks, made = {}, {}, {}, {}
    for name, backend in (("baseline", {"backend": "inductor"}), ("ours", ours), ("again", {"backend": "inductor"})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Layers(layers, d, ff).to(torch.bfloat16)
        step = stepping(recipe, model, backend, x, turns)
        start = time.perf_counter()
        made[name] = [g.float().cpu() for g in step()]
        seconds[name] = round(time.perf_counter() - start, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peaks[name] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        steps[name] = step
    ms = alone(steps)
    pairs = zip(made["ours"], made["baseline"], strict=True)
    report = REPORTS[-1] if REPORTS else None
    return {
        "ms": round(ms["ours"], 3), "baseline_ms": round(ms["baseline"], 3), "again_ms": round(ms["again"], 3),
        "speedup": round(ms["baseline"] / ms["ours"], 4), "gib": peaks, "compile_s": seconds,
        "difference": max(float((a - b).norm() / b.norm().clamp_min(1e-20)) for a, b in pairs),
        "regions": len(report.sites) if report else 0, "passes": len(report.elementwise) if report else 0,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("width", type=int)
    parser.add_argument("ffn", type=int)
    parser.add_argument("recipes", nargs="*", default=["bf16", "rowwise", "tensorwise", "rowwise_with_gw_hp"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--numerics", default="default", help="of coda: strict, default or fast")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    packages = ("torch", "torchao", "triton", "nvidia-cutlass-dsl", "quack-kernels")
    switched = "" if chosen.numerics == "default" else f", numerics={chosen.numerics}"
    ours: Backend = {"backend": "coda", "options": {"numerics": chosen.numerics}}
    for recipe in chosen.recipes:
        row = {
            "case": f"{chosen.layers} layers of Llama, {recipe}{switched}", "d": chosen.width, "ffn": chosen.ffn,
            "tokens": TOKENS * chosen.batch, "machine": torch.cuda.get_device_name(),
            "versions": {name: version(name) for name in packages},
        }  # fmt: skip
        line = json.dumps(row | measured(recipe, chosen.layers, chosen.batch, chosen.width, chosen.ffn, ours))
        print(line, flush=True)
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
