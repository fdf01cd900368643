"""Two layers of each architecture at real widths and about 8192 tokens: backend="coda" against torch.compile, with and
without CUDA graphs, in one rotation.

    python bench/models.py [NAME ...] [--out FILE]

One JSON line for each model and mode, as bench/layers.py writes them; "floor_ms" is the model's own products as
mm(out=).
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layers
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from coda_inductor.codegen import target
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.kernels import launch

SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}


def sizes(d: int, ff: int, heads: int, kv: int | None = None, **more: Any) -> dict[str, Any]:
    """The fields that most of transformers' configurations share."""
    named = {
        "hidden_size": d,
        "intermediate_size": ff,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "vocab_size": 1024,
    }
    return named | ({"num_key_value_heads": kv} if kv else {}) | more | SDPA


class DiTBlock(nn.Module):
    """A block of DiT: LayerNorm without affine, modulated and gated per sample."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.proj, self.modulation = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Linear(d, 6 * d)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        s1, t1, g1, s2, t2, g2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + s1) + t1).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + g1 * self.o(a)
        return x + g2 * self.proj(F.gelu(self.fc(self.norm2(x) * (1 + s2) + t2), approximate="tanh"))


class EvaBlock(nn.Module):
    """A block of EVA-02, as timm has it: a class token beside turned patches, and an MLP of any width with a norm."""

    sin: Tensor
    cos: Tensor

    def __init__(self, d: int, heads: int, inner: int, patches: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(inner)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d, bias=False), nn.Linear(d, d)
        self.o, self.gate, self.up, self.down = (nn.Linear(*s) for s in ((d, d), (d, inner), (d, inner), (inner, d)))
        angles = torch.rand(patches, d // heads // 2).repeat_interleave(2, -1)
        self.register_buffer("sin", angles.sin())
        self.register_buffer("cos", angles.cos())

    def turned(self, q: Tensor) -> Tensor:
        p = q[:, :, 1:]
        across = torch.stack([-p[..., 1::2], p[..., ::2]], -1).reshape(p.shape)
        return torch.cat([q[:, :, :1], p * self.cos + across * self.sin], 2)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        q, k, v = (w(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v).transpose(1, 2).reshape(x.shape)
        x = x + self.o(a)
        n = self.norm2(x)
        return x + self.down(self.norm(F.silu(self.gate(n)) * self.up(n)))


class GPTBlock(nn.Module):
    """A block of nanoGPT."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.c_fc, self.c_out = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(x.shape[2], 2)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.c_proj(a)
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class Sequence(nn.Module):
    """Blocks in a row that all see the same conditions."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *conditions: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *conditions)
        return x


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(0, 1024, (8, 1024), device="cuda"),)


def tiles(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)


PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "llama-1b": (lambda: hf.LlamaModel(hf.LlamaConfig(**sizes(2048, 8192, 32, 8))), ids),
    "qwen2-7b": (lambda: hf.Qwen2Model(hf.Qwen2Config(**sizes(3584, 18944, 28, 4))), ids),
    "qwen3-8b": (lambda: hf.Qwen3Model(hf.Qwen3Config(**sizes(4096, 12288, 32, 8, head_dim=128))), ids),
    "phi3-mini": (lambda: hf.Phi3Model(hf.Phi3Config(**sizes(3072, 8192, 32, 32, **PAD))), ids),
    "gemma2-9b": (lambda: hf.Gemma2Model(hf.Gemma2Config(**sizes(3584, 14336, 16, 8, head_dim=256))), ids),
    "olmo2-7b": (lambda: hf.Olmo2Model(hf.Olmo2Config(**sizes(4096, 11008, 32, 32, **PAD))), ids),
    "neox-6.9b": (lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**sizes(4096, 16384, 32))), ids),
    "gpt2-xl": (lambda: hf.GPT2Model(hf.GPT2Config(n_embd=1600, n_head=25, n_layer=2, vocab_size=1024, **SDPA)), ids),
    "nanogpt-xl": (lambda: Sequence(GPTBlock(1600, 25), GPTBlock(1600, 25)), lambda: tiles((8, 1024, 1600))),
    "bert-large": (lambda: hf.BertModel(hf.BertConfig(**sizes(1024, 4096, 16, max_position_embeddings=1024))), ids),
    "vit-l": (
        lambda: hf.ViTModel(hf.ViTConfig(**sizes(1024, 4096, 16, image_size=224, patch_size=16))),
        lambda: tiles((42, 3, 224, 224)),
    ),
    "clip-l": (
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**sizes(1024, 4096, 16, image_size=224, patch_size=14))),
        lambda: tiles((32, 3, 224, 224)),
    ),
    "dit-xl": (lambda: Sequence(DiTBlock(1152, 16), DiTBlock(1152, 16)), lambda: tiles((32, 256, 1152), (32, 1152))),
    "eva02-l": (
        lambda: Sequence(*(EvaBlock(1024, 16, 2730, 1024) for _ in range(3))), lambda: tiles((16, 1025, 1024)),
    ),
}  # fmt: skip


def first(out: Any) -> Tensor:
    """The main tensor of what a model returns."""
    return out if isinstance(out, Tensor) else out[0]  # type: ignore[no-any-return]


def run(name: str) -> list[dict[str, Any]]:
    """The rows of one model: default mode and CUDA graphs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    make, inputs_of = MODELS[name]
    model = make().to("cuda", torch.bfloat16).eval()
    inputs = [inputs_of() for _ in range(layers.SETS)]
    weights = [m.weight if isinstance(m, nn.Linear) else m.weight.t() for m in model.modules()
               if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]  # fmt: skip
    tokens = first(model(*inputs[0])).shape[:2].numel()
    big = [w for w in weights if w.shape[0] != 6 * w.shape[1]]  # DiT's modulation has one row for each sample
    floor = layers.products(model, [w.shape[1] for w in big], big, tokens)
    compiled, seconds = {}, {}
    with torch.no_grad():
        for mode in (None, "reduce-overhead"):
            for backend in ("inductor", "coda"):
                torch._dynamo.reset()
                start = time.perf_counter()
                compiled[mode, backend] = torch.compile(model, backend=backend, mode=mode)
                for _ in range(3):
                    first(compiled[mode, backend](*inputs[0])).clone()
                torch.cuda.synchronize()
                seconds[mode, backend] = time.perf_counter() - start
        report = REPORTS[-1] if REPORTS else None
        launch.LAUNCHES.clear()
        ours, theirs = (first(compiled[None, b](*inputs[0])).double() for b in ("coda", "inductor"))
        launched = sum(launch.LAUNCHES.values())
        keys = list(compiled)
        ways = [*(lambda s, k=k: compiled[k](*inputs[s]) for k in keys), lambda s: floor()]
        times = layers.rotation(ways)
        held = layers.alone(ways, times)
    found, holding = dict(zip(keys, times, strict=False)), dict(zip(keys, held, strict=False))
    rows = []
    for mode in (None, "reduce-overhead"):
        ms, baseline = found[mode, "coda"], found[mode, "inductor"]
        rows.append({
            "case": f"{name} x2", "mode": "infer", "baseline": f"torch.compile {mode or 'default'}", "ms": ms,
            "baseline_ms": baseline, "floor_ms": times[-1], "speedup": baseline / ms,
            "recovered": (baseline - ms) / (baseline - times[-1]), "launched": launched,
            "sustained": layers.sustained(holding[mode, "coda"], holding[mode, "inductor"], held[-1]),
            "difference": float((ours - theirs).norm() / theirs.norm()),
            "regions": len(report.sites) if report else 0,
            "lost": sorted({r.reason for r in report.refused if r.reason.startswith("measured ")}) if report else [],
            "compile_s": {"coda": seconds[mode, "coda"], "inductor": seconds[mode, "inductor"]},
            "machine": torch.cuda.get_device_name(),
            "versions": {**target.versions(), "python": platform.python_version()},
            "command": " ".join(["python", *sys.argv]),
        })  # fmt: skip
    return rows


def main() -> None:
    """Runs the models and prints a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "models.jsonl"))
    args = parser.parse_args()
    layers.written(args.names or list(MODELS), run, args.out, line)


def line(row: dict[str, Any]) -> str:
    """What is printed of a row."""
    return (
        f"{row['case']:14s} {row['baseline'][14:]:16s} {row['ms']:7.3f} ms,"
        f" torch.compile {row['baseline_ms']:7.3f} ({row['speedup']:.3f}x,"
        f" sustained {row['sustained']['speedup']:.3f}x), floor {row['floor_ms']:7.3f},"
        f" regions {row['regions']}, launched {row['launched']}, diff {row['difference']:.1e},"
        f" {row['lost']}, compile {row['compile_s']}"
    )


if __name__ == "__main__":
    main()
