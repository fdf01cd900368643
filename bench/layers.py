"""Layers as plain nn.Modules: backend="coda" against torch.compile's default and the bare products, interleaved.

    python bench/layers.py [half|layer|gpt2-xl|bert-large|vit-l ...] [--widths WIDTH ...] [--mode MODE] [--out FILE]

One JSON line per case: "ms" is ours, "baseline_ms" torch.compile's, "floor_ms" the graph's own products as mm(out=)
plus attention, all medians of one rotation in one process. "sustained" are the same three, each repeated alone
(`alone`). "regions" are the kernels that ran, counted at launch.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

from coda_inductor.codegen import target
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report
from coda_inductor.kernels import launch
from coda_inductor.measure import timing

WIDTHS = {
    2048: (8192, 16, 8),
    4096: (14336, 32, 8),
    8192: (28672, 64, 8),
}  # hidden: feed-forward, heads, key-value heads
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
    inputs = [
        tuple(torch.randn(2, TOKENS // 2, d, device="cuda", dtype=torch.bfloat16) for _ in "ax") for _ in range(SETS)
    ]
    return (
        model,
        inputs,
        products(model, [d, d, d, ff], [m.weight for m in (model.o, model.gate, model.up, model.down)]),
    )


def layer(d: int) -> tuple[nn.Module, list[tuple[Tensor, ...]], Callable[[], None]]:
    """A whole layer of transformers' Llama, its inputs, and its floor: seven products and attention."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    ff, heads, kv = WIDTHS[d]
    config = LlamaConfig(
        hidden_size=d,
        intermediate_size=ff,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        attn_implementation="sdpa",
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


class Stack(nn.Module):
    """Equal layers of transformers, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = out[0] if isinstance(out, tuple) else out
        return x


def stack(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]], Callable[[], None]]:
    """Four layers of GPT-2 XL, BERT-large or ViT-L at about 8192 tokens, their inputs, and their floor."""
    from transformers import BertConfig, GPT2Config, ViTConfig
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.vit.modeling_vit import ViTLayer

    sdpa = {"attn_implementation": "sdpa"}
    large = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, **sdpa}
    config, make, shape, heads = {
        "gpt2-xl": (GPT2Config(n_embd=1600, n_head=25, n_layer=4, **sdpa), GPT2Block, (8, 1024, 1600), 25),
        "bert-large": (BertConfig(**large), BertLayer, (16, 512, 1024), 16),
        "vit-l": (ViTConfig(**large), ViTLayer, (42, 197, 1024), 16),
    }[name]
    layers = [make(config, i) if name != "vit-l" else make(config) for i in range(4)]
    model = Stack(layers).to("cuda", torch.bfloat16).eval()
    inputs = [(torch.randn(shape, device="cuda", dtype=torch.bfloat16),) for _ in range(SETS)]
    modules = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    weights = [m.weight if isinstance(m, nn.Linear) else m.weight.t() for m in modules]
    mms = products(model, [w.shape[1] for w in weights], weights, shape[0] * shape[1])
    q, k, v = (
        torch.randn(shape[0], heads, shape[1], shape[2] // heads, device="cuda", dtype=torch.bfloat16) for _ in "qkv"
    )

    def floor() -> None:
        mms()
        for _ in layers:
            F.scaled_dot_product_attention(q, k, v, is_causal=name == "gpt2-xl")

    return model, inputs, floor


def products(model: nn.Module, ks: list[int], weights: list[Tensor], tokens: int = TOKENS) -> Callable[[], None]:
    """The bare products, on preallocated tensors."""
    xs = {k: torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16) for k in set(ks)}
    outs = [torch.empty(tokens, w.shape[0], device="cuda", dtype=torch.bfloat16) for w in weights]

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


def alone(calls: list[Callable[[int], object]], times: list[float], floors: int = 1) -> list[float]:
    """The ms of each call repeated alone, at the clocks that it can hold: the median of bursts from rest, four of the
    two programs of a row, either first as often, then two of each of the `floors`, the last calls. `times` says about
    how long they take. (Until 3128d78 they were blocks of 60 ms without a rest, with errors of up to 10 %; until
    b095659 the mean of the bursts.)"""
    sets = itertools.cycle(range(SETS))
    ways = [lambda c=c: c(next(sets)) for c in calls]  # type: ignore[misc]
    first = len(ways) - floors
    held: list[list[float]] = [[] for _ in ways]
    for members in [[i, i + 1] for i in range(0, first, 2)] + [[i] for i in range(first, len(ways))]:
        orders = [members, members[::-1]] * len(members)
        for order in orders:
            time.sleep(timing.REST_S)
            for i, ms in zip(order, timing.repeated([ways[i] for i in order], [times[i] for i in order]), strict=True):
                held[i].append(ms)
    return [statistics.median(found) for found in held]


def sustained(ms: float, baseline: float, plain: float) -> dict[str, float]:
    """A row's times of `alone`."""
    return {"ms": ms, "baseline_ms": baseline, "floor_ms": plain, "speedup": baseline / ms}


def run(name: str, mode: str | None) -> dict[str, Any]:
    """One row; `name` is a case and, of half and layer, the width."""
    case, _, width = name.partition(" ")
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs, floor = {"half": half, "layer": layer}[case](int(width)) if width else stack(case)
    seconds = {}
    compiled = {}
    with torch.no_grad():
        for backend in ("inductor", "coda"):
            start = time.perf_counter()
            compiled[backend] = torch.compile(model, backend=backend, mode=mode)
            compiled[backend](*inputs[0])
            torch.cuda.synchronize()
            seconds[backend] = time.perf_counter() - start
        report = REPORTS[-1] if REPORTS else Report()  # none when Inductor had the graph in its cache
        launch.LAUNCHES.clear()
        ours, theirs = (compiled[b](*inputs[0]).double() for b in ("coda", "inductor"))
        launched = dict(launch.LAUNCHES)
        calls = [lambda s, f=compiled[b]: f(*inputs[s]) for b in ("coda", "inductor")]
        ways = [*calls, lambda s: floor()]
        ms, baseline, plain = times = rotation(ways)
        held = alone(ways, times)
    difference = float((ours - theirs).norm() / theirs.norm())
    tokens = inputs[0][0].shape[:2].numel()
    tiles = {k.region.digest: str(k.config(tokens)) for k in launch.KERNELS.values() if k.config(tokens) is not None}
    names = [(s.name, s.region.digest) for s in report.sites] or [(digest, digest) for digest in launched]
    return {
        "case": name, "mode": "infer", "baseline": f"torch.compile {mode or 'default'}",
        "ms": ms, "baseline_ms": baseline,
        "floor_ms": plain, "speedup": baseline / ms, "over_floor": ms / plain,
        "recovered": (baseline - ms) / (baseline - plain), "sustained": sustained(*held), "difference": difference,
        "regions": {name: [digest, launched.get(digest, 0), tiles.get(digest, "")] for name, digest in names},
        "lost": sorted({r.reason for r in report.refused if r.reason.startswith("measured ")}),
        "compile_s": {"coda": seconds["coda"], "inductor": seconds["inductor"]},
        "machine": torch.cuda.get_device_name(), "versions": {**target.versions(), "python": platform.python_version()},
        "command": " ".join(["python", *sys.argv]),
    }  # fmt: skip


def written(names: list[str], run: Callable[[str], list[dict[str, Any]]], out: str, line: Callable[[Any], str]) -> None:
    """Appends the rows of each case to `out` and prints `line` of each. One that fails says why, and the next is
    measured all the same: the row that is missing is seen."""
    for name in names:
        try:
            rows = run(name)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            continue
        with open(out, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        print("\n".join(map(line, rows)), flush=True)


def main() -> None:
    """Runs the cases and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["half", "layer"])
    parser.add_argument("--widths", type=int, nargs="*", default=list(WIDTHS))
    parser.add_argument("--mode")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "layers.jsonl"))
    args = parser.parse_args()
    widths = {case: args.widths if case in ("half", "layer") else [0] for case in args.cases}
    names = [f"{case} {d or ''}".strip() for case, ds in widths.items() for d in ds]
    written(names, lambda name: [run(name, args.mode)], args.out, line)


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    return (
        f"{row['case']:14s} {row['ms']:8.3f} ms, torch.compile {row['baseline_ms']:8.3f}"
        f" ({row['speedup']:.3f}x, sustained {row['sustained']['speedup']:.3f}x), floor {row['floor_ms']:8.3f}"
        f" ({row['over_floor']:.3f}x),"
        f" compile {row['compile_s']}\n    {row['regions']} {row['lost']} difference {row['difference']:.1e}"
    )


if __name__ == "__main__":
    main()
