"""Whole graphs through torch.compile(backend="coda"), float64, against eager: decoders, models of transformers, odd
graphs, random programs, and what surrounds a graph (batches that change, buffers, training mode).
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from evaluate import compiled, error, flat, strict_reference
from odd_programs import ODD
from random_programs import random_program
from small_tensors import rms
from torch import Tensor, nn
from zoo import CASES, Case, Decoder, Shape, token_ids

from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.inductor.records import Report

EXACT = 1e-10


def check(model: Callable[..., Any], *args: Any, run: bool = False) -> list[Report]:
    """The compiled outputs are eager's, in structure, dtype, shape and value. Returns the reports."""
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
    with torch.no_grad():
        wanted = model(*copies)
    found, reports = compiled(model, *args, run=run)
    for f, w in zip(flat(found), flat(wanted), strict=True):
        assert error(f, w) < EXACT
        assert f.stride() == w.stride() or not w.is_contiguous()
    return reports


def regions(reports: list[Report]) -> tuple[int, int]:
    """How many Regions, and how many to which a law gave a factor."""
    sites = [site for report in reports for site in report.sites]
    return len(sites), sum("bilinearity" in site.laws for site in sites)


BY_INDUCTOR = [c for c in CASES if c.shape.norm != "hf" or c.name.startswith(("mlp", "grouped", "activation: "))][:16]


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_table(case: Case) -> None:
    model, args = case.build()
    reports = check(model, *args, run=case in BY_INDUCTOR)
    assert len(reports) == 1
    assert regions(reports) == (case.regions, case.deferred)


# name, class, configuration, Regions, deferred. QK-norm and norms after a product (Gemma-2, OLMo-2) stay outside.
TRANSFORMERS: tuple[tuple[str, str, dict[str, Any], int, int], ...] = (
    ("llama", "LlamaForCausalLM", {"num_key_value_heads": 2}, 12, 6),
    (
        "llama",
        "LlamaForCausalLM",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
        12,
        6,
    ),
    ("mistral", "MistralForCausalLM", {"num_key_value_heads": 2}, 12, 6),
    ("qwen2", "Qwen2ForCausalLM", {"num_key_value_heads": 2}, 12, 6),
    ("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}, 12, 6),
    ("phi3", "Phi3ForCausalLM", {"num_key_value_heads": 2, "pad_token_id": 0}, 8, 4),
    ("cohere", "CohereForCausalLM", {"num_key_value_heads": 2, "pad_token_id": 0}, 12, 5),
    ("gpt_neox", "GPTNeoXForCausalLM", {}, 6, 3),
    ("gpt2", "GPT2LMHeadModel", {"n_inner": 64}, 8, 4),
    ("bert", "BertForMaskedLM", {}, 10, 6),
    ("gemma2", "Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}, 7, 0),
    ("olmo2", "Olmo2ForCausalLM", {"num_key_value_heads": 2}, 2, 0),
)
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def exact_module(name: str, directory: Path) -> Any:
    """transformers' own source of a model, but that what it computes in float32 it computes in float64."""
    import transformers

    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    source = inspect.getsource(module)
    for pattern, new in (
        (r"from \.\.\. import", "from transformers import"),
        (r"from \.\.\.(\w)", r"from transformers.\1"),
        (r"from \.\.(\w)", r"from transformers.models.\1"),
        (r"from \.(\w)", rf"from transformers.models.{name}.\1"),
        (r"torch\.float(32)?\b", "torch.float64"),
        (r"\.float\(\)", ".double()"),
    ):
        source = re.sub(pattern, new, source)
    assert transformers.__version__ and "torch.float32" not in source
    path = directory / f"exact_{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # dataclasses and inspect look there
    spec.loader.exec_module(made)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "cls", "config", "count", "deferred"), TRANSFORMERS)
def test_transformers(name: str, cls: str, config: dict[str, Any], count: int, deferred: int, tmp_path: Path) -> None:
    import transformers

    made = getattr(exact_module(name, tmp_path), cls)
    torch.manual_seed(0)
    model = made(made.config_class(**SMALL | config, attn_implementation="sdpa")).double().eval()
    assert transformers.PreTrainedModel in made.__mro__
    reports = check(lambda ids: model(ids).logits, token_ids(2, 7, 50), run=name == "llama")
    assert regions(reports) == (count, deferred)


def pictures(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A vision model of transformers or a block of bench/models.py (diffusion, nanoGPT), small, with its inputs."""
    import transformers

    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    bench = importlib.import_module("models")
    sys.path.pop(0)
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    image: dict[str, Any] = {k: SMALL[k] for k in shared}
    image |= {"image_size": 16, "patch_size": 4, "attn_implementation": "sdpa"}
    picture, tokens = torch.randn(2, 3, 16, 16).double(), torch.randn(2, 6, 32).double()
    clip: Any = transformers.CLIPVisionModel
    made: dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]] = {
        "vit": lambda: (transformers.ViTModel(transformers.ViTConfig(**image)), (picture,)),
        "clip": lambda: (clip(transformers.CLIPVisionConfig(**image)), (picture,)),
        "dit": lambda: (
            bench.Sequence(*(bench.DiTBlock(32, 4) for _ in range(2))),
            (tokens, torch.randn(2, 32).double()),
        ),
        "nanogpt": lambda: (bench.Sequence(*(bench.GPTBlock(32, 4) for _ in range(2))), (tokens,)),
    }
    return made[name]()


@pytest.mark.parametrize(
    ("name", "count", "deferred"), [("vit", 9, 5), ("clip", 9, 5), ("dit", 2, 0), ("nanogpt", 7, 3)]
)
def test_vision_diffusion_and_nanogpt(name: str, count: int, deferred: int) -> None:
    """Convolutions and per-sample modulation stay outside; no cast to float32 stands in these models."""
    torch.manual_seed(0)
    model, inputs = pictures(name)
    model = model.double().eval()
    reports = check(lambda *xs: first(model(*xs)), *inputs, run=False)
    assert regions(reports) == (count, deferred)


def first(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name: str) -> None:
    function, inputs = ODD[name]
    check(function, *inputs())


@pytest.mark.parametrize("seed", range(40, 52))
def test_random_programs(seed: int) -> None:
    function, args = random_program(seed)
    check(function, *args)


def test_some_random_programs_get_regions_and_laws() -> None:
    """Otherwise the tests above would say little."""
    found = [regions(compiled(f, *args, run=False)[1]) for f, args in map(random_program, range(20))]
    assert sum(n for n, _ in found) > 20 and sum(d for _, d in found) >= 2


def test_one_compile_for_all_batches() -> None:
    """No guard is added: batches of any size run the one graph, as without the pass."""
    model = Decoder(Shape(rope=True, kv=2)).double().eval()
    with strict_reference(), torch.no_grad():
        REPORTS.clear()
        step = torch.compile(model, backend="coda", dynamic=None)
        for batch in (3, 2, 8, 1, 64, 5):
            ids = token_ids(batch)
            torch._dynamo.mark_dynamic(ids, 0)
            if batch == 1:  # torch itself specialises on 1
                continue
            assert error(step(ids), model(ids)) < EXACT
        assert len(REPORTS) == 1 and regions(list(REPORTS)) == (12, 6)


def test_one_compile_for_all_batches_and_lengths() -> None:
    model = Decoder(Shape(norm="LayerNorm", bias=True, mlp="plain", act="gelu")).double().eval()
    with strict_reference(run=False), torch.no_grad():
        REPORTS.clear()
        step = torch.compile(model, backend="coda")
        for batch, tokens in ((3, 6), (2, 9), (7, 4), (16, 16)):
            ids = token_ids(batch, tokens)
            for dim in (0, 1):
                torch._dynamo.mark_dynamic(ids, dim)
            assert error(step(ids), model(ids)) < EXACT
        assert len(REPORTS) == 1 and regions(list(REPORTS)) == (10, 6)


class Statistics(nn.Module):
    """Buffers that a forward changes: a running mean, a counter, a cache that is written at a position."""

    mean: Tensor
    count: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(torch.tanh(x))
        self.mean.mul_(0.9).add_(0.1 * h.mean((0, 1)))
        self.count += 1
        self.cache[:, 1:3] = rms(h)[:, :2]
        return self.second(rms(h)) + self.mean  # type: ignore[no-any-return]


def test_buffers_change_as_in_eager() -> None:
    torch.manual_seed(0)
    model, twin = Statistics().double(), Statistics().double()
    twin.load_state_dict(model.state_dict())
    with strict_reference(), torch.no_grad():
        step = torch.compile(model, backend="coda")
        for _ in range(3):
            x = torch.randn(2, 6, 8, dtype=torch.float64)
            assert error(step(x), twin(x)) < EXACT
            for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
                assert error(mine, theirs) < EXACT


def test_inputs_changed_in_place_are_changed() -> None:
    def f(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        residual += x @ w
        n = rms(residual)
        residual.mul_(2)
        return torch.relu(n @ w)

    args = [torch.randn(s, dtype=torch.float64) for s in ((6, 8), (8, 8), (6, 8))]
    mine = [a.clone() for a in args]
    with torch.no_grad():
        wanted = f(*args)
    found, _ = compiled(f, *mine, run=False)
    assert error(found, wanted) < EXACT
    assert all(error(m, a) < EXACT for m, a in zip(mine, args, strict=True))


class Dropping(nn.Module):
    """A block with dropout, and a head that repeats a weight."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.up, self.down = p, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + F.dropout(self.down(F.gelu(self.up(rms(x)))), self.p, self.training)
        return h + F.dropout(self.down(F.gelu(self.up(rms(h)))), self.p, self.training)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_training_mode_without_gradients(p: float) -> None:
    """Random numbers are drawn in eager's order, and the weights stand twice in the graph."""
    torch.manual_seed(0)
    model = Dropping(p).double().train()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    with torch.no_grad(), torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(7)
        wanted = model(x)
        torch.manual_seed(7)
        found, reports = compiled(model, x, run=False)
    assert error(found, wanted) < EXACT
    assert regions(reports)[0] >= 2


GRADIENTS = {
    "llama": Shape(rope=True, kv=2),
    "packed": Shape(mlp="chunk", norm="gemma"),
    "no gain": Shape(norm="no gain", layers=1),
    "gpt": Shape(norm="LayerNorm", bias=True, mlp="plain", act="gelu, tanh", tied=True),
    "post": Shape(norm="LayerNorm", order="post"),
    "returned": Shape(also="n", layers=1),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_eagers(name: str) -> None:
    """The loss stands outside: the gradient of the logits is an input, which nothing of the forward may read."""
    torch.manual_seed(0)
    model, ids = Decoder(GRADIENTS[name]).double(), token_ids()

    def loss(outputs: Any) -> Tensor:
        return torch.stack([(out * out).sum() for out in flat(outputs)]).sum()

    loss(model(ids)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    model.zero_grad()
    with strict_reference(run=False):
        loss(torch.compile(model, backend="coda")(ids)).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (wanted[name] is None)
        if p.grad is not None:  # a key's bias has the gradient 0, so relative to the largest
            assert float((p.grad - wanted[name]).abs().max()) < EXACT * largest  # type: ignore[operator]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(60, 72))
def test_gradients_of_random_programs(seed: int) -> None:
    function, (x, weights, gain, token) = random_program(seed)

    def gradients(step: Callable[..., list[Tensor]]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, gain, token, *weights)]
        outputs = step(leaves[0], leaves[3:], *leaves[1:3])
        sums = [(o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outputs]
        return list(torch.autograd.grad(torch.stack(sums).sum(), leaves, materialize_grads=True))

    wanted = gradients(function)
    with strict_reference(run=False):
        found = gradients(torch.compile(function, backend="coda"))
    largest = max(float(t.abs().max()) for t in wanted)
    assert all(float((f - w).abs().max()) < EXACT * largest for f, w in zip(found, wanted, strict=True))


@pytest.mark.sampled
@pytest.mark.parametrize("disable", ["bilinearity", "gauge", "pair", "statistic", "pointwise"])
def test_any_part_may_be_switched_off(disable: str) -> None:
    model = Decoder(Shape(norm="LayerNorm", bias=True)).double().eval()
    ids = token_ids()
    found, reports = compiled(model, ids, run=False, disable=disable)
    with torch.no_grad():
        assert error(found, model(ids)) < EXACT
    assert regions(reports)[0] < 10 or regions(reports)[1] < 6


def test_bfloat16_is_about_as_exact_as_eager() -> None:
    torch.manual_seed(0)
    exact = Decoder(Shape(width=64, inner=96)).double().eval()
    model = Decoder(Shape(width=64, inner=96)).eval()
    model.load_state_dict(exact.state_dict())
    model.bfloat16()
    exact.load_state_dict(model.state_dict())
    ids = token_ids(4, 16)
    found, reports = compiled(model, ids, run=False)
    with torch.no_grad():
        wanted, eager = exact(ids), model(ids)
    assert regions(reports) == (10, 6)
    assert float((found.double() - wanted).norm()) <= 1.5 * float((eager.double() - wanted).norm())
