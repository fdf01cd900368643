"""Small random models of many architectures of transformers: forward and all gradients in float64 against eager's.

    python tests/sweep_models.py [NAME ...]

Prints for each the largest error of an output or a gradient, relative to its tensor's largest value, in training and in
inference, and the Regions of its graphs. Some ten minutes for all on one core; the suite has a few of them. What a
model computes in float32 it computes in float64 here.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from evaluate import flat, strict_reference
from quick import quick
from torch import Tensor, nn

from coda_inductor.inductor.joint_pass import REPORTS

B, T, EXACT = 2, 48, 1e-10
TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128,
        "max_position_embeddings": 64, "use_cache": False, "pad_token_id": 0}  # fmt: skip
IMAGE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
         "image_size": 64, "patch_size": 8}  # fmt: skip
OLD = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
KV, HEAD = {"num_key_value_heads": 2}, {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STAGES = {"hidden_sizes": [16, 32, 64, 64], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 4],
          "sr_ratios": [4, 2, 1, 1]}  # fmt: skip
ENCODER_DECODER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                   "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MLA = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 32, "v_head_dim": 16,
       "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "first_k_dense_replace": 1, "n_shared_experts": 1}  # fmt: skip
DISTIL = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}

CAUSAL: dict[str, dict[str, Any]] = {
    "Llama": KV, "Mistral": KV | {"sliding_window": 16}, "Mixtral": KV | EXPERTS, "Qwen2": KV, "Qwen3": HEAD,
    "Qwen3Moe": HEAD | EXPERTS, "Gemma": HEAD, "Gemma2": HEAD, "Phi": {}, "Phi3": KV, "Falcon": {}, "GPTNeoX": {},
    "GPTJ": OLD | {"rotary_dim": 8}, "CodeGen": OLD | {"rotary_dim": 8, "n_ctx": 64}, "GPTBigCode": OLD,
    "GPTNeo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}, "StableLm": KV, "Starcoder2": KV,
    "Olmo": {}, "Olmo2": {}, "Olmoe": EXPERTS, "Cohere": KV, "Cohere2": KV, "Granite": KV, "Nemotron": KV,
    "Persimmon": {}, "BioGpt": {}, "Glm": HEAD, "Glm4": HEAD, "SmolLM3": KV, "Helium": HEAD,
    "DeepseekV3": MLA | EXPERTS, "Exaone4": KV, "GptOss": HEAD | EXPERTS,
    "SeedOss": HEAD, "HunYuanDenseV1": HEAD, "Ernie4_5": HEAD, "Arcee": KV,
    "Lfm2": KV | {"layer_types": ["conv", "full_attention"]}, "Mamba": {"state_size": 8},
    "Jamba": KV | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "Bert": {}, "Roberta": {}, "Electra": {"embedding_size": 32}, "Albert": {"embedding_size": 32}, "Deberta": {},
    "DistilBert": DISTIL, "MPNet": {}, "RoFormer": {}, "FNet": {}, "ConvBert": {"embedding_size": 64},
    "ModernBert": {"global_attn_every_n_layers": 2, "local_attention": 16},
    "MobileBert": {"intra_bottleneck_size": 32, "embedding_size": 32, "true_hidden_size": 32},
}  # fmt: skip
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("LMHeadModel", TEXT | OLD), "T5": ("ForConditionalGeneration", TEXT | T5),
    "Bart": ("ForConditionalGeneration", TEXT | ENCODER_DECODER),
    "Pegasus": ("ForConditionalGeneration", TEXT | ENCODER_DECODER),
    "SiglipVision": ("Model", IMAGE), "CLIPVision": ("Model", IMAGE), "ViT": ("Model", IMAGE), "DeiT": ("Model", IMAGE),
    "Dinov2": ("Model", IMAGE | {"mlp_ratio": 2}), "DINOv3ViT": ("Model", IMAGE | {"pos_embed_rescale": None}),
    "Beit": ("Model", IMAGE),
    "VitDet": ("Model", IMAGE), "Segformer": ("Model", IMAGE | STAGES), "PvtV2": ("Model", IMAGE | STAGES),
    "ConvNext": ("Model", IMAGE | {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1], "patch_size": 4}),
    "Swin": ("Model", IMAGE | {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2,
                               "num_attention_heads": [2, 4], "patch_size": 4}),
    "Swinv2": ("Model", IMAGE | {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
                                 "num_attention_heads": [2, 4], "patch_size": 4}),
}  # fmt: skip
MODELS = (
    {name: ("ForCausalLM", TEXT | config) for name, config in CAUSAL.items()}
    | {name: ("ForMaskedLM", TEXT | config) for name, config in MASKED.items()}
    | OTHER
)


def widen() -> None:
    """Of the modules of transformers that are imported from now on, the models and what they share say float64 where
    they said float32."""
    whole = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> types.CodeType | None:
        path = str(self.path)
        if "transformers/" not in path or not re.search(r"/modeling_|/loss/|masking_utils|/integrations/", path):
            return whole(self, fullname)
        with open(path) as source:
            text = re.sub(r"\.float\(\)", ".double()", re.sub(r"torch\.float(32)?\b", "torch.float64", source.read()))
        return compile(text, path, "exec")

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model without anything random, with gains and biases that are drawn, and its inputs."""
    import transformers

    head, given = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**given)
    for key, value in vars(config).items():
        if isinstance(value, float) and ("drop" in key):
            setattr(config, key, 0.0)
    config._experts_implementation = "eager"  # the others have no float64
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1 if p.dim() == 1 else 0.0)
    if "vocab_size" not in given:
        return model, {"pixel_values": torch.randn(B, 3, 64, 64, dtype=torch.float64)}
    ids = torch.randint(2, 120, (B, T))
    return model, {"input_ids": ids, "labels": ids}


def step(run: Callable[..., Any], model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What the model returns, and every gradient."""
    model.zero_grad()
    outputs = [o for o in flat(dict(run(**inputs))) if o.is_floating_point()]
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o) for o in outputs]
    sum((o * w).sum() for o, w in zip(outputs, weights, strict=True) if o.requires_grad).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.numel()]
    return [o.detach() for o in outputs] + grads


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error, each relative to its tensor's largest value, or to 1e-6 of that of all (a key's bias has no
    gradient but rounding)."""
    floor = 1e-6 * max(float(w.abs().max()) for w in wanted)
    pairs = zip(found, wanted, strict=True)
    return max(float((f - w).abs().max() / w.abs().max().clamp_min(floor)) for f, w in pairs)


def main(names: list[str]) -> int:
    widen()
    quick()
    warnings.simplefilter("ignore")
    failed = 0
    for name in names or MODELS:
        model, inputs = made(name)
        wanted = step(model, model, inputs)
        with torch.no_grad():
            inferred = flat(dict(model(**inputs)))
        with strict_reference(run=False):
            REPORTS.clear()
            trained = worst(step(torch.compile(model, backend="coda"), model, inputs), wanted)
            regions = [len(report.sites) for report in REPORTS]
            with torch.no_grad():
                error = worst(flat(dict(torch.compile(model, backend="coda")(**inputs))), inferred)
        failed += max(trained, error) > EXACT
        print(f"{name:16} training {trained:.1e}  inference {error:.1e}  {regions} Regions", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
