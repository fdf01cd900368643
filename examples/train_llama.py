"""Trains transformers' Llama with AdamW, in bfloat16, by both backends side by side.

    python examples/train_llama.py                 # Llama-3.2-1B's widths, 4 layers, on a GPU
    python examples/train_llama.py --layers 16     # all of its layers; compiles for longer
    python examples/train_llama.py --small         # on a CPU

The weights are random; the text is Python's standard library, byte by byte.
"""

from __future__ import annotations

from typing import Any

import side_by_side
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {
    "width": (2048, 64), "inner": (8192, 128), "layers": (4, 1), "heads": (32, 4), "vocabulary": (128256, 256),
    "batch": (4, 2), "length": (2048, 128),
}  # fmt: skip


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES)
    config = LlamaConfig(
        hidden_size=chosen.width, intermediate_size=chosen.inner, num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads, num_key_value_heads=chosen.heads // 4, vocab_size=chosen.vocabulary,
        max_position_embeddings=8192, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(0)
        with torch.device(chosen.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        compiled: Any = torch.compile(model, backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        text = side_by_side.batches(chosen.batch, chosen.length, chosen.device)

        def step() -> torch.Tensor:
            ids, _ = next(text)
            loss: torch.Tensor = compiled(input_ids=ids, labels=ids).loss  # it shifts the labels itself
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    tokens = chosen.batch * chosen.length
    case = f"Llama of transformers, width {chosen.width}, {chosen.layers} layers, {tokens} tokens, AdamW"
    return side_by_side.compare(case, make, chosen, tokens)


if __name__ == "__main__":
    main()
