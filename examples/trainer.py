"""Trains a Qwen2 with transformers' Trainer (bf16=True, AdamW), by both backends side by side.

    python examples/trainer.py                 # Qwen2-1.5B's widths, 4 layers, on a GPU
    python examples/trainer.py --small         # on a CPU

With several GPUs in sight the Trainer wraps the model in DataParallel: set CUDA_VISIBLE_DEVICES=0. Needs accelerate.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from itertools import islice
from typing import Any

import side_by_side
import torch
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

SIZES = {
    "width": (1536, 64), "inner": (8960, 128), "layers": (4, 1), "heads": (12, 4), "vocabulary": (151936, 256),
    "batch": (4, 2), "length": (2048, 128),
}  # fmt: skip


class StepByStep(TrainerCallback):  # type: ignore[misc]
    """Lets a Trainer, which trains in a thread of its own, take one step for each call: both backends take turns. (A
    second `train()` would compile once more: accelerate wraps the model's forward anew each time.)"""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.go, self.done = trainer, threading.Semaphore(0), queue.Queue[torch.Tensor | BaseException]()
        trainer.add_callback(self)
        threading.Thread(target=self.train, daemon=True).start()

    def train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self.done.put(error)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.go.acquire()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.done.put(self.trainer.loss.detach())

    def __call__(self) -> torch.Tensor:
        """The loss of one more step."""
        self.go.release()
        made = self.done.get()
        if isinstance(made, torch.Tensor):
            return made
        raise made


class Kept(Trainer):  # type: ignore[misc]
    """Keeps the loss of its last step."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.loss = loss
        return loss


def main() -> dict[str, Any]:
    chosen = side_by_side.arguments(__doc__, SIZES)
    config = Qwen2Config(
        hidden_size=chosen.width, intermediate_size=chosen.inner, num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads, num_key_value_heads=2, vocab_size=chosen.vocabulary,
        tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    rows = [
        {"input_ids": ids[0], "labels": ids[0]}
        for ids, _ in islice(side_by_side.batches(1, chosen.length, "cpu"), 64 * chosen.batch)
    ]

    def make(backend: str) -> side_by_side.Step:
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        model.compile(backend=backend)  # in place: the Trainer knows the model's class and arguments
        arguments = TrainingArguments(
            tempfile.mkdtemp(), max_steps=1 << 30, per_device_train_batch_size=chosen.batch, bf16=True,
            use_cpu=chosen.small, learning_rate=3e-4, lr_scheduler_type="constant", optim="adamw_torch_fused",
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Kept(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        return StepByStep(trainer)

    case = f"Trainer, Qwen2 of width {chosen.width}, {chosen.layers} layers, bf16=True"
    return side_by_side.compare(case, make, chosen, chosen.batch * chosen.length)


if __name__ == "__main__":
    main()
