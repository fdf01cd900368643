"""`coda-inductor diff`: what it compares, what it calls wrong, and that bisection names a planted fault."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import BROKEN, Ask
from asking import ask as ask
from asking import folder as folder
from evaluate import _interpreted
from torch import Tensor
from torch._inductor import compile_fx

import coda_inductor.inductor.compile
from coda_inductor.commands import diff
from coda_inductor.commands.differences import runs
from coda_inductor.commands.differences.wide import Wide
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region
from coda_inductor.core.settings import Settings
from coda_inductor.ops import custom
from coda_inductor.patterns.terms import Term
from coda_inductor.rewrite import derive
from coda_inductor.rewrite.program import Program
from coda_inductor.rewrite.triangle import triangle

MODELS = (
    """
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self, width=64, inner=96):
        super().__init__()
        self.o, self.norm = nn.Linear(width, width, bias=False), Norm(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, stream):
        h = stream + self.o(x)
        n = self.norm(h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))


def block():
    return Block(), (torch.randn(48, 64), torch.randn(48, 64))


def narrow():
    x, stream = torch.randn(2, 48, 64).bfloat16().unbind()
    return Block().bfloat16(), (x.requires_grad_(), stream)


class Odd(nn.Module):
    '''Tied weights, dropout, running statistics, an input that is written, and outputs of many kinds.'''

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(80, 64), nn.Linear(64, 80, bias=False)
        self.head.weight = self.embed.weight
        self.inner, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, ids, state, scale=2.0):
        x = self.norm(F.gelu(self.inner(F.dropout(self.embed(ids), 0.25, self.training))))
        x = x + torch.randn_like(x)  # drawn in float64 it is another
        self.seen.add_(1)
        state.mul_(0.5).add_(x.detach())
        logits = self.head(F.dropout(x, 0.5, self.training)) * scale
        return {"logits": logits, "best": (logits.argmax(-1), None, 3), "part": logits[:, :4]}


def odd():
    return Odd(), (torch.randint(80, (96,)), torch.randn(96, 64)), {"scale": 0.5}


class Overflow(nn.Module):
    '''In float16 its squares are infinite, by whatever backend.'''

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return (self.inner(x) * 1000) ** 2


def autocast():
    model = Block()

    def mean(x, stream):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (model(x, stream) ** 2).mean(dtype=torch.float32)

    return mean, (torch.randn(48, 64), torch.randn(48, 64))


def overflow():
    return Overflow().half(), (torch.randn(48, 64).half(),)


def loss():
    model = Odd()

    def step(ids, state):
        made = model(ids, state, 0.05)["logits"]
        return F.cross_entropy(made, ids), made

    return step, (torch.randint(80, (96,)), torch.randn(96, 64))
"""
    + BROKEN
)


@pytest.fixture
def command(ask: Ask, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`ask`, beside a module `models`. Graphs are interpreted as Inductor would compile them, which is most of the time
    of a compile; random numbers are eager's all the same."""
    (folder.parent / "diff_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "diff_models", raising=False)
    quickly = partial(compile_fx.compile_fx, inner_compile=_interpreted)  # type: ignore[arg-type]
    monkeypatch.setattr(coda_inductor.inductor.compile, "compile_fx_inner", _interpreted)
    monkeypatch.setattr(compile_fx, "compile_fx", quickly)
    return ask


def rows(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["tensor"]: row for row in facts["tensors"]}


def test_nothing_is_wrong(command: Ask) -> None:
    status, facts, _ = command("diff", "diff_models:narrow", "--mode", "train", "--json")
    assert status == 0 and facts["problems"] == [] and facts["regions"] == 5 and facts["reference"] == "float64"
    weights = {f"gradient of {name}.weight" for name in ("o", "norm", "gate", "up", "down")}
    assert rows(facts).keys() == {"output", "gradient of x", *weights}
    assert all(1e-3 < row["coda"] < 1e-2 and 0.4 < row["ratio"] < 1.5 for row in facts["tensors"])
    assert facts["loss"] == "the sum of output, times fixed random weights"
    assert facts["target"] == "reference" and facts["warnings"] == []


def effects_and_outputs(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in rows(facts).items() if row["kind"] != "gradient"}


def test_draws_effects_and_outputs_of_all_kinds(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout's masks and noise are the same in all runs, or errors would be of the size of the values. In the end the
    model is what it was."""
    monkeypatch.syspath_prepend(".")
    model, args, kwargs = importlib.import_module("diff_models").odd()
    before = {name: t.clone() for name, t in (*model.state_dict().items(), ("given", args[1]))}
    facts = diff.diff(model, args, kwargs, "train", Settings(target="reference"))
    after = {**model.state_dict(), "given": args[1]}
    assert all(torch.equal(before[name], after[name]) for name in before) and model.training
    assert not facts["problems"] and facts["reference"] == "float64" and not facts["why"]
    outputs = {"output.logits", "output.best[0]", "output.part"}
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen", "state"}
    assert effects_and_outputs(facts).keys() == outputs | {f"{name}, overwritten" for name in buffers}
    gradients = {
        f"gradient of {name}" for name in ("embed.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias")
    }
    assert rows(facts).keys() - effects_and_outputs(facts).keys() == gradients  # the tied weight once
    assert all(row["coda"] < 1e-6 for row in facts["tensors"])
    assert rows(facts)["norm.num_batches_tracked, overwritten"]["coda"] == 0.0
    assert "output.logits" in facts["loss"] and "output.best" not in facts["loss"]


def test_a_scalar_is_the_loss(command: Ask) -> None:
    """Of a function around a model, whose parameters are named by the function's variable."""
    status, facts, _ = command("diff", "diff_models:loss", "--mode", "train", "--json")
    assert status == 0 and facts["loss"] == "output[0]"
    assert "gradient of model.embed.weight" in rows(facts) and "model.seen, overwritten" in rows(facts)


# ---- planted faults


def wrong_kernel(patch: pytest.MonkeyPatch, digest: str) -> None:
    """What runs in the place of the Region's kernel is 1 % off."""

    def run(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
        outs = interpret(region, inputs)
        return [out * 1.01 for out in outs] if region.digest == digest else outs

    patch.setattr(custom, "interpret", run)


def digest_at(ask: Ask, line: int) -> str:
    """Of the Region of this line of the model's."""
    _, facts, _ = ask("explain", "diff_models:block", "--mode", "train", "--target", "reference", "--json")
    found = [r["digest"] for r in facts["graphs"][0]["regions"] if r["source"].endswith(f"diff_models.py:{line}")]
    return str(found[0])


LINE_OF_O = MODELS.splitlines().index("        h = stream + self.o(x)") + 1


def test_a_wrong_kernel_is_named(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = digest_at(command, LINE_OF_O)
    wrong_kernel(monkeypatch, digest)
    status, facts, _ = command("diff", "diff_models:block", "--mode", "train", "--bisect", "--json")
    assert status == 1 and facts["tensors"][0]["wrong"] and facts["tensors"][0]["verdict"].startswith("WRONG")
    found = facts["bisect"]
    (region,) = found["regions"]
    assert region["digest"] == digest and region["source"].endswith(f"diff_models.py:{LINE_OF_O}")
    assert region["mends"] and region["differs"] and region["error"] == pytest.approx(0.01, rel=0.1)
    assert "acc0[48, 64] = in0 @ in1.T" in region["formulas"][0]
    assert found["said"].startswith(f"the kernel of {region['id']} ({digest}) is wrong")
    assert f"CODA_INDUCTOR_DISABLE={digest}" in found["said"]


def test_a_wrong_law_is_named(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The triangle's sum is 10 % off: the Regions compute what they say, and it is not what was asked for."""

    def off_by_a_tenth(program: Program, before: Term, laws: Any) -> Term:
        after = triangle(program, before, laws)
        terms = program.lifted.terms
        return after if after is before else terms.mul(terms.const(1.1), after)

    monkeypatch.setattr(derive, "triangle", off_by_a_tenth)
    status, facts, _ = command("diff", "diff_models:block", "--mode", "train", "--bisect", "--json")
    assert status == 1
    found = facts["bisect"]
    assert found["laws"] == ["triangle"] and found["switches"] == ["triangle"]
    assert found["regions"] and not any(region["differs"] for region in found["regions"])
    assert all("triangle" in region["laws"] for region in found["regions"] if not region["mends"])
    assert found["said"].startswith("what the law triangle made is wrong")
    assert found["said"].endswith("CODA_INDUCTOR_DISABLE=triangle does without")


# ---- verdicts


def test_inductor_may_be_the_worse_one(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are 2 % of the values: ours are less than 1 % of that, and nothing is wrong."""
    compiled = runs.compiled

    def worse(subject: Any, mode: Any, backend: str, settings: Settings | None = None) -> runs.Run:
        run = compiled(subject, mode, backend, settings)
        for found in run.found.values() if backend == "inductor" else ():
            found.value *= 1.02
        return run

    monkeypatch.setattr(diff, "compiled", worse)
    status, facts, _ = command("diff", "diff_models:block", "--json")
    (row,) = facts["tensors"]
    assert status == 0 and row["inductor"] == pytest.approx(0.02, rel=1e-4) and row["ratio"] < 1e-4


def test_what_is_infinite_for_both_is_not_ours(command: Ask) -> None:
    status, facts, _ = command("diff", "diff_models:overflow", "--json")
    (row,) = facts["tensors"]
    assert row["not_finite"] == row["inductor_not_finite"] > 0 and status == 0
    assert row["verdict"].endswith("not finite, as Inductor's")


def test_what_only_coda_makes_infinite_is_wrong(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
        outs = interpret(region, inputs)
        outs[0][3, 5] = torch.nan
        return outs

    monkeypatch.setattr(custom, "interpret", run)
    status, said, _ = command("diff", "diff_models:block")
    assert status == 1 and "WRONG: 64 not finite" in said  # a row, of the last product


def test_against_inductor_alone(command: Ask) -> None:
    status, facts, _ = command("diff", "diff_models:narrow", "--against", "inductor", "--json")
    (row,) = facts["tensors"]
    assert status == 0 and facts["reference"] == "inductor" and row["ratio"] is None
    assert 1e-3 < row["coda"] < 1e-2
    said = diff.render(facts)
    assert (
        "nothing is wrong: every difference from Inductor is below the floor" in said and "times Inductor's" not in said
    )


def test_a_model_without_a_graph_is_not_said_to_be_inductors(command: Ask) -> None:
    status, said, _ = command("diff", "diff_models:broken")
    assert status == 0 and "captures no graph of this model: all of it runs eagerly" in said
    assert "left to Inductor" not in said


def test_what_float64_cannot_do_is_said(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "Wide", lambda dtype, drawn: 1 / (dtype != torch.float64) and Wide(dtype, drawn))
    status, said, _ = command("diff", "diff_models:narrow")
    assert status == 0 and "against float32" in said and "no float64: ZeroDivisionError" in said


def test_a_target_that_the_tensors_are_not_on(command: Ask) -> None:
    status, _, error = command("diff", "diff_models:block", "--target", "sm_90a")
    assert status == 2 and "the model's tensors lie on the CPU, where sm_90a does not run" in error


def test_few_numbers_are_judged_by_the_narrowest_dtype(command: Ask) -> None:
    """A loss by autocast is float32, and as exact as bfloat16: which of two is nearer is chance."""
    status, facts, _ = command("diff", "diff_models:autocast", "--json")
    (row,) = facts["tensors"]
    assert status == 0 and row["dtype"] == "float32" and row["shape"] == []
    lucky = min(8 * 2**-8, 16 * row["inductor"])  # of one number an error may be small by chance
    assert row["allowed"] == pytest.approx(max(2**-8, lucky, 1.5 * row["inductor"]))


def test_a_region_is_left_out_by_its_digest(command: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = digest_at(command, LINE_OF_O)
    monkeypatch.setenv("CODA_INDUCTOR_DISABLE", digest)
    _, facts, _ = command("explain", "diff_models:block", "--mode", "train", "--target", "reference", "--json")
    (graph,) = facts["graphs"]
    assert digest not in [r["digest"] for r in graph["regions"]]
    assert f"region {digest} is switched off" in [r["reason"] for r in graph["refused"]]


def test_a_digest_that_no_region_has_is_logged(
    command: Ask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CODA_INDUCTOR_DISABLE", f"{digest_at(command, LINE_OF_O)},{'0' * 16},casts")
    caplog.set_level(logging.INFO, "coda_inductor")
    command("explain", "diff_models:block", "--mode", "train", "--target", "reference", "--json")
    said = [r.getMessage() for r in caplog.records if "disable:" in r.getMessage()]
    assert said == [f"disable: there is no Region {'0' * 16} in this graph; it may be in another"]
