"""Heads and losses by blocks of rows: equal to the whole, in which of the two ways, and what stays whole and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import captured, strict_reference
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain, render
from coda_inductor.inductor import joint
from coda_inductor.passes import blocks
from coda_inductor.write import linear
from coda_inductor.write.verifying import Before

B, T, WIDTH, VOCABULARY = 3, 100, 16, 200
STRICT = REFERENCE | {"strict": True, "chunk": 75}
SMALL = Settings(target="sm_90a", chunk=75)
Done = list[tuple[tuple[blocks.Blocks, ...], list[str]]]

pytestmark = pytest.mark.usefixtures("uncached")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Done:
    """What each graph had written in blocks, and the reasons of what stays whole; also small scores are."""
    found: Done = []
    write = blocks.write_blocks

    def written(graph: fx.Graph, chunk: int, before: Before) -> object:
        made, left = write(graph, chunk, before)
        found.append((made, [*left.values()]))
        return made, left

    monkeypatch.setattr(joint, "write_blocks", written)
    return found


class Head(nn.Module):
    """A product, a norm, and a head, whose loss a function takes of scores [B, T, V] and targets [B, T]."""

    def __init__(self, loss: Callable[[Tensor, Tensor], object], bias: bool = False, learned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.gain, self.loss = nn.Parameter(torch.rand(WIDTH) + 0.5), loss
        self.temperature = nn.Parameter(torch.tensor(1.5)) if learned else None

    def forward(self, x: Tensor, y: Tensor) -> object:
        hidden = F.rms_norm(x + self.product(x), (WIDTH,), self.gain)
        scores = self.head(hidden)
        return self.loss(scores if self.temperature is None else scores * self.temperature, y)


def entropy(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(z.float() if z.dtype != torch.float64 else z, y, **options)  # type: ignore[arg-type]


def flat(z: Tensor, y: Tensor, **options: object) -> Tensor:
    return entropy(z.flatten(0, 1), y.flatten(), **options)


def capped(z: Tensor, y: Tensor) -> Tensor:
    return flat(15 * torch.tanh(z / 15), y, ignore_index=-1)


def with_z(z: Tensor, y: Tensor) -> Tensor:
    return flat(z, y) + 1e-2 * torch.logsumexp(z, -1).square().mean()


def by_hand(z: Tensor, y: Tensor) -> Tensor:
    return -(torch.log_softmax(z, -1).gather(-1, y[..., None]).squeeze(-1) * (y > 5)).sum() / 7


def weighted(z: Tensor, y: Tensor) -> Tensor:
    each = flat(z, y, reduction="none").view(y.shape)
    return (each * torch.linspace(0.5, 1.5, y.shape[1], dtype=each.dtype)).mean()


def shifted(z: Tensor, y: Tensor) -> Tensor:
    return flat(z, F.pad(y, (0, 1), value=-100)[:, 1:])


POSITIONS = torch.linspace(-1, 1, T * VOCABULARY).view(T, VOCABULARY)


def without_gradient(z: Tensor) -> Tensor:
    with torch.no_grad():
        return z.mean((0, 1))


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        z = z * 1.0
        z.register_hook(hook)
        return flat(z, y)

    return loss


EARLY = {
    "mean": flat,
    "sum": lambda z, y: flat(z, y, reduction="sum") / 11,
    "smoothed": lambda z, y: flat(z, y, label_smoothing=0.1),
    "ignored": lambda z, y: flat(z, y.where(y % 3 != 0, -100)),
    "capped": capped,
    "z-loss": with_z,
    "by hand": by_hand,
    "weighted tokens": weighted,
    "shifted labels": shifted,
    "times a number": lambda z, y: 0.3 * flat(z / 0.7, y),
    "distilled": lambda z, y: F.kl_div(torch.log_softmax(z, -1), torch.full_like(z, 1 / VOCABULARY)),
}
LATE = {
    "a mean of no gradient": lambda z, y: flat(z - without_gradient(z), y),
    "a gradient's signs": hooked(lambda d: d.bool().to(d.dtype)),
    "whole numbers of a gradient": hooked(lambda d: (d * 1e6).int().to(d.dtype)),
    "returned": lambda z, y: (flat(z, y), z),
    "a loss for each sequence": lambda z, y: flat(z, y, reduction="none").view(y.shape).mean(1),
}
WHOLE = {
    "a layer norm of scores": lambda z, y: flat(F.layer_norm(z, (VOCABULARY,)), y),
    "features between the rows": lambda z, y: entropy(z.transpose(1, 2), y),
    "a norm over the tokens": lambda z, y: flat(z - z.mean((0, 1)), y),
    "the largest of all": lambda z, y: flat(z - z.amax().detach(), y),
    "neighbours": lambda z, y: flat(z[:, 1:] + 0.5 * z[:, :-1], y[:, 1:]),
}
PROGRAMS = EARLY | LATE | WHOLE


def run(model: nn.Module, x: Tensor, y: Tensor, compiled: bool, **options: object) -> list[Tensor]:
    """The results, and the gradients of x and of all parameters."""
    torch._dynamo.reset()
    x = x.clone().requires_grad_(x.requires_grad)
    call = torch.compile(model, backend="coda", dynamic=False, options=STRICT | options) if compiled else model
    found = call(x, y.clone())
    results = found if isinstance(found, tuple) else (found,)
    given = [torch.linspace(0.7, 1.3, r.numel(), dtype=r.dtype).view(r.shape) for r in results]
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [*results, *torch.autograd.grad(results, wanted, given, materialize_grads=True)]


def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed + 1)
    return torch.randn(B, T, WIDTH, dtype=dtype, requires_grad=True), torch.randint(0, VOCABULARY, (B, T))


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(float((a - b).detach().abs().max()) <= 1e-10 * max(1.0, float(b.detach().abs().max())) for a, b in pairs)


BY_INDUCTOR = {("mean", "bias"), ("capped", ""), ("returned", ""), ("smoothed", "learned")}


@pytest.mark.sampled
@pytest.mark.parametrize("more", ("", "bias", "learned"))
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_the_whole(done: Done, name: str, more: str) -> None:
    """Outputs and all gradients in float64; and how each was written."""
    model, (x, y) = Head(PROGRAMS[name], more == "bias", more == "learned").double(), drawn(torch.float64)
    wanted = run(model, x, y, False)
    with strict_reference(run=(name, more) in BY_INDUCTOR):
        assert equal(run(model, x, y, True), wanted)
    ((made, left),) = done
    if name in WHOLE:
        assert not made and len(left) == 1
        return
    assert len(made) == 1, left
    (block,) = made
    assert block.count == 4 and not left
    assert bool(block.whole) == (name in LATE)


@pytest.mark.parametrize("frozen", ("head.weight", "x", "product.weight"))
def test_what_needs_no_gradient(done: Done, frozen: str) -> None:
    """Of a frozen head there is no sum over the blocks."""
    model, (x, y) = Head(flat).double(), drawn(torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    x.requires_grad_(frozen != "x")
    wanted = run(model, x, y, False) if x.requires_grad else None
    with strict_reference(run=False):
        found = run(model, x, y, True) if x.requires_grad else None
    if wanted is not None and found is not None:
        assert equal(found, wanted) and len(done[0][0]) == 1


def test_float16_is_multiplied_first(done: Done) -> None:
    """Its small gradients vanish but for the factor that the loss is scaled with: the scores stay whole."""
    with strict_reference(run=False):
        run(Head(flat).half(), *drawn(torch.float16), True)
    ((made, _),) = done
    assert "float16" in made[0].whole


@pytest.mark.parametrize("options", ({"disable": "blocks"}, {"numerics": "strict"}, {"chunk": 1000}))
def test_switched_off(done: Done, options: dict[str, Any]) -> None:
    with strict_reference(run=False):
        run(Head(flat).double(), *drawn(torch.float64), True, **options)
    assert not any(made for made, _ in done)


def test_half_as_large_as_the_scores(done: Done) -> None:
    """What every second row reads is an input, however large."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return flat(z + POSITIONS.to(z.dtype).tanh(), y)

    model, (x, y) = Head(loss).double(), (t[:2] for t in drawn(torch.float64))
    wanted = run(model, x, y, False)
    with strict_reference(run=False):
        assert equal(run(model, x, y, True, chunk=50), wanted)
    assert len(done[0][0]) == 1


def test_weight_beside_its_transpose(done: Done) -> None:
    """A weight [width, vocabulary], as Conv1D has it."""
    model, (x, y) = Head(flat).double(), drawn(torch.float64)
    weight = nn.Parameter(model.head.weight.detach().t().contiguous())

    def loss(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return flat(x @ w, y)

    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        return [*torch.autograd.grad(call(x, y, weight), (x, weight))]

    wanted = gradients(loss)
    with strict_reference(run=False):
        found = gradients(torch.compile(loss, backend="coda", dynamic=False, options=STRICT))
    assert equal(found, wanted) and len(done[0][0]) == 1


def test_dynamic_sizes_stay_whole(done: Done) -> None:
    model, (x, y) = Head(flat).double(), drawn(torch.float64)
    torch._dynamo.reset()
    with strict_reference(run=False):
        call = torch.compile(model, backend="coda", dynamic=True, options=STRICT)
        call(x, y).backward()
    assert not any(made for made, _ in done)


def test_in_bfloat16_as_near_as_eager(done: Done) -> None:
    """Gradients beside float64's, over some inputs; the loss's own gradient is no power of two."""
    total = dict.fromkeys(("blocks", "eager"), torch.zeros(5))
    for seed in range(4):
        model, (x, y) = Head(flat).double(), drawn(torch.float64, seed)
        exact = run(model, x, y, False)
        model, x = model.bfloat16(), x.detach().bfloat16().requires_grad_()
        with strict_reference(run=False):
            found = {"blocks": run(model, x, y, True), "eager": run(model, x, y, False)}
        for name, results in found.items():
            pairs = zip(results, exact, strict=True)
            total[name] = total[name] + torch.stack([(a - b).detach().norm() / b.detach().norm() for a, b in pairs])
    assert all(made for made, _ in done) and bool((total["blocks"] <= 1.2 * total["eager"]).all())


def test_explain_says_so() -> None:
    facts = explain(Head(flat).bfloat16(), tuple(t.detach() for t in drawn(torch.bfloat16)), {}, "train", SMALL)
    assert "scores [300, 200] and their gradient in 4 blocks of rows" in render(facts)
    returned = Head(LATE["returned"]).bfloat16()
    facts = explain(returned, tuple(t.detach() for t in drawn(torch.bfloat16)), {}, "train", SMALL)
    assert "gradient [3, 100, 200] in 4 blocks of rows (the scores stay whole:" in render(facts)


DEGREES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int | None]] = {
    "product": (lambda t, x: t * x, 1),
    "quotient": (lambda t, x: t / x, 1),
    "choice": (lambda t, x: torch.where(x > 0, t * x, 0.0), 1),
    "a sum of both": (lambda t, x: t * x + 3 * t, 1),
    "nothing of it": (lambda t, x: x.exp(), 0),
    "times zero": (lambda t, x: t * x + torch.zeros_like(x), 1),
    "a sum over rows": (lambda t, x: (t * x).sum(1), 1),
    "a mean": (lambda t, x: (t * x).mean(), 1),
    "a square": (lambda t, x: t * t * x, None),
    "in the denominator": (lambda t, x: x / t, None),
    "a function of it": (lambda t, x: (t * x).exp(), None),
    "more than it": (lambda t, x: t * x + x, None),
    "plus one": (lambda t, x: t * x + 1, None),
    "chosen by it": (lambda t, x: torch.where(t * x > 0, x, -x), None),
    "the larger": (lambda t, x: torch.maximum(t * x, x), None),
    "the largest": (lambda t, x: (t * x).amax(1), None),
    "instead of one": (lambda t, x: torch.where(x > 0, t * x, 1.0), None),
}


@pytest.mark.parametrize("name", DEGREES)
def test_degrees(name: str) -> None:
    """What is called proportional is; what is not, is refused."""
    f, wanted = DEGREES[name]
    t, x = torch.tensor(2.0, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    (graph,) = captured(f, t, x)
    numbers = (n for n in graph.graph.nodes if n.op == "placeholder" and not n.meta["val"].dim())
    found: dict[fx.Node, linear.Degree | tuple[linear.Degree, ...]] = dict.fromkeys(numbers, 1)

    def walk() -> object:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                found[node] = linear.degree(node, found)
        (result,) = graph.graph.output_node().all_input_nodes
        return found[result]

    if wanted is None:
        with pytest.raises(linear.NotLinear):
            walk()
        for d in (0, 1):
            assert any(not torch.allclose(f(c * t, x), c**d * f(t, x)) for c in (3, -1))
    else:
        assert walk() == wanted and all(torch.allclose(f(c * t, x), c**wanted * f(t, x)) for c in (3, -1))


def capped_head(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(5 * torch.tanh(x @ w / 5), y, ignore_index=-1)


def passes(codes: list[str]) -> tuple[int, int]:
    """How many have memory of their own, and how many write over what they read."""
    names = "elementwise", "elementwise_over_"
    own, over = (sum(code.count(f"ops.coda.{name}.default(") for code in codes) for name in names)
    return own, over


@pytest.mark.parametrize(("disable", "sums", "gradients"), [("", 0, 3), ("statistic", 3, 3), ("elementwise", 0, 0)])
def test_gradients_in_blocks_are_written_over_the_scores(disable: str, sums: int, gradients: int) -> None:
    """Where no epilogue takes the sums of a softmax, they are a pass too, which reads the scores before."""
    torch.manual_seed(0)
    y = torch.randint(0, 40, (96,)).index_fill(0, torch.tensor([3, 50]), -1)
    x, w = torch.randn(96, 4).requires_grad_(), torch.randn(4, 40).requires_grad_()
    options = REFERENCE | {"strict": True, "chunk": 32, "disable": disable}
    wanted = torch.autograd.grad(capped_head(x, w, y), (x, w))
    compiled = torch.compile(capped_head, backend="coda", options=options)
    found, codes = run_and_get_code(lambda: torch.autograd.grad(compiled(x, w, y), (x, w)))
    torch.testing.assert_close(found, wanted)
    assert passes(codes) == (sums, gradients)


def test_a_gradient_that_a_loop_reads_too_is_made_in_that_loop() -> None:
    """A norm before the head reads the sum of scores times their gradient, of each row."""

    def model(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return capped_head(F.rms_norm(x, (4,)), w, y)

    torch.manual_seed(0)
    x, w = torch.randn(96, 4).requires_grad_(), torch.randn(4, 40).requires_grad_()
    y, options = torch.randint(0, 40, (96,)), REFERENCE | {"strict": True, "chunk": 32}
    wanted = torch.autograd.grad(model(x, w, y), (x, w))
    compiled = torch.compile(model, backend="coda", options=options)
    found, codes = run_and_get_code(lambda: torch.autograd.grad(compiled(x, w, y), (x, w)))
    torch.testing.assert_close(found, wanted)
    assert passes(codes) == (0, 0)


Returned = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def returned(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ w
    return F.cross_entropy(scores.float(), y), scores


def detached(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss, scores = returned(x, w, y)
    return loss, scores.detach()


@pytest.mark.parametrize(
    ("model", "chunk", "dtype", "count"),
    [(detached, 32, torch.float32, 3), (detached, 96, torch.float32, 0), (returned, 32, torch.bfloat16, 0)],
)
def test_gradients_of_scores_that_are_returned(model: Returned, chunk: int, dtype: torch.dtype, count: int) -> None:
    """In blocks they have memory of their own. Whole they stay with Inductor, and so does what is added to another."""
    torch.manual_seed(0)
    x, w = (torch.randn(*sizes).to(dtype).requires_grad_() for sizes in ((96, 4), (4, 40)))
    y, options = torch.randint(0, 40, (96,)), REFERENCE | {"strict": True, "chunk": chunk}
    compiled = torch.compile(model, backend="coda", options=options)
    wanted = torch.autograd.grad(model(x, w, y)[0], (x, w))

    def called() -> tuple[Tensor, tuple[Tensor, ...]]:
        loss, scores = compiled(x, w, y)
        return scores, torch.autograd.grad(loss, (x, w))

    (scores, found), codes = run_and_get_code(called)
    torch.testing.assert_close((scores, found), (x @ w, wanted), check_dtype=False)
    assert passes(codes) == (count, 0)
