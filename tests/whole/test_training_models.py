"""Training whole models on the reference target, in float64: outputs and all gradients equal eager's. Models of
transformers, a plain nanoGPT, and the ways in which people train: adapters, shared layers, dropout, checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from evaluate import _interpreted as interpreted
from evaluate import strict_reference
from test_whole_graphs import SMALL, exact_module
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import coda_inductor.inductor.compile
from coda_inductor.core.region import parse
from coda_inductor.inductor.joint_pass import REPORTS
from coda_inductor.ops.custom import REGION

# Regions in all graphs of each case: the one place to change when more is derived.
REGIONS = {
    "llama": 21,
    "llama, embeddings as input": 21,
    "llama, first layer and norms frozen": 14,
    "llama, checkpointed by transformers": 21,
    "qwen3": 19,
    "gemma2": 20,
    "gpt2": 15,
    "bert": 23,
    "vit": 18,
    "nanogpt": 15,
    "nanogpt, any batch": 15,
    "adapters": 17,
    "one block twice": 15,
    "a graph for each block": 6,
    "dropout": 10,
    "checkpointed": 15,
    "checkpointed, products kept": 15,
    "checkpointed, attention kept": 15,
    "checkpointed, dropout": 10,
    "memory budget 0.5": 15,
    "memory budget 0": 15,
}
EXACT = 1e-10
VOCAB, WIDTH, HEADS = SMALL["vocab_size"], SMALL["hidden_size"], SMALL["num_attention_heads"]
Inputs = dict[str, Any]
Around = Callable[..., Any]
Made = Callable[[str], tuple[nn.Module, list[Inputs]]]


class Block(nn.Module):
    """nanoGPT's block; beside the first product of its MLP may stand an adapter of some rank."""

    def __init__(self, dropout: float, rank: int) -> None:
        super().__init__()
        self.dropout = dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, rank, False), nn.Linear(rank, 4 * WIDTH, False)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.proj(y), self.dropout)
        n = self.ln_2(x)
        h = self.fc(n) if self.adapter is None else self.fc(n) + self.adapter(n)
        return x + F.dropout(self.out(F.gelu(h)), self.dropout)


class NanoGPT(nn.Module):
    """Loss and logits; the head is tied to the embedding. `around` runs a block; with adapters, only they train."""

    def __init__(
        self, around: Around | None = None, *, shared: bool = False, dropout: float = 0.0, rank: int = 0
    ) -> None:
        super().__init__()
        self.around = around or (lambda block, x: block(x))
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        block = Block(dropout, rank)
        self.blocks = nn.ModuleList([block, block if shared else Block(dropout, rank)])
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, False)
        self.head.weight = self.wte.weight
        for name, p in self.named_parameters():
            p.requires_grad_(not rank or "adapter" in name)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = self.around(block, x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)), logits


def keeping(*kept: Any) -> Around:
    """A checkpoint around a block that keeps what these operations compute."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(again, context_fn=partial(create_selective_checkpoint_contexts, policy))


def broken(block: nn.Module, x: Tensor) -> Any:
    """Each block in a graph of its own."""
    torch._dynamo.graph_break()
    return block(x)


again: Any = partial(checkpoint, use_reentrant=False)
aten = torch.ops.aten
PRODUCTS = keeping(aten.mm.default, aten.addmm.default)
ATTENTION = keeping(aten._scaled_dot_product_flash_attention_for_cpu.default)


def hf(name: str, cls: str, freeze: str = "", **config: Any) -> Callable[[Path], nn.Module]:
    """A model of transformers that computes in float64 what it computes in float32, its loss too; `freeze` says the
    parameters that need no gradient, by what their names hold."""

    def build(directory: Path) -> nn.Module:
        made = getattr(exact_module(name, directory), cls)
        model = made(made.config_class(**SMALL | config, attn_implementation="sdpa"))
        model.loss_function = exact(model.loss_function)
        for parameter, p in model.named_parameters():
            p.requires_grad_(not any(part in parameter for part in freeze.split()))
        return model  # type: ignore[no-any-return]

    return build


def exact(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """transformers' loss, but in float64."""
    names = dict(vars(inspect.getmodule(loss)))
    exec(inspect.getsource(loss).replace(".float()", ".double()"), names)
    return names[loss.__name__]  # type: ignore[no-any-return]


def checkpointed_llama(directory: Path) -> nn.Module:
    model = LLAMA(directory)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def tokens(name: str = "input_ids", **more: Any) -> Inputs:
    """Ids and labels, one of them ignored."""
    labels = torch.randint(VOCAB, (2, 7))
    labels[1, 2] = -100
    return {name: torch.randint(VOCAB, (2, 7)), "labels": labels} | more


def embeddings() -> Inputs:
    inputs = ids()
    del inputs["input_ids"]
    return inputs | {"inputs_embeds": torch.randn(2, 7, WIDTH, dtype=torch.float64)}


def pictures() -> Inputs:
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    return {"pixel_values": image, "labels": torch.randint(10, (2,)), "return_dict": False}


def gpt(*args: Any, **kwargs: Any) -> Case:
    return lambda _: NanoGPT(*args, **kwargs), partial(tokens, "ids")


Case = tuple[Callable[[Path], nn.Module], Callable[[], Inputs]]
ids = partial(tokens, use_cache=False, return_dict=False)
LLAMA = hf("llama", "LlamaForCausalLM", num_key_value_heads=2)
FROZEN = hf("llama", "LlamaForCausalLM", "embed layers.0. norm", num_key_value_heads=2)
QWEN = hf("qwen3", "Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8)
GPT2 = hf("gpt2", "GPT2LMHeadModel", n_inner=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
BERT = hf("bert", "BertForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
VIT = hf("vit", "ViTForImageClassification", image_size=16, patch_size=4, num_labels=10)
CASES: dict[str, Case] = {
    "llama": (LLAMA, ids),
    "llama, embeddings as input": (LLAMA, embeddings),
    "llama, first layer and norms frozen": (FROZEN, ids),
    "llama, checkpointed by transformers": (checkpointed_llama, ids),
    "qwen3": (QWEN, ids),
    "gemma2": (hf("gemma2", "Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8), ids),
    "gpt2": (GPT2, ids),
    "bert": (BERT, partial(tokens, return_dict=False)),
    "vit": (VIT, pictures),
    "nanogpt": gpt(),
    "adapters": gpt(rank=4),
    "one block twice": gpt(shared=True),
    "a graph for each block": gpt(broken),
    "dropout": gpt(dropout=0.2),
    "checkpointed": gpt(again),
    "checkpointed, products kept": gpt(PRODUCTS),
    "checkpointed, attention kept": gpt(ATTENTION),
    "checkpointed, dropout": gpt(again, dropout=0.2),
    "memory budget 0.5": gpt(),
    "memory budget 0": gpt(),
}
BUDGET = {"memory budget 0.5": 0.5, "memory budget 0": 0.0}
BY_INDUCTOR = ("llama", "checkpointed, dropout")
"""What Inductor compiles to the end; of the rest its graph is interpreted, in a fifth of the time."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A case's model with all its weights drawn, norms' and biases' too, and two batches."""
    directory = tmp_path_factory.mktemp("exact")

    def make(name: str) -> tuple[nn.Module, list[Inputs]]:
        torch.manual_seed(0)
        build, inputs = CASES[name]
        model = build(directory).double().train()
        for p in model.parameters():
            nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.3)
        return model, [inputs(), inputs()]

    return make


def steps(run: Callable[..., Any], model: nn.Module, batches: list[Inputs]) -> list[Tensor | None]:
    """Loss, logits and gradients of the inputs for each batch, then the parameters' gradients, summed over batches."""
    model.zero_grad()
    out: list[Tensor | None] = []
    torch.manual_seed(5)
    for batch in batches:
        floats = {
            k: v.clone().requires_grad_() for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point()
        }
        loss, logits = run(**batch | floats)
        loss.backward()
        out += [loss.detach(), logits.detach(), *(v.grad for v in floats.values())]
    return out + [p.grad for p in model.parameters()]


def check(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    """Equal to 1e-10 of the largest value; gradients that are 0 but for rounding (a key's bias) to 1e-13 of the largest
    of all."""
    floor = 1e-3 * max(float(w.abs().max()) for w in wanted if w is not None)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype == torch.float64 and mine.shape == theirs.shape
            assert float((mine - theirs).abs().max()) < EXACT * max(float(theirs.abs().max()), floor)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_eagers(name: str, made: Made) -> None:
    model, batches = made(name)
    wanted = [None if w is None else w.clone() for w in steps(model, model, batches)]
    with (
        strict_reference(run=name in BY_INDUCTOR),
        torch._inductor.config.patch(fallback_random=True),
        torch._functorch.config.patch(activation_memory_budget=BUDGET.get(name, 1.0)),
    ):
        REPORTS.clear()
        found = steps(torch.compile(model, backend="coda"), model, batches)
    check(found, wanted)
    assert sum(len(r.sites) for r in REPORTS) == REGIONS[name]


def test_two_backwards_through_one_graph(made: Made) -> None:
    """The second, of another loss, finds what the first has left."""

    def twice(run: Callable[..., Any]) -> list[Tensor | None]:
        model.zero_grad()
        loss, logits = run(**batches[0])
        loss.backward(retain_graph=True)
        logits.square().mean().backward()
        return [loss.detach(), logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    model, batches = made("nanogpt")
    wanted = twice(model)
    with strict_reference(run=False):
        check(twice(torch.compile(model, backend="coda")), wanted)


def test_one_compile_for_all_batches(made: Made) -> None:
    """The rows are a symbol: of the sums over them, and of the mean that the loss is."""
    model, _ = made("nanogpt")
    with strict_reference(run=False):
        REPORTS.clear()
        step = torch.compile(model, backend="coda")
        for size in (3, 2, 5):
            batch = {name: torch.randint(VOCAB, (size, 7)) for name in ("ids", "labels")}
            for x in batch.values():
                torch._dynamo.mark_dynamic(x, 0)
            wanted = [None if w is None else w.clone() for w in steps(model, model, [batch])]
            check(steps(step, model, [batch]), wanted)
    assert [len(r.sites) for r in REPORTS] == [REGIONS["nanogpt, any batch"]]


def traced(name: str, made: Made, **options: Any) -> tuple[int, int]:
    """Bytes that the forward leaves for the backward, and the products of both."""
    graphs: list[fx.GraphModule] = []

    def record(gm: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return interpreted(gm, inputs)

    model, batches = made(name)
    with strict_reference(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(coda_inductor.inductor.compile, "compile_fx_inner", record)
        steps(torch.compile(model, backend="coda", options=options), model, batches[:1])
    (forward, _), nodes = graphs, [n for gm in graphs for n in gm.graph.nodes]
    left = [n.meta["val"] for n in forward.graph.output_node().all_input_nodes if n.op != "placeholder"]
    sized = [v for v in left if all(isinstance(size, int) for size in v.shape)]  # a random state's is unknown
    regions = [parse(n.args[1]) for n in nodes if n.target is REGION]
    plain = sum(n.target in (aten.mm.default, aten.addmm.default) for n in nodes)
    return sum(v.nbytes for v in sized), plain + sum(len(r.products) for r in regions)


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_no_more_is_kept_or_multiplied_than_by_inductor(name: str, made: Made) -> None:
    kept, products = traced(name, made)
    theirs, as_many = traced(name, made, disable="pair,pointwise,statistic")
    assert kept <= theirs and products <= as_many


def test_what_is_checkpointed_is_not_kept(made: Made) -> None:
    kept = {name: traced(name, made)[0] for name in CASES if name == "nanogpt" or name.startswith("checkpointed")}
    assert kept["checkpointed"] < 0.3 * kept["nanogpt"]
    assert kept["checkpointed"] < kept["checkpointed, attention kept"] < 0.4 * kept["nanogpt"]
    assert kept["checkpointed, attention kept"] < kept["checkpointed, products kept"] < kept["nanogpt"]
