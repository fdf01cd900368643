"""Training steps: backend="coda" against torch.compile's default and the bare products.

    python bench/training.py [CASE ...] [--kinds forward|train ...] [--out FILE]

A case is layer-2048, layer-4096 or layer-8192 (from attention's output to the next layer's q, k and v, 16384 tokens,
feed-forward 8/3 as wide; rotary-2048 and so on: with the rotary embeddings of q and k), or one of MODELS (8192
tokens, with attention; two layers unless the name says how many), or autocast- and one of these: float32 weights, under
torch.autocast.

A JSON line per case and kind, "forward" (under no_grad) and "train" (forward and backward), in one rotation: "ms" is
ours, "baseline_ms" torch.compile's, "floor_ms" the products as mm(out=): three for each weight in training. "sustained"
are the same three, each repeated alone, as in bench/layers.py. "gib" are the peaks of memory over what lies there
before a step. "groups" are the contest's timings of Regions tied together: against Inductor or, if it says "against",
the Regions and the rest of a program without their law; "m" are the rows of a product with nothing beside it. Groups
are also alternatives to each other: "backward" are the Regions of the backward that are kept, and how many were derived
at first. "as_outputs_ms", of rotary cases, is torch.compile's time where it, too, expects gradients from outside to lie
as the outputs do (coda_inductor/inductor/tangents.py): torch 2.11 does not by itself, torch 2.13 does.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layers
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
import transformers as hf
from models import SDPA, sizes, tiles
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from coda_inductor.codegen import target
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch

KINDS = ("forward", "train")
HIDDEN = {2048: 5504, 4096: 11008, 8192: 22016}  # 8/3 d, rounded up to 128


class Layer(nn.Module):
    """From attention's output to the next layer's q, k and v; separate weights."""

    def __init__(self, d: int) -> None:
        super().__init__()
        ff = HIDDEN[d]
        self.o, self.down = nn.Linear(d, d, bias=False), nn.Linear(ff, d, bias=False)
        self.gate, self.up = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in "qkv")
        self.first, self.second = layers.RMSNorm(d), layers.RMSNorm(d)

    def forward(self, attention: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        h = x + self.o(attention)
        n = self.first(h)
        h = h + self.down(F.silu(self.gate(n)) * self.up(n))
        n = self.second(h)
        return h, self.q(n), self.k(n), self.v(n)


class Rotary(Layer):
    """The same, with the rotary embeddings of q and k as transformers has them: heads of 128, two halves each."""

    def forward(self, attention: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        h, q, k, v = super().forward(attention, x)
        q, k, v = (y.unflatten(-1, (-1, 128)).transpose(1, 2) for y in (q, k, v))
        return h, rotated(q, cos, sin), rotated(k, cos, sin), v


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, tokens, head], its two halves turned by angles of which cos and sin are [tokens, head]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def llama(d: int, ff: int, heads: int, count: int, vocabulary: int) -> nn.Module:
    """transformers' Llama with head and loss."""
    fields = sizes(d, ff, heads, 8) | {"num_hidden_layers": count, "vocab_size": vocabulary}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**fields))


def vit(count: int) -> nn.Module:
    """transformers' ViT-L with its classifier."""
    fields = sizes(1024, 4096, 16, image_size=224, patch_size=16) | {"num_hidden_layers": count}
    return hf.ViTForImageClassification(
        hf.ViTConfig(**fields, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama-1b": lambda: llama(2048, 8192, 32, 2, 128256),
    "llama-1b-x16": lambda: llama(2048, 8192, 32, 16, 128256),
    "llama-8b": lambda: llama(4096, 14336, 32, 2, 128256),
    "gpt2-xl": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=1600, n_head=25, n_layer=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, **SDPA)
    ),
    "vit-l": lambda: vit(2),
    "vit-l-x24": lambda: vit(24),
    "bert-large": lambda: hf.BertForMaskedLM(
        hf.BertConfig(
            **sizes(1024, 4096, 16, vocab_size=30522, max_position_embeddings=512),
            attention_probs_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )
    ),
}

AUTOCAST = "autocast-"
Inputs = tuple[Tensor, ...]
Step = Callable[[Any, Inputs], object]


def case(name: str) -> tuple[nn.Module, list[Inputs], Step, Step, int]:
    """(model, sets of inputs, the forward, the step of training, tokens)."""
    kind, _, width = name.partition("-")
    if width in map(str, HIDDEN):
        d = int(width)
        model = {"layer": Layer, "rotary": Rotary}[kind](d).to("cuda", torch.bfloat16)
        stream, heads, tables = (4, 4096, d), (4, 4096, d // 128, 128), tuple[Tensor, ...]()
        grads = tiles(stream, stream, stream, stream)
        if kind == "rotary":
            angles = torch.rand(4096, 64, device="cuda").repeat(1, 2) * 6.283
            tables = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
            grads = (grads[0], *(t.view(heads).transpose(1, 2) for t in grads[1:]))
        streams = [tuple(t.requires_grad_() for t in tiles(stream, stream)) for _ in range(layers.SETS)]

        def backward(f: Any, given: Inputs) -> object:
            return torch.autograd.grad(f(*given), (*given[:2], *model.parameters()), grads)

        return model, [(*t, *tables) for t in streams], lambda f, given: f(*given), backward, 16384
    wide, name = name.startswith(AUTOCAST), name.removeprefix(AUTOCAST)
    with torch.device("cuda"):
        model = MODELS[name]().to(torch.float32 if wide else torch.bfloat16)
    if name.startswith("vit-l"):
        inputs = [
            (
                torch.randn(42, 3, 224, 224, device="cuda", dtype=torch.bfloat16),
                torch.randint(0, 2, (42,), device="cuda"),
            )
            for _ in range(layers.SETS)
        ]
        key, tokens = "pixel_values", 42 * 197
    else:
        length = 512 if name == "bert-large" else 1024
        vocabulary = model.config.vocab_size
        inputs = [
            tuple(torch.randint(0, vocabulary, (8192 // length, length), device="cuda") for _ in "xy")
            for _ in range(layers.SETS)
        ]
        key, tokens = "input_ids", 8192

    def loss(f: Any, given: Inputs) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=wide):
            return f(**{key: given[0]}, labels=given[1]).loss  # type: ignore[no-any-return]

    return model, inputs, loss, lambda f, given: torch.autograd.grad(loss(f, given), list(model.parameters())), tokens


def floors(model: nn.Module, tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(the products of a forward, those of a forward and backward), on preallocated tensors."""
    modules = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    weights = [(m.weight if isinstance(m, nn.Linear) else m.weight.t()).detach() for m in modules]
    weights = [w.to(torch.bfloat16) for w in weights]
    few = {id(w) for w in weights if w.shape[0] < 8}  # a classifier, on one token of each sample
    weights = [w for w in weights if id(w) not in few]
    weights = [F.pad(w, (0, 0, 0, -w.shape[0] % 8)) for w in weights]  # as Inductor does: a vocabulary may be odd
    widths = {n for w in weights for n in w.shape}
    x = {n: torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in widths}
    out = {n: torch.empty(tokens, n, device="cuda", dtype=torch.bfloat16) for n in widths}
    grad = {w.shape: torch.empty(w.shape, device="cuda", dtype=torch.bfloat16) for w in weights}

    def forward() -> None:
        for w in weights:
            torch.mm(x[w.shape[1]], w.t(), out=out[w.shape[0]])

    def train() -> None:
        forward()
        for w in weights:
            torch.mm(x[w.shape[0]], w, out=out[w.shape[1]])
            torch.mm(x[w.shape[0]].t(), x[w.shape[1]], out=grad[w.shape])

    return forward, train


def peak(call: Callable[[], object]) -> float:
    """GiB that a step takes beside what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**30


def run(name: str, kinds: tuple[str, ...] = KINDS) -> list[dict[str, Any]]:
    """A row for each kind."""
    torch.manual_seed(0)
    model, inputs, forward, train, tokens = case(name)
    model.train()
    steps = {"forward": forward, "train": train}
    calls: list[Callable[[int], object]] = []
    seconds, reports = list[dict[str, float]](), list[Any]()
    for kind in kinds:
        seconds.append({})
        for backend in ("inductor", "coda"):
            torch._dynamo.reset()
            seen, start = len(REPORTS), time.perf_counter()
            f, step = torch.compile(model, backend=backend), steps[kind]

            def call(s: int, step: Step = step, f: Any = f, on: bool = kind == "train") -> object:
                with torch.set_grad_enabled(on):
                    return step(f, inputs[s])

            calls.append(call)
            for _ in range(2):
                call(0)
            torch.cuda.synchronize()
            seconds[-1][backend] = time.perf_counter() - start
        reports.append(list(REPORTS)[seen:])
        REPORTS.clear()
    others = list[Callable[[int], object]]()
    if name.startswith("rotary") and "train" in kinds:
        other = torch.compile(model, backend=inductor_as_outputs)
        others.append(lambda s: train(other, inputs[s]))
    gib = [peak(lambda c=c: c(0)) for c in calls]
    launched = []
    for c in calls[1::2]:
        launch.LAUNCHES.clear()
        c(0)
        launched.append(dict(launch.LAUNCHES))
    differences = [difference(ours(0), theirs(0)) for theirs, ours in zip(calls[::2], calls[1::2], strict=True)]
    plain = dict(zip(KINDS, floors(model, tokens), strict=True))
    ways = [*calls, *(lambda s, f=plain[kind]: f() for kind in kinds)]
    times = layers.rotation([*ways, *others])
    held = layers.alone(ways, times, len(kinds))
    kernels = {k.region.digest: k for k in launch.KERNELS.values()}

    def tile(site: Any) -> str:
        kernel = kernels.get(site.region.digest)
        return str(kernel.config(int(site.m) if site.m.isdigit() else tokens) or "") if kernel else ""

    rows = []
    for i, kind in enumerate(kinds):
        mine = (2 * i + 1, 2 * i, len(calls) + i)
        ms, baseline, floor = (times[j] for j in mine)
        groups = {(*t["regions"], t.get("m"), *t.get("against", ())): t for r in reports[i] for t in r.timings}
        sites = [s for r in reports[i] for s in r.sites]
        kept = {s.region.digest for s in sites} | {f"{s.region.digest} of {s.m}" for s in sites}
        rows.append({
            "case": name, "mode": kind, "baseline": "torch.compile default", "ms": ms, "baseline_ms": baseline,
            "as_outputs_ms": times[len(calls) + len(kinds)] if kind == "train" and others else None,
            "floor_ms": floor, "speedup": baseline / ms, "over_floor": ms / floor,
            "recovered": (baseline - ms) / (baseline - floor),
            "sustained": layers.sustained(*(held[j] for j in mine)),
            "gib": {"coda": gib[2 * i + 1], "inductor": gib[2 * i]}, "difference": differences[i],
            "regions": {s.name: [s.region.digest, launched[i].get(s.region.digest, 0), tile(s)] for s in sites},
            "backward": [sum(n) for n in zip(*(r.backward for r in reports[i]), strict=True)],
            "laws": dict(Counter(law for s in sites for law in s.laws)),
            "tables": sum(len(r.tables) for r in reports[i]), "casts": sum(len(r.casts) for r in reports[i]),
            "groups": [{**t, "kept": {f"{d} of {t['m']}" if "m" in t else d for d in t["regions"]} <= kept}
                       for t in groups.values()],
            "refused": sorted({x.reason for r in reports[i] for x in r.refused}),
            "compile_s": seconds[i],
            "machine": torch.cuda.get_device_name(),
            "versions": {**target.versions(), "python": platform.python_version()},
            "command": " ".join(["python", *sys.argv]),
        })  # fmt: skip
    return rows


def inductor_as_outputs(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend: Inductor, with gradients from outside expected to lie as the outputs do."""
    with functorch_config.patch(guess_tangent_strides_as_outputs=True):
        return compile_fx(gm, inputs)


def difference(ours: Any, theirs: Any) -> float:
    """The largest relative difference (Frobenius) of a tensor of the two, NaN if one is not finite. Relative to no less
    than a ten-thousandth of the largest norm: the gradient of the keys' biases is zero but for rounding, and a row of
    ViT-L (3128d78) says 1.4."""
    pairs = list(zip(*(((x,) if isinstance(x, Tensor) else tuple(x)) for x in (ours, theirs)), strict=True))
    norms = torch.stack([b.double().norm() for _, b in pairs])
    apart = torch.stack([(a.double() - b.double()).norm() for a, b in pairs])
    found = apart / norms.clamp_min(max(1e-4 * float(norms.max()), 1e-30))
    return float(found.max()) if bool(found.isfinite().all()) else float("nan")


def main() -> None:
    """Runs the cases and prints a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*(f"layer-{d}" for d in HIDDEN), *MODELS])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "training.jsonl"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    inductor_config.fx_graph_cache = functorch_config.enable_autograd_cache = False  # a cached graph has no report
    layers.written(args.cases, lambda name: run(name, tuple(args.kinds)), args.out, line)


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    groups = [g for g in row["groups"] if "against" not in g]
    return (
        f"{row['case']:12s} {row['mode']:8s} {row['ms']:8.3f} ms, torch.compile {row['baseline_ms']:8.3f}"
        f" ({row['speedup']:.3f}x, sustained {row['sustained']['speedup']:.3f}x), floor {row['floor_ms']:8.3f},"
        f" regions {len(row['regions'])},"
        f" kept {sum(g['kept'] for g in groups)} of {len(groups)} groups,"
        f" of the backward's {' of '.join(map(str, row['backward']))},"
        f" GiB {row['gib']}, difference {row['difference']:.1e}, compile {row['compile_s']}"
    )


if __name__ == "__main__":
    main()
