"""Common models at real widths for `explain`: plain nanoGPT and ViT; ViT, BERT, CLIP, GPT-2 and Llama of transformers.

    coda-inductor explain tests.coverage_models:nanogpt --target sm_90a
    python tests/coverage_models.py [--train] [NAME ...]

The first explains one; the second prints the coverage of all, or of the named, at full depth, for inference or (with a
loss where the model has a head, and without dropout) for training. Each function returns (model, args), of full depth
unless told.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.capture import OnCpu, Untouched

BF16 = torch.bfloat16
Made = tuple[nn.Module, tuple[Any, ...]]


class Block(nn.Module):
    """The pre-norm block of GPT-2 and of ViT: LayerNorm, packed q, k, v, attention, LayerNorm, GELU."""

    def __init__(self, width: int, heads: int, causal: bool, approximate: str) -> None:
        super().__init__()
        self.heads, self.causal, self.approximate = heads, causal, approximate
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.attn(self.ln_1(x)).split(d, dim=2)
        q, k, v = (y.view(b, t, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate=self.approximate))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """Logits of the last token alone, as nanoGPT computes them to generate; the head is tied to the embedding."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50304, width), nn.Embedding(1024, width)
        self.h = nn.ModuleList(Block(width, heads, True, "none") for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 50304, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)[:, [-1], :])  # type: ignore[no-any-return]


class ViT(nn.Module):
    """ViT-L/16 at 224 pixels: patches by a convolution, a class token, learned positions, a head on the class token."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False, "none") for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


def ids(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def nanogpt(layers: int = 48) -> Made:
    """GPT-2 XL's widths."""
    return NanoGPT(layers, 1600, 25).to(BF16), (ids(8, 1024),)


def vit_l(layers: int = 24) -> Made:
    return ViT(layers, 1024, 16).to(BF16), (torch.zeros(64, 3, 224, 224, dtype=BF16),)


def vit_hf(layers: int = 24) -> Made:
    """ViT-L of transformers: q, k and v are separate products."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096)
    return ViTForImageClassification(config).to(BF16), (torch.zeros(64, 3, 224, 224, dtype=BF16),)


def bert_large(layers: int = 24) -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096)
    return BertModel(config).to(BF16), (ids(16, 512),)


def clip_l(layers: int = 24) -> Made:
    """The vision tower of CLIP ViT-L/14."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096,
        image_size=224, patch_size=14, projection_dim=768,
    )  # fmt: skip
    return CLIPVisionModel(config).to(BF16), (torch.zeros(32, 3, 224, 224, dtype=BF16),)


def gpt2(layers: int = 48) -> Made:
    """GPT-2 XL. Causal without a mask, which transformers builds when it is traced; no cache."""
    from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    config = GPT2Config(n_embd=1600, n_layer=layers, n_head=25, use_cache=False, attn_implementation="causal")
    return GPT2LMHeadModel(config).to(BF16), (ids(8, 1024),)


def llama_of(layers: int) -> tuple[nn.Module, Tensor]:
    """Llama-3-8B's widths, causal attention without a mask (transformers builds one when it is traced), no memory."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False, attn_implementation="causal",
    )  # fmt: skip
    with OnCpu(), Untouched():  # type: ignore[no-untyped-call]
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        return model, torch.zeros(2, 4096, dtype=torch.long)


def llama(layers: int = 32) -> Made:
    """Llama-3-8B. Causal without a mask, as gpt2."""
    model, tokens = llama_of(layers)
    return model, (tokens,)


BUILD: dict[str, Callable[..., Made]] = {
    "llama": llama, "nanogpt": nanogpt, "vit_l": vit_l, "vit_hf": vit_hf, "bert_large": bert_large, "clip_l": clip_l,
    "gpt2": gpt2,
}  # fmt: skip


def build(name: str, layers: int | None = None) -> Made:
    """The model in memory that nothing touches."""
    with OnCpu(), Untouched():  # type: ignore[no-untyped-call]
        return BUILD[name](layers) if layers else BUILD[name]()


class Loss(nn.Module):
    """What is trained: cross-entropy where the model makes logits, else the sum that `explain` takes of any output."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.name, self.model = name, model
        for module in model.modules():
            for option in ("p", "attention_dropout", "dropout", "dropout_prob"):
                if isinstance(getattr(module, option, None), float):
                    setattr(module, option, 0.0)

    def forward(self, x: Tensor) -> Any:
        if self.name in ("llama", "gpt2"):
            return self.model(input_ids=x, labels=x).loss
        if self.name in ("vit_l", "vit_hf"):
            logits = self.model(x)
            logits = logits if self.name == "vit_l" else logits.logits
            return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long, device=x.device))
        return self.model(x)


def main(names: list[str]) -> None:
    """A line for each model: coverage, passes and Regions, what is kept for the backward, seconds."""
    train = "--train" in names
    for name in [n for n in names if n != "--train"] or BUILD:
        start = time.perf_counter()
        model, args = build(name)
        settings = Settings(target="sm_90a")
        made = explain(Loss(name, model) if train else model, args, {}, "train" if train else "infer", settings)
        t = made["totals"]
        moved = f"{t['bytes_before'] / 1e9:.2f} -> {t['bytes_after'] / 1e9:.2f} GB"
        kept = f"kept {t['saved_bytes_inductor'] / 1e9:.2f} -> {t['saved_bytes'] / 1e9:.2f} GB, " if train else ""
        said = f"{t['passes_left']} passes left, {t['regions']} regions, {moved}, {kept}"
        print(f"{name:<11} {t['coverage']:.3f}  {said}{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
