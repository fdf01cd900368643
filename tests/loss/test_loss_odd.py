"""Losses that look like cross-entropy and are not, or are in an odd way: every result and gradient is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import REFERENCE
from evaluate import strict_reference
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from coda_inductor.inductor import joint
from coda_inductor.loss import written
from coda_inductor.patterns import graph as g

STRICT = REFERENCE | {"strict": True}
M, K, V = 6, 5, 7
Program = Callable[[Tensor, Tensor, Tensor], Any]

pytestmark = pytest.mark.usefixtures("uncached")


def hot(y: Tensor, t: Tensor) -> Tensor:
    made: Tensor = torch.zeros_like(y).scatter(-1, t, 1.0)
    return made


class Written(torch.autograd.Function):
    """The loss at the targets, with a gradient of one's own: `how(g, softmax, one-hot, targets, scores)`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, t: Tensor, how: Any, normalised: Any) -> Tensor:
        y = normalised(z)
        ctx.how = how
        ctx.save_for_backward(y, t, z)
        loss: Tensor = -y.gather(-1, t)
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        y, t, z = ctx.saved_tensors
        return ctx.how(g, y.exp(), hot(y, t), t, z), None, None, None


def by(
    how: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor], normalised: Any = lambda z: z.log_softmax(-1)
) -> Program:
    def program(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        loss: Tensor = Written.apply(x @ w.T, t[:, None], how, normalised)  # type: ignore[no-untyped-call]
        return loss.sum()

    return program


def hooked(hook: Callable[[Tensor, Tensor], Tensor], spread: float = 1.0) -> Program:
    """Cross-entropy whose scores' gradient a hook changes."""

    def program(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        z = spread * (x @ w.T)
        z.register_hook(lambda g: hook(g, z.detach()))
        return F.cross_entropy(z, t)

    return program


def another_target(x: Tensor, w: Tensor, t: Tensor) -> Any:
    """Equal numbers in another order of the dimensions."""
    a, b = torch.arange(2), torch.arange(3)
    one = ((a[:, None] * 3 + b[None]).reshape(-1) % V)[:, None]
    two = ((a[None] * 3 + b[:, None]).reshape(-1) % V)[:, None]
    y = (x @ w.T).log_softmax(-1)
    return -y.gather(1, one).mean(), y.detach().gather(1, two)


def transposed_target(x: Tensor, w: Tensor, t: Tensor) -> Any:
    y = (x @ w.T).log_softmax(-1).view(3, 2, V)
    one, two = t.view(2, 3).T[..., None], t.view(3, 2)[..., None]
    return -y.gather(-1, one).mean(), y.detach().gather(-1, two)


def another_alpha(x: Tensor, w: Tensor, t: Tensor) -> Any:
    y, one = (x @ w.T).log_softmax(-1), torch.ones_like(t)
    targets = [(torch.add(t, one, alpha=n) % V)[:, None] for n in (2, 3)]
    return -y.gather(-1, targets[0]).mean(), y.detach().gather(-1, targets[1])


def target_of_scores(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    z = x @ w.T
    log = torch.logsumexp(z, -1)
    return (log - z.gather(1, (log > 2.0).long()[:, None])[:, 0]).mean()


def factor_of_another(x: Tensor, w: Tensor, t: Tensor) -> Any:
    y = (x @ w.T).log_softmax(-1).gather(1, t[:, None])
    z = x @ (2 * w).T
    z.register_hook(lambda g: g * y.detach())
    return y.mean(), F.cross_entropy(z, t)


def gradient_in_the_forward(x: Tensor, w: Tensor, t: Tensor) -> Any:
    y = (x @ w.T).log_softmax(-1)
    with torch.no_grad():
        gradient = (y.exp() - hot(y, t[:, None])) @ w
    return -y.gather(1, t[:, None]).mean(), gradient


def views_of_one(x: Tensor, w: Tensor, t: Tensor) -> Any:
    z = x @ w.T
    log = torch.logsumexp(z, -1)
    d = log.detach()
    return (log - z.gather(1, t[:, None])[:, 0]).mean(), d[0], d[None]


def square(z: Tensor) -> Tensor:
    """With as many rows as columns, the logsumexp lies along the columns."""
    return z - torch.logsumexp(z, -1)


def raw_scores(x: Tensor, w: Tensor, t: Tensor) -> Any:
    z, i = x @ w.T, t[:, None]
    return F.cross_entropy(2 * z, t), -(2 * z).log_softmax(-1).gather(1, i), z.detach().gather(1, i)


def beside_capped(x: Tensor, w: Tensor, t: Tensor) -> Any:
    z, i = x @ w.T, t[:, None]
    return -(3 * torch.tanh(z / 3)).log_softmax(-1).gather(1, i).mean(), z.detach().gather(1, i)


class Skewed(torch.autograd.Function):
    """A product whose two gradients are of different tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        z = x @ w.T
        ctx.save_for_backward(x, w, z)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, z = ctx.saved_tensors
        return (g * z) @ w, (2 * g).T @ x


def skewed(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    z: Tensor = Skewed.apply(x, w)  # type: ignore[no-untyped-call]
    return F.cross_entropy(15 * torch.tanh(z / 15), t)


def hook_on_all(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    z = x @ w.T
    z.register_hook(lambda g: g + g.sum(0))
    return F.cross_entropy(z[1:], t[1:])


def padded_times_itself(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    z = x @ w.T
    z.register_hook(lambda g: g @ (g.T @ g))
    return F.cross_entropy(z[1:], t[1:])


def sum_of_columns(x: Tensor, w: Tensor, t: Tensor) -> Any:
    z = x @ w.T
    z.register_hook(lambda g: g.sum(1, keepdim=True).expand(M, V))
    return (z[1:] * w[:, 0]).square().sum()


PROGRAMS: dict[str, Program] = {
    "raw scores at the target": raw_scores,
    "raw scores beside capped ones": beside_capped,
    "times the scores, far": hooked(lambda g, z: g * z, 40.0),
    "times a sigmoid, far": hooked(lambda g, z: g * torch.sigmoid(z), 40.0),
    "times the scores' signs": hooked(lambda g, z: g * z.relu()),
    "plus a constant": hooked(lambda g, z: g + 0.1),
    "half of the one-hot": by(lambda g, p, o, t, z: g * torch.sub(p, o, alpha=0.5)),
    "other factors": by(lambda g, p, o, t, z: g * p - (g + 1) * o),
    "other numbers": by(lambda g, p, o, t, z: g * (2 * p - o)),
    "the softmax twice": by(lambda g, p, o, t, z: g * (p - o) + g * p),
    "only the softmax": by(lambda g, p, o, t, z: g * p),
    "the wrong sign": by(lambda g, p, o, t, z: g * (o - p)),
    "transposed twice": by(lambda g, p, o, t, z: (g * (p - o)).T.contiguous().T),
    "flipped": by(lambda g, p, o, t, z: (g * (p - o)).flip(1)),
    "with ones beside it": by(lambda g, p, o, t, z: g * (p - torch.ones_like(p).scatter(1, t, 2.0))),
    "with ones at the targets": by(lambda g, p, o, t, z: g * (p - torch.ones_like(p).scatter(1, t, 1.0))),
    "hot along the rows": by(lambda g, p, o, t, z: g * (p - torch.zeros_like(p).scatter(0, t, 1.0))),
    "the target's score": by(lambda g, p, o, t, z: g * (p - o) * (o * z).sum(1, keepdim=True)),
    "two temperatures": lambda x, w, t: (lambda z: F.cross_entropy(z, t) + F.cross_entropy(2 * z, t))(x @ w.T),
    "turned by nothing": by(lambda g, p, o, t, z: (g * (p - o)).permute(0, 1)),
    "times itself": by(lambda g, p, o, t, z: (lambda d: d @ (d.T @ d))(g * (p - o))),
    "half of the logsumexp": by(
        lambda g, p, o, t, z: g * (p - o), lambda z: torch.sub(z, torch.logsumexp(z, -1, True), alpha=0.5)
    ),
    "hot twice": by(lambda g, p, o, t, z: g * (p - torch.zeros_like(p).scatter(1, torch.cat([t, t], 1), 1.0))),
    "hot elsewhere": by(lambda g, p, o, t, z: g * (p - torch.zeros_like(p).scatter(1, (t + 1) % V, 1.0))),
    "a slope of the one-hot alone": by(lambda g, p, o, t, z: g * (p - o * (g * o).sum(1, keepdim=True))),
    "turned twice": by(lambda g, p, o, t, z: (g * (p - o)).permute(1, 0).permute(1, 0)),
    "over a row": by(lambda g, p, o, t, z: (p - o) / (1 + g * g)),
    "rows of the gradient": by(lambda g, p, o, t, z: g * (p - o) * (g * o).sum(1, keepdim=True)),
    "columns of the gradient": by(lambda g, p, o, t, z: g * (p - o) * (g * o).sum(0, keepdim=True)),
    "another order of a target": another_target,
    "a transposed target": transposed_target,
    "another factor of a target": another_alpha,
    "a target of the scores": target_of_scores,
    "a factor of another head": factor_of_another,
    "a gradient in the forward": gradient_in_the_forward,
    "views of one logsumexp": views_of_one,
    "one row's target": lambda x, w, t: -(x @ w.T).log_softmax(-1).gather(1, t[:1, None]).sum(),
    "a part of the rows": lambda x, w, t: -(x @ w.T).log_softmax(-1)[1:].gather(1, t[1:, None]).mean(),
    "over the rows": lambda x, w, t: -(x @ w.T).log_softmax(0).gather(1, t[:, None]).mean(),
    "picked along the rows": lambda x, w, t: -(x @ w.T).log_softmax(-1).gather(0, t[None, :1] % M).mean(),
    "several targets of a row": lambda x, w, t: -(x @ w.T).log_softmax(-1).gather(1, t[:, None].expand(M, 2)).mean(),
    "two targets": lambda x, w, t: (lambda y: -(y.gather(1, t[:, None]) + y.gather(1, (t[:, None] + 1) % V)).mean())(
        (x @ w.T).log_softmax(-1)
    ),
    "the exponential too": lambda x, w, t: (lambda z: F.cross_entropy(z, t) + z.exp().mean())(x @ w.T),
    "another maximum": lambda x, w, t: (lambda z: F.cross_entropy(z, t) + (2 * z).amax(-1).mean())(x @ w.T),
    "a column beside": lambda x, w, t: (lambda z: F.cross_entropy(z, t) + z[:, 3].mean())(x @ w.T),
    "all scores' sum": lambda x, w, t: (lambda z: F.cross_entropy(z, t) + z.sum(0).square().sum())(x @ w.T),
    "offset caps": lambda x, w, t: F.cross_entropy(20 * torch.tanh(x @ w.T) + 100096.0, t),
    "caps of caps": lambda x, w, t: F.cross_entropy(torch.sigmoid(5 * torch.tanh(9 * (x @ w.T))) * 50, t),
    "wide caps": lambda x, w, t: F.cross_entropy(500 * torch.tanh(x @ w.T), t),
    "a slice beside the whole": lambda x, w, t: (lambda z: F.cross_entropy(z[1:], t[1:]) + z.mean())(x @ w.T),
    "a slice that is returned": lambda x, w, t: (lambda z: (F.cross_entropy(z, t[1:]), z))((x @ w.T)[1:]),
    "a slice of columns": lambda x, w, t: F.cross_entropy((x @ w.T)[:, :6], t),
    "a slice of a part": lambda x, w, t: F.cross_entropy((x @ w.T).view(2, 3, V)[1:, :2].flatten(0, 1), t[3:5]),
    "every other row": lambda x, w, t: F.cross_entropy((x @ w.T)[::2], t[::2]),
    "a hook on all scores": hook_on_all,
    "all scores' gradient times itself": padded_times_itself,
    "a sum of columns of a slice": sum_of_columns,
    "a slice of a biased head": lambda x, w, t: F.cross_entropy(F.linear(x, w, w[:, 0])[2:-1], t[2:-1]),
    "two gradients of one product": skewed,
    "no scores": lambda x, w, t: F.cross_entropy((x @ w.T) * 0.0, t),
    "added scores": lambda x, w, t: F.cross_entropy((x @ w.T).add(x @ w.flip(0).T, alpha=0.5), t),
    "overwritten scores": lambda x, w, t: F.cross_entropy((x @ w.T).mul_(2.0), t),
    "the head twice": lambda x, w, t: F.cross_entropy(x @ w.T, t) + F.cross_entropy((2 * x) @ w.T, t.flip(0)),
    "tied": lambda x, w, t: F.cross_entropy((x + w[t]) @ w.T, t.roll(1)),
    "a weight of features": lambda x, w, t: F.cross_entropy(x @ w.T.contiguous(), t),
    "an infinite bias": lambda x, w, t: F.cross_entropy(F.linear(x, w, torch.zeros(V, dtype=x.dtype).index_fill(0, torch.tensor([2]), -torch.inf)), t),  # noqa: E501
}  # fmt: skip


def results(program: Program, x: Tensor, w: Tensor, t: Tensor) -> list[Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    found = program(x, w, t.clone())
    out = found if isinstance(found, tuple) else (found,)
    wanted = [o for o in out if o.requires_grad]
    given = [torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape) for o in wanted]
    return [*(o.detach().clone() for o in out), *torch.autograd.grad(wanted, (x, w), given)]


def check(program: Program, x: Tensor, w: Tensor, t: Tensor, nan: bool = False) -> None:
    """All results and gradients are eager's; `nan`: NaN where eager has it."""
    wanted = results(program, x, w, t)
    with strict_reference(run=False):
        found = results(torch.compile(program, backend="coda", dynamic=False, options=STRICT), x, w, t)
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-12, equal_nan=nan)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_eager(name: str) -> None:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    x, w, t = torch.randn(M, K).double(), torch.randn(V, K).double(), torch.tensor([0, 3, 5, 1, 5, 4])
    check(program, x, w, t, nan=True)


def summed_over_rows(z: Tensor) -> Tensor:
    shifted = z - z.amax(1, True)
    return shifted - shifted.exp().sum(0)[:, None].log()


SQUARE: dict[str, Program] = {
    "a logsumexp over the columns": by(lambda g, p, o, t, z: g * (p - o), square),
    "a softmax over the rows": lambda x, w, t: -(x @ w.T).log_softmax(0).gather(1, t[:, None]).mean(),
    "a sum over the rows": by(lambda g, p, o, t, z: g * (p - o), summed_over_rows),
    "picked along the rows": lambda x, w, t: -(x @ w.T).log_softmax(-1).gather(0, t[:, None]).mean(),
    "a target along the rows": lambda x, w, t: -(x @ w.T).log_softmax(-1).gather(0, t[None]).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUARE)
def test_as_many_rows_as_columns(name: str) -> None:
    """What is repeated over, or taken along, the other dimension."""
    torch.manual_seed(0)
    x, w, t = torch.randn(V, K).double(), torch.randn(V, K).double(), torch.arange(V).flip(0)
    program = SQUARE[name]
    check(program, x, w, t)


@pytest.mark.parametrize("what", ("target", "weight"))
def test_computations_of_many_steps_compile_soon(what: str) -> None:
    """Equal computations are found in one pass over them."""

    def program(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        each = F.cross_entropy(x @ w.T, steps(t) % V if what == "target" else t, reduction="none")
        return (each * steps(t).double() if what == "weight" else each).mean()

    def steps(r: Tensor) -> Tensor:
        for _ in range(60):
            r = (r + r % 7) % 40
        return r

    torch.manual_seed(0)
    x, w, t = torch.randn(M, K).double(), torch.randn(V, K).double(), torch.arange(M)
    check(program, x, w, t)


def test_gradients_of_one_product_have_the_same_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """E is stored once. (torch counts what a function of one's own computes in its backward to the forward: here it is
    called the backward's, as it is where such a gradient is traced by itself.)"""
    write, reasons = written.write_losses, list[str]()

    def of_the_backward(graph: fx.Graph, *more: Any) -> Any:
        _, *others = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        for node in others:
            node.meta[g.SIDE] = "is_backward"
        made, left = write(graph, *more)
        reasons.extend(left.values())
        return made, left

    monkeypatch.setattr(joint, "write_losses", of_the_backward)
    torch.manual_seed(0)
    x, w, t = torch.randn(M, K).double(), torch.randn(V, K).double(), torch.tensor([0, 3, 5, 1, 5, 4])
    check(skewed, x, w, t)
    assert reasons == ["its products read gradients that are multiplied by different values of the scores"]


def test_a_checkpointed_head_in_blocks_of_rows() -> None:
    """What is made in the forward is made there alone, also if activations are checkpointed."""
    torch.manual_seed(0)
    head = nn.Linear(16, 200, bias=False).double()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        part = lambda x, y: F.cross_entropy(head(x), y)  # noqa: E731
        found: Tensor = checkpoint(part, x, y, use_reentrant=False)
        return found

    x, y = torch.randn(384, 16, dtype=torch.float64, requires_grad=True), torch.randint(0, 200, (384,))
    for disable in ("", "loss", "blocks"):
        torch._dynamo.reset()
        options = STRICT | {"chunk": 128, "disable": disable}
        compiled = torch.compile(loss, backend="coda", dynamic=False, options=options)
        found, wanted = ([v, *torch.autograd.grad(v, (x, head.weight))] for v in (compiled(x, y), loss(x, y)))
        assert all(float((a - b).detach().abs().max()) < 1e-10 for a, b in zip(found, wanted, strict=True))
