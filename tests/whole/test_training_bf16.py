"""Training in bfloat16 on the reference target: gradients are about as exact as eager's, and a small model learns as it
does by eager, as nearly as with Inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from evaluate import strict_reference
from torch import Tensor, nn
from trained_layers import MODELS as LAYERS
from trained_layers import WIDTH, errors
from trained_layers import gradients as every_gradient
from zoo import rotate

from coda_inductor.inductor.joint_pass import REPORTS

VOCAB, HEADS, TOKENS = 64, 4, 64
ENDS = (slice(50), slice(-50, None))
NAMES = ("llama", "gpt")
# The one place to change when more is derived.
REGIONS = {"llama": 14, "gpt": 14, "llama, autocast": 15, "gpt, autocast": 15}


class Rms(nn.Module):
    """RMSNorm as transformers writes it: in float32 (or wider), rounded before the gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    """A layer of Llama (RMSNorm, rotary embedding, SwiGLU) or of GPT-2 (LayerNorm, biases, GELU)."""

    def __init__(self, llama: bool, width: int) -> None:
        super().__init__()
        self.llama = llama
        norm = Rms if llama else nn.LayerNorm
        self.n1, self.n2 = norm(width), norm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, not llama), nn.Linear(width, width, not llama)
        self.up, self.down = nn.Linear(width, 3 * width, not llama), nn.Linear(3 * width, width, not llama)
        self.gate = nn.Linear(width, 3 * width, False) if llama else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in qkv)
        if self.llama:
            q, k = (rotate(y, cos.to(y.dtype), sin.to(y.dtype)) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.o(y)
        n = self.n2(x)
        h = F.gelu(self.up(n), approximate="tanh") if self.gate is None else F.silu(self.gate(n)) * self.up(n)
        return x + self.down(h)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers: ids and labels [B, T] to the mean cross-entropy, taken in float32 (or wider)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        llama = name == "llama"
        angle = torch.arange(TOKENS)[:, None] / 100 ** torch.linspace(0, 1, width // HEADS // 2).repeat(2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.embed, self.place = nn.Embedding(VOCAB, width), None if llama else nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(Layer(llama, width) for _ in range(2))
        self.norm, self.head = (Rms if llama else nn.LayerNorm)(width), nn.Linear(width, VOCAB, False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        t = ids.shape[1]
        x = self.embed(ids)
        x = x if self.place is None else x + self.place.weight[:t]
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def draw(model: nn.Module) -> None:
    """Weights as a model has them some way into training: gains about 1, small biases, products that keep the scale."""
    for name, p in model.named_parameters():
        scale = 0.1 if p.dim() == 1 else 1.0 if name.startswith(("embed", "place")) else p.shape[1] ** -0.5
        nn.init.normal_(p, 1.0 if p.dim() == 1 and name.endswith("weight") else 0.0, scale)


def gradients(run: Callable[..., Tensor], model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    run(*batch).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def off(found: Tensor, wanted: Tensor) -> float:
    """Relative, Frobenius."""
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_about_as_exact_as_eagers(name: str) -> None:
    """Over three seeds, against float64 with the same weights. Eager rounds after each operation, so ours are smaller:
    0.2 to 0.9 of eager's for each parameter."""
    model, exact = Model(name, 96).bfloat16(), Model(name, 96).double()
    errors: dict[str, list[tuple[float, float]]] = {}
    with strict_reference(run=False):
        REPORTS.clear()
        step = torch.compile(model, backend="coda")
        for seed in range(3):
            torch.manual_seed(seed)
            draw(model)
            exact.load_state_dict(model.state_dict())
            batch = [torch.randint(VOCAB, (2, TOKENS)) for _ in range(2)]
            wanted = gradients(exact, exact, *batch)
            theirs, ours = gradients(model, model, *batch), gradients(step, model, *batch)
            for p, w in wanted.items():
                errors.setdefault(p, []).append((off(ours[p], w), off(theirs[p], w)))
    assert [len(r.sites) for r in REPORTS] == [REGIONS[name]]
    ratios = {p: sum(mine for mine, _ in e) / sum(eagers for _, eagers in e) for p, e in errors.items()}
    assert len(ratios) == len(list(model.parameters())) and max(ratios.values()) <= 1.5
    assert sum(ratios.values()) / len(ratios) <= 1.1


@pytest.mark.sampled
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_under_autocast_are_about_as_exact_as_eagers(name: str) -> None:
    """The output and all gradients of float32 weights, against float64: autocast keeps the streams in float32, also
    those of gradients, and so must we. (Of a BERT's, read in bfloat16, one was 1.6 times as far off.)"""
    torch.manual_seed(0)
    model = LAYERS[name]()
    x = torch.randn(4, 256, WIDTH, requires_grad=True)
    exact, x64 = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    wanted = every_gradient(exact(x64), exact, x64)

    def found(run: Callable[..., Tensor]) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16):
            out = run(x)
        return errors(every_gradient(out.float(), model, x), wanted)

    with strict_reference(run=False):
        ours = found(torch.compile(model, backend="coda"))
    pairs = list(zip(ours, found(model), strict=True))
    assert len(pairs) >= len(wanted) - 2  # the gradients of the keys' biases are zero but for rounding
    assert max(a / b for a, b in pairs) <= 1.5, pairs


def sequences(seed: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 8 times 33 tokens, as ids and labels: 5 t + 3 follows on t, in one of ten places a random token."""
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randint(VOCAB, (steps, 8, 33), generator=chance)
    odd = torch.rand((steps, 8, 33), generator=chance) < 0.1
    for i in range(1, 33):
        drawn[..., i] = torch.where(odd[..., i], drawn[..., i], (5 * drawn[..., i - 1] + 3) % VOCAB)
    return [(s[:, :-1].contiguous(), s[:, 1:].contiguous()) for s in drawn]


def losses(run: Callable[..., Tensor], model: nn.Module, seed: int = 0) -> Tensor:
    """Of 300 steps of AdamW on float32 weights, with the model in bfloat16 by autocast."""
    torch.manual_seed(seed)
    draw(model)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), []
    for batch in sequences(seed, 300):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return torch.tensor(found)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors as small as these take longer on two threads than on one, and far longer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["llama"])
def test_a_model_learns_as_it_does_by_eager(name: str) -> None:
    """The loss differs from eager's by rounding, as Inductor's does. Task and rate are such that this says something:
    the loss falls from 4.7 to 0.8 (0.73 is the entropy of a token), and the differences do not grow with the
    steps, as they would in chaos: 3e-4 in the first 50, 2e-4 in the last, Inductor's and ours. Over 8 seeds ours are
    1.16 of Inductor's for gpt and 0.88 for llama, and one seed's ratio varies by 0.2."""
    model = Model(name, 64)
    found = {"eager": losses(model, model)}
    for backend in ("inductor", "coda"):
        with strict_reference():
            REPORTS.clear()
            found[backend] = losses(torch.compile(model, backend=backend), model)
    assert [len(r.sites) for r in REPORTS] == [REGIONS[f"{name}, autocast"]]
    first, last = ({k: abs(v[at] - found["eager"][at]).mean() for k, v in found.items()} for at in ENDS)
    assert found["eager"][0] > 4 and found["eager"][-50:].mean() < 1
    assert last["inductor"] < 1.5 * first["inductor"]
    assert 0 < last["coda"] <= 1.5 * last["inductor"]
