"""Losses whose scores' gradient leaves the epilogue of the scores: equal to eager, which are read, and which not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import strict_reference
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render
from coda_inductor.inductor import joint
from coda_inductor.loss import written as stage
from coda_inductor.patterns.effects import Effects

B, T, WIDTH, VOCABULARY = 2, 30, 16, 200
STRICT = REFERENCE | {"strict": True}
Done = list[tuple[int, list[str]]]
Loss = Callable[[Tensor, Tensor], object]

pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """Of each graph, how many losses were rewritten, and why others were not."""
    found: Done = []
    write = stage.write_losses

    def written(graph: fx.Graph, target: str, whole: frozenset[str], before: Effects) -> object:
        made, left = write(graph, target, whole, before)
        found.append((len(made), [*left.values()]))
        return made, left

    monkeypatch.setattr(joint, "write_losses", written)
    return found


class Head(nn.Module):
    """A product, a norm, and a head, whose loss a function takes of scores [B, T, V] and targets [B, T]."""

    def __init__(self, loss: Loss, spread: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.gain, self.loss = nn.Parameter(torch.rand(WIDTH) + 0.5), loss
        with torch.no_grad():
            self.head.weight *= spread

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.loss(self.head(F.rms_norm(x + self.product(x), (WIDTH,), self.gain)), y)


def wide(z: Tensor) -> Tensor:
    return z if z.dtype == torch.float64 else z.float()


def entropy(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(wide(z).flatten(0, 1), y.flatten(), **options)  # type: ignore[arg-type]


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    return -(torch.log_softmax(z, -1).gather(-1, y[..., None]).squeeze(-1) * (y > 5)).sum() / 7


def of_logsumexp(z: Tensor, y: Tensor) -> Tensor:
    return (torch.logsumexp(z, -1) - z.gather(-1, y[..., None])[..., 0]).mean()


def weighted(z: Tensor, y: Tensor) -> Tensor:
    each = entropy(z, y, reduction="none").view(y.shape)
    return (each * torch.linspace(0.5, 1.5, y.shape[1], dtype=each.dtype)).mean()


def focal(z: Tensor, y: Tensor) -> Tensor:
    each = entropy(z, y, reduction="none")
    return (each * torch.exp(-each).detach()).mean()


def several(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    each = entropy(z, y, reduction="none")
    return each.mean(), each.detach().exp()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, F.pad(y, (0, 1), value=-100)[:, 1:].contiguous())


def with_z(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y) + 1e-2 * torch.logsumexp(wide(z), -1).square().mean()


def with_z_of_some(z: Tensor, y: Tensor) -> Tensor:
    """The targets are ignored in other rows than the z-loss."""
    square = torch.logsumexp(wide(z), -1).square() * (y % 2)
    return entropy(z, y.where(y % 3 != 0, -100)) + 1e-2 * square.sum() / y.numel()


def with_z_at_once(z: Tensor, y: Tensor) -> Tensor:
    normaliser = torch.logsumexp(z, -1)
    return (normaliser - z.gather(-1, y[..., None])[..., 0]).mean() + 1e-2 * normaliser.square().mean()


def replaced(z: Tensor, y: Tensor) -> Tensor:
    """The z-loss has a gradient that does not depend on the loss's."""
    normaliser = torch.logsumexp(z, -1)
    normaliser.register_hook(lambda d: torch.full_like(d, 0.01))
    return entropy(z, y) + normaliser.square().mean()


def of_each(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y, reduction="none") + 1e-2 * torch.logsumexp(z, -1).flatten().square()


def smoothed_by_hand(z: Tensor, y: Tensor) -> Tensor:
    logs = torch.log_softmax(z, -1)
    return -(0.9 * logs.gather(-1, y[..., None])[..., 0] + 0.1 * logs.mean(-1)).mean()


def z_apart(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return entropy(z, y), torch.logsumexp(z, -1).square().mean()


def right(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return entropy(z, y), (z.argmax(-1) == y).double().mean()


def two_targets(z: Tensor, y: Tensor) -> Tensor:
    return entropy(z, y) + entropy(z, y.flip(0))


READ: dict[str, Loss] = {
    "mean": entropy,
    "sum": lambda z, y: entropy(z, y, reduction="sum") / 11,
    "ignored": lambda z, y: entropy(z, y.where(y % 3 != 0, -100)),
    "all ignored": lambda z, y: entropy(z, y.where(y < 0, -100), reduction="sum"),
    "capped": lambda z, y: entropy(15 * torch.tanh(z / 15), y),
    "sigmoid": lambda z, y: entropy(23 * torch.sigmoid((z + 5) / 7.5), y),
    "by hand": by_hand,
    "logsumexp": of_logsumexp,
    "likelihood": lambda z, y: F.nll_loss(F.log_softmax(z.flatten(0, 1), -1), y.flatten()),
    "weighted tokens": weighted,
    "focal": focal,
    "returned losses": several,
    "shifted labels": shifted,
    "times a number": lambda z, y: 0.3 * entropy(z / 0.7, y),
    "next tokens": lambda z, y: entropy(z[:, :-1], y[:, 1:]),
    "next tokens of some": lambda z, y: entropy(z[1:, 3:-1].contiguous(), y[1:, 4:]),
    "negated scores": lambda z, y: entropy(z * -2.0, y),
    "smoothed": lambda z, y: entropy(z, y, label_smoothing=0.1),
    "smoothed and ignored": lambda z, y: entropy(z, y.where(y % 3 != 0, -100), label_smoothing=0.1),
    "smoothed multiple": lambda z, y: entropy(z * 0.3, y, label_smoothing=0.2),
    "smoothed tokens": lambda z, y: (entropy(z, y, label_smoothing=0.1, reduction="none") * (y.flatten() % 4)).sum(),
    "smoothed by hand": smoothed_by_hand,
    "smoothed much": lambda z, y: entropy(z, y, label_smoothing=0.7),
    "z-loss": with_z,
    "z-loss of some": with_z_of_some,
    "z-loss of one logsumexp": with_z_at_once,
    "capped z-loss": lambda z, y: with_z(15 * torch.tanh(z / 15), y),
    "smoothed z-loss": lambda z, y: with_z(z, y) + entropy(z, y, label_smoothing=0.1),
    "the target alone": lambda z, y: entropy(z, y) - torch.logsumexp(wide(z), -1).mean(),
}
LEFT: dict[str, Loss] = {
    "capped and smoothed": lambda z, y: entropy(15 * torch.tanh(z / 15), y, label_smoothing=0.1),
    "a z-loss of its own": z_apart,
    "a replaced gradient": replaced,
    "a z-loss of other scores": lambda z, y: entropy(z, y) + 1e-2 * torch.logsumexp(2 * z, -1).square().mean(),
    "a z-loss for each token": of_each,
    "distilled": lambda z, y: F.kl_div(torch.log_softmax(z, -1), torch.full_like(z, 1 / VOCABULARY)),
    "returned scores": lambda z, y: (entropy(z, y), z),
    "how many are right": right,
    "two targets": two_targets,
    "weighted features": lambda z, y: entropy(z, y, weight=torch.linspace(0.5, 1.5, VOCABULARY, dtype=z.dtype)),
    "unbounded": lambda z, y: entropy(z.abs(), y),
    "tokens by steps": lambda z, y: entropy(z[:, ::2], y[:, 1::2]),
    "probabilities": lambda z, y: (1 - torch.softmax(z, -1).gather(-1, y[..., None])).mean(),
    "a norm of scores": lambda z, y: entropy(z - z.mean(-1, keepdim=True), y),
}


def run(model: nn.Module, x: Tensor, y: Tensor, compiled: bool, **options: object) -> list[Tensor]:
    """The results, and the gradients of x and of all parameters."""
    torch._dynamo.reset()
    x = x.detach().clone().requires_grad_()
    call = torch.compile(model, backend="coda", dynamic=False, options=STRICT | options) if compiled else model
    found = call(x, y.clone())
    results = found if isinstance(found, tuple) else (found,)
    wanted = [r for r in results if r.requires_grad]
    given = [torch.linspace(0.7, 1.3, r.numel(), dtype=r.dtype).view(r.shape) for r in wanted]
    return [*results, *torch.autograd.grad(wanted, [x, *model.parameters()], given, materialize_grads=True)]


def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed + 1)
    return torch.randn(B, T, WIDTH, dtype=dtype), torch.randint(0, VOCABULARY, (B, T))


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(a.detach(), b.detach(), 1e-10, 1e-10, equal_nan=True) for a, b in pairs)


BY_INDUCTOR = ("mean", "capped", "logsumexp", "ignored", "returned losses", "smoothed", "z-loss")


@pytest.mark.parametrize("chunk", (0, 16), ids=("whole", "blocks"))
@pytest.mark.parametrize("name", READ)
def test_equals_eager(done: Done, name: str, chunk: int) -> None:
    """Outputs and all gradients in float64; whole, and by blocks of rows."""
    model, (x, y) = Head(READ[name]).double(), drawn(torch.float64)
    wanted = run(model, x, y, False)
    with strict_reference(run=name in BY_INDUCTOR and not chunk):
        assert equal(run(model, x, y, True, chunk=chunk or 1000), wanted)
    assert done[-1] == (1, [])


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(done: Done, name: str) -> None:
    model, (x, y) = Head(LEFT[name]).double(), drawn(torch.float64)
    wanted = run(model, x, y, False)
    with strict_reference(run=False):
        assert equal(run(model, x, y, True), wanted)
    assert not any(made for made, _ in done)


@pytest.mark.parametrize("chunk", (0, 16), ids=("whole", "blocks"))
@pytest.mark.parametrize("spread", (1.0, 60.0))
@pytest.mark.parametrize("name", ("mean", "ignored", "capped", "times a number", "smoothed multiple"))
def test_head_with_a_bias(done: Done, name: str, spread: float, chunk: int) -> None:
    model, (x, y) = Head(READ[name], spread, bias=True).double(), drawn(torch.float64)
    wanted = run(model, x, y, False)
    with strict_reference(run=spread == 1.0 and not chunk):
        assert equal(run(model, x, y, True, chunk=chunk or 1000), wanted)
    assert done[-1] == (1, [])


@pytest.mark.parametrize("name", ("mean", "capped", "logsumexp", "z-loss", "the target alone"))
def test_a_class_that_a_bias_hides(name: str) -> None:
    """A bias of -inf makes a score of which nothing has a gradient, be the head rewritten or left as it came."""
    model, (x, y) = Head(READ[name], bias=True).double(), drawn(torch.float64)
    with torch.no_grad():
        model.head.bias[0] = -torch.inf
    wanted = run(model, x, y.clamp(min=1), False)
    with strict_reference(run=False):
        assert equal(run(model, x, y.clamp(min=1), True), wanted)
    assert all(t.isfinite().all() for t in wanted)


def test_a_logsumexp_of_biased_scores_stays(done: Done) -> None:
    """It is made of the target's score, and a bias may make that of an ignored target infinite."""
    model, (x, y) = Head(with_z_of_some, bias=True).double(), drawn(torch.float64)
    wanted = run(model, x, y, False)
    with strict_reference(run=False):
        assert equal(run(model, x, y, True), wanted)
    assert done == [(0, ["its logsumexp is read, of scores with a bias"])]


def test_narrowed_scores_stay(done: Done) -> None:
    """An epilogue would compute in the product's float64."""
    with strict_reference(run=False):
        run(Head(lambda z, y: entropy(z.float(), y)).double(), *drawn(torch.float64), True)
    assert done == [(0, ["its softmax is of other numbers than the epilogue's"])]


@pytest.mark.parametrize("name", ("mean", "z-loss", "smoothed"))
@pytest.mark.parametrize("chunk", (0, 16), ids=("whole", "blocks"))
def test_rows_of_a_great_loss(done: Done, chunk: int, name: str) -> None:
    """Their exponentials relative to the target's would be too great: they are computed again. Others are not."""
    model, (x, y) = Head(READ[name], spread=60.0).double(), drawn(torch.float64)
    with torch.no_grad():
        scores = model.head(F.rms_norm(x + model.product(x), (WIDTH,), model.gain)).flatten(0, 1)
        far = F.cross_entropy(scores, y.flatten(), reduction="none") > 64
    assert far.any() and not far.all()
    wanted = run(model, x, y, False)
    with strict_reference(run=False):
        assert equal(run(model, x, y, True, chunk=chunk or 1000), wanted)
    assert done[-1] == (1, [])


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf"), 1e300))
def test_rows_without_a_loss(done: Done, value: float) -> None:
    """What is no number in eager is none here, and in no other row."""
    model, (x, y) = Head(lambda z, y: entropy(z, y, reduction="none")).double(), drawn(torch.float64)
    with torch.no_grad():
        model.head.weight[int(y[0, 0]), 3] = value
        model.head.weight[7, 2] = value
    x = x.clone()
    wanted = run(model, x, y, False)
    with strict_reference(run=False):
        found = run(model, x, y, True)
    assert done[-1] == (1, []) and torch.equal(found[0].isnan(), wanted[0].isnan())
    finite = wanted[0].isfinite()
    assert torch.allclose(found[0][finite], wanted[0][finite], 1e-10, 1e-10)
    assert all(torch.equal(a.isfinite(), b.isfinite()) for a, b in zip(found[1:2], wanted[1:2], strict=True))


@pytest.mark.parametrize("options", ({"disable": "loss"}, {"disable": "softmax"}, {"numerics": "strict"}), ids=str)
def test_switched_off(done: Done, options: dict[str, Any]) -> None:
    with strict_reference(run=False):
        run(Head(entropy).double(), *drawn(torch.float64), True, **options)
    assert not any(made for made, _ in done)


def test_without_its_region_the_loss_stays(done: Done) -> None:
    """A pass that stored E by itself would read and write as much as the one that it spares."""
    model, (x, y) = Head(entropy).double(), drawn(torch.float64)
    wanted = run(model, x, y, False)
    with strict_reference(run=False):
        assert equal(run(model, x, y, True, disable="statistic"), wanted)
    assert [made for made, _ in done] == [1, 0]


def test_nothing_is_copied() -> None:
    """E is written by the Region, and read by both products, in one memory."""
    model, (x, y) = Head(entropy).double(), drawn(torch.float64)
    with strict_reference():
        call = torch.compile(model, backend="coda", dynamic=False, options=STRICT)
        _, codes = run_and_get_code(lambda: call(x.requires_grad_(), y).backward())
    assert sum(code.count("coda.loss_rows_.default(") for code in codes) == 1
    large = f"empty_strided_cpu(({B * T}, {VOCABULARY})"
    assert not any(large in code for code in codes)


@pytest.mark.parametrize("name", ("mean", "z-loss of some", "smoothed much"))
def test_in_bfloat16_nearly_as_near_as_eager(done: Done, name: str) -> None:
    """Of x and of the weight's other operand the factor of a row is rounded once more."""
    total = dict.fromkeys(("ours", "eager"), torch.zeros(5))
    for seed in range(12):
        model, (x, y) = Head(READ[name]).double(), drawn(torch.float64, seed)
        exact = run(model, x, y, False)
        model, x = model.bfloat16(), x.bfloat16()
        with strict_reference(run=False):
            found = {"ours": run(model, x, y, True), "eager": run(model, x, y, False)}
        for who, results in found.items():
            pairs = zip(results, exact, strict=True)
            total[who] = total[who] + torch.stack([(a - b).detach().norm() / b.detach().norm() for a, b in pairs])
    assert all(made for made, _ in done) and bool((total["ours"] <= 1.3 * total["eager"]).all())


def test_a_layers_rows_stay() -> None:
    """A layer whose last rows nobody reads keeps its Regions."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

        def forward(self, x: Tensor) -> object:
            return self.down(F.silu(self.up(x)))[:, :-1].float().square().sum()

    with torch.device("meta"):
        model, x = Layer().bfloat16(), torch.empty(2, 512, 512).bfloat16().requires_grad_()
    found = [
        [r["digest"] for graph in explain(model, (x,), {}, "train", settings)["graphs"] for r in graph["regions"]]
        for settings in (Settings(target="sm_90a"), Settings(target="sm_90a", disable=frozenset({"loss"})))
    ]
    assert found[0] == found[1] and found[0]


def test_explain_says_so() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(512, 8192, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> object:
            return entropy(self.head(x), y)

    with torch.device("meta"):
        model, x, y = Large().bfloat16(), torch.empty(2, 512, 512), torch.empty(2, 512, dtype=torch.int64)
    facts = explain(model, (x.bfloat16().requires_grad_(), y), {}, "train", Settings(target="sm_90a"))
    text = render(facts)
    assert f"1 tensor [1024, 8192] {stage.WHAT}" in text and "[1024, 8192] K=512: 1 store, 1 sum" in text
    assert facts["totals"]["saved_bytes"] <= 1.02 * facts["totals"]["saved_bytes_inductor"]
    facts = explain(
        model, (x.bfloat16().requires_grad_(), y), {}, "train", Settings(target="sm_90a", disable=frozenset({"loss"}))
    )
    assert stage.WHAT not in render(facts)
