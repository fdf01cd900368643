"""bench: a model under both backends, here on a CPU with the reference target, where only the facts can be checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from asking import Ask
from asking import ask as ask
from asking import folder as folder

from coda_inductor.commands import bench
from coda_inductor.core.errors import Unsupported
from coda_inductor.measure import sides

MODELS = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.RMSNorm(64), torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x):
        return {"out": x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))), "none": None}

def block():
    torch.manual_seed(0)
    return Block(), (torch.randn(512, 64),)

def frozen():
    return Block().requires_grad_(False), (torch.randn(512, 64),)

def bare():
    return lambda x: x @ x.T, (torch.randn(32, 32, requires_grad=True),)

"""
QUICK = ("--target", "reference", "--seconds", "0.01", "--rounds", "1")


@pytest.fixture(autouse=True)
def models(folder: Path) -> Iterator[None]:
    """The module `bench_models`, and nothing of another test's compiles."""
    folder.with_name("bench_models.py").write_text(MODELS)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", ["infer", "step"])
def test_a_model_is_measured_on_both_sides(ask: Ask, folder: Path, mode: str) -> None:
    out = folder.with_name("rows.jsonl")
    status, facts, _ = ask("bench", "bench_models:block", "--mode", mode, "--json", "--out", str(out), *QUICK)
    assert status == 0 and facts["case"] == "bench_models:block" and facts["mode"] == mode
    assert facts["machine"] == "CPU" and facts["gib"] is None and facts["fallbacks"] == {}
    held = facts["sustained"]
    assert min(facts["ms"], facts["baseline_ms"], held["ms"], held["baseline_ms"], facts["null"]) > 0
    assert facts["speedup"] == facts["baseline_ms"] / facts["ms"]
    assert held["speedup"] == held["baseline_ms"] / held["ms"]
    assert json.loads(out.read_text()) == facts


def test_what_is_said_of_a_row(ask: Ask) -> None:
    status, said, _ = ask("bench", "bench_models:bare", "--mode", "train", *QUICK)
    assert status == 0 and said.startswith("bench_models:bare: forward and backward, CPU")
    assert "torch.compile default" in said and "two turns of torch.compile itself differ by" in said


def test_a_training_step_leaves_no_gradient_and_learns() -> None:
    model, x = torch.nn.Linear(4, 4), torch.randn(8, 4)
    before, expected = model.weight.detach().clone(), model(x).detach()
    step = bench.Work(model, (x,), {}, "step").step(model)
    assert torch.equal(step(), expected)
    assert model.weight.grad is None and not torch.equal(model.weight, before)


def test_the_gradients_from_outside_are_the_same_each_time() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    work = bench.Work(lambda x: x @ w, (torch.randn(8, 4, requires_grad=True),), {}, "train")
    seen = []
    work.args[0].register_hook(lambda g: seen.append(g.clone()))
    step = work.step(lambda x: x @ w)
    step(), step()
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench_models:block"], "this machine has no GPU"),
        (["bench_models:frozen", "--mode", "train", *QUICK], "nothing of the model requires a gradient"),
        (["bench_models:bare", "--mode", "step", *QUICK], "the model has no parameter to train"),
        (["bench_models:block", "--rounds", "0"], "nothing would be timed"),
        (["bench_models:block", "--out", "none/rows.jsonl"], "no file can be written there"),
        (["bench_models:block", "--plot", "a.foo"], "its ending is none of .svg"),
        (["bench_models:block", "--torch-mode", "reduce-overhead", *QUICK], "a mode or options, not both"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_what_cannot_be_measured_is_said_in_one_line(ask: Ask, arguments: list[str], said: str) -> None:
    status, out, error = ask("bench", *arguments)
    assert (status, out) == (2, "") and said in error and error.count("\n") == 1


def test_a_model_without_values_is_not_measured() -> None:
    model = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(Unsupported, match="lies on the meta device"):
        bench.placed(model, (torch.ones(4, 4),), {}, "infer")


def test_within_the_noise_nothing_is_claimed() -> None:
    row = {
        "case": "m:f", "mode": "infer", "baseline": "torch.compile default", "machine": "GPU", "ms": 1.0,
        "baseline_ms": 1.01, "sustained": {"ms": 1.0, "baseline_ms": 1.01, "speedup": 1.01}, "null": 0.98,
        "gib": 1.0, "baseline_gib": 1.5, "kernels": 3, "regions": 2,
        "fallbacks": {"why": 1}, "lost": ["measured slower"],
    }  # fmt: skip
    said = bench.render(row)
    assert "it says nothing" in said and "1 fell back: why" in said and "1.500" in said
    assert "it says nothing" not in bench.render(row | {"null": 1.001})


def test_alone_is_the_mean_of_its_calls() -> None:
    calls: list[int] = []
    ms = sides.alone(lambda: calls.append(1), 1.0, 0.02, on_gpu=False)
    assert len(calls) == 20 and 0 < ms < 5
