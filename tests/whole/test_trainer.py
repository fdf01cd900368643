"""transformers' Trainer, as the README says to use it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate import strict_reference
from test_whole_graphs import SMALL
from torch import nn

from coda_inductor.inductor.joint_pass import REPORTS

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")


def trained(model: nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """The parameters after three steps of SGD, each of two accumulated batches."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows: Any = [dict.fromkeys(("input_ids", "labels"), torch.randint(SMALL["vocab_size"], (16,))) for _ in range(12)]
    arguments = TrainingArguments(
        str(directory), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        optim="sgd", learning_rate=0.5,
        use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_a_model_compiled_in_place(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    eager = LlamaForCausalLM(LlamaConfig(**SMALL, use_cache=False)).double()
    model, start = copy.deepcopy(eager), copy.deepcopy(eager.state_dict())
    wanted = trained(eager, tmp_path)
    with strict_reference(run=False):
        REPORTS.clear()
        model.compile(backend="coda")
        found = trained(model, tmp_path)
        assert [len(report.sites) for report in REPORTS] == [19]
    assert found.keys() == wanted.keys()
    errors = {name: float((p - wanted[name]).norm() / (wanted[name] - start[name]).norm()) for name, p in found.items()}
    assert max(errors.values()) < 1e-5, errors  # of what was learnt; norms and loss are float32, whatever the model
