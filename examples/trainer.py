"""Trains a Qwen2 with transformers' Trainer (bf16=True, AdamW), by both backends side by side.

    python examples/trainer.py                 # Qwen2-1.5B's widths, 4 layers, on a GPU
    python examples/trainer.py --small         # on a CPU

With several GPUs in sight the Trainer wraps the model in DataParallel: set CUDA_VISIBLE_DEVICES=0. Needs accelerate.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from typing import Any

import side_by_side
import torch
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

SIZES = {
    "width": (1536, 64), "inner": (8960, 128), "layers": (4, 1), "heads": (12, 4), "vocabulary": (151936, 256),
    "batch": (4, 2), "length": (2048, 128), "steps": (10, 2),
}  # fmt: skip


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES)
    config = Qwen2Config(
        hidden_size=chosen.width, intermediate_size=chosen.inner, num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads, num_key_value_heads=2, vocab_size=chosen.vocabulary,
        tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    rows = [
        {"input_ids": ids[0], "labels": ids[0]}
        for ids, _ in islice(side_by_side.batches(1, chosen.length, "cpu"), 4 * chosen.batch)
    ]

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        model.compile(backend=backend)  # in place: the Trainer knows the model's class and arguments
        arguments = TrainingArguments(
            tempfile.mkdtemp(), max_steps=chosen.steps, per_device_train_batch_size=chosen.batch, bf16=True,
            use_cpu=chosen.small, learning_rate=3e-4, lr_scheduler_type="constant", optim="adamw_torch_fused",
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)

        def train() -> torch.Tensor:
            """As many steps as --steps says; the next call goes on from there. Returns their mean loss."""
            return torch.tensor(trainer.train().training_loss)

        return train

    tokens = chosen.steps * chosen.batch * chosen.length
    case = f"Trainer, Qwen2 of width {chosen.width}, {chosen.layers} layers, bf16=True, {chosen.steps} steps"
    return side_by_side.compare(case, make, chosen, tokens)


if __name__ == "__main__":
    main()
