"""Whole models on the GPU: the kernels that ran are the Regions of the report, and the error is no worse than
eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
]


def llama(**changes: Any) -> torch.nn.Module:
    """A small Llama of transformers, randomly initialised, in float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 1000, "attn_implementation": "sdpa",
    } | changes  # fmt: skip
    torch.manual_seed(0)
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**config)).eval()
    return model


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_llama_runs_its_regions_at_eagers_accuracy_with_one_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Every Region launches; M from 2 to 16384 tokens needs one compile."""
    from coda_inductor.codegen import launch
    from coda_inductor.inductor.joint_pass import REPORTS

    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    monkeypatch.setenv("CODA_INDUCTOR_TUNE", "off")  # so that every Region is kept and checked
    torch._dynamo.reset()
    model = llama().cuda()
    exact = llama().cuda().double()
    model = model.bfloat16()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    compiled = torch.compile(model, backend="coda", options={"cache_dir": str(tmp_path / "kernels")})
    reports = len(REPORTS)
    with torch.no_grad():
        for batch in (64, 2, 1024, 37, 513, 3):
            ids = torch.randint(0, 1000, (batch, 16), device="cuda")
            torch._dynamo.mark_dynamic(ids, 0)
            launch.LAUNCHES.clear()
            ours = compiled(ids).logits
            launched = dict(launch.LAUNCHES)
            sites = REPORTS[-1].sites
            assert len(sites) == 10
            assert launched == {d: sum(s.region.digest == d for s in sites) for d in {s.region.digest for s in sites}}
            wanted = exact(ids).logits
            assert error(ours, wanted) <= 1.5 * error(model(ids).logits, wanted)
    assert len(REPORTS) == reports + 1
    assert not launch.FALLBACKS


def test_the_contest_keeps_only_what_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Default settings: the regions that ran are the report's, and each loser's reason has its timings."""
    from coda_inductor.codegen import launch
    from coda_inductor.inductor.joint_pass import REPORTS

    monkeypatch.setenv("CODA_INDUCTOR_STRICT", "1")
    torch._dynamo.reset()
    model = llama().cuda().bfloat16()
    compiled = torch.compile(model, backend="coda", options={"cache_dir": str(tmp_path / "kernels")})
    ids = torch.randint(0, 1000, (64, 16), device="cuda")
    with torch.no_grad():
        launch.LAUNCHES.clear()
        ours = compiled(ids).logits
        launch.LAUNCHES.clear()
        compiled(ids)
        eager = model(ids).logits
    sites = REPORTS[-1].sites
    assert sum(launch.LAUNCHES.values()) == len(sites)
    assert error(ours, eager.double()) < 2e-2
