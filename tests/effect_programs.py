"""Programs with a state, as people write them: optimizers, teachers, caches, running statistics, recurrences, draws."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from effect_reads import bump_, exchange_, scale_
from programs import Program, program
from small_tensors import rms
from torch import Tensor, nn

EFFECTS: dict[str, Program] = {}


# ---- optimizers and gradients within a graph


def squared(a: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(r + a @ w) @ v).square().mean()


@program(EFFECTS, "a:TD r:TD w:DD v:DD p:DD q:DD", infer=5, ways=("inductor",))
def momentum_inside(a: Tensor, r: Tensor, w: Tensor, v: Tensor, p: Tensor, q: Tensor) -> Any:
    grads, value = torch.func.grad_and_value(squared, argnums=(2, 3))(a, r, w, v)
    for x, m, g in zip((w, v), (p, q), grads, strict=True):
        m.mul_(0.9).add_(g)
        x.sub_(m, alpha=0.1)
    return value


@program(EFFECTS, "a:TD r:TD w:DD v:DD p:DD q:DD", infer=4)
def adam_inside(a: Tensor, r: Tensor, w: Tensor, v: Tensor, p: Tensor, q: Tensor) -> Any:
    gradient, value = torch.func.grad_and_value(squared, argnums=2)(a, r, w, v)
    p.lerp_(gradient, 0.1)
    q.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
    w.addcdiv_(p, q.abs().sqrt().add_(1e-3), value=-0.01)
    return value


@program(EFFECTS, "a:TD r:TD w:DD v:DD", infer=3)
def foreach_step(a: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    grads, value = torch.func.grad_and_value(squared, argnums=(2, 3))(a, r, w, v)
    torch._foreach_addcmul_([w, v], list(grads), list(grads), value=-0.5)
    torch._foreach_sub_([w, v], list(grads))
    return value


@program(EFFECTS, "a:TD r:TD w:DD v:DD", infer=8)
def two_steps_inside(a: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    """The second step reads what the first has written."""
    values = []
    for _ in range(2):
        gradient, value = torch.func.grad_and_value(squared, argnums=2)(a, r, w, v)
        w.sub_(gradient)
        values.append(value)
    return values


@program(EFFECTS, "w:DD x:TD", infer=1)
def orthogonalised(w: Tensor, x: Tensor) -> Any:
    """Newton and Schulz, in place."""
    y = torch.relu(x @ w)
    for _ in range(2):
        w.copy_(1.5 * w - 0.05 * (w @ w.t()) @ w)
    return y @ w


@program(EFFECTS, "x:TD w:DD a:DH b:HD", infer=2, ways=("dynamic",))
def adapter_merged(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Any:
    before = torch.tanh(x @ w)
    w.addmm_(a, b)
    return before, torch.tanh(x @ w)


@program(EFFECTS, "x:TD g:TD w:DD | m:DD", infer=2, train=2)
def accumulated_product(x: Tensor, g: Tensor, w: Tensor, m: Tensor) -> Any:
    h = torch.tanh(x @ w)
    with torch.no_grad():
        m.addmm_(x.t(), g)
    return h * (1 + h), m + 1


@program(EFFECTS, "x:TD w:DD r:TD | m:TD", infer=2)
def product_into_an_input(x: Tensor, w: Tensor, r: Tensor, m: Tensor) -> Any:
    h = torch.sigmoid(m + x @ w)
    torch.mm(r, w, out=m)
    return h * m


@program(EFFECTS, "x:TD w:DE v:ED", infer=1, train=3, ways=("inductor", "autocast"))
class Decayed(nn.Module):
    """Weights are clipped before they are used, in training too."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Any:
        with torch.no_grad():
            self.w.clamp_(-1, 1)
            self.v.mul_(0.99)
        return F.gelu(x @ self.w + x @ w) @ (self.v + v)


# ---- weights that change, teachers


@program(EFFECTS, "x:TD w:DD v:DD | t:DD u:DD", infer=3, train=3, ways=("inductor", "dynamic"))
def teacher(x: Tensor, w: Tensor, v: Tensor, t: Tensor, u: Tensor) -> Any:
    student = torch.relu(x @ w) @ v
    with torch.no_grad():
        target = torch.relu(x @ t) @ u
        t.lerp_(w, 0.1)
        u.lerp_(v, 0.1)
    return (student - target).square().mean(), target


@program(EFFECTS, "x:TD w:DD v:DD | t:DD u:DD", infer=2, train=3)
def teacher_first(x: Tensor, w: Tensor, v: Tensor, t: Tensor, u: Tensor) -> Any:
    """Updated before it is asked, and again afterwards."""
    with torch.no_grad():
        torch._foreach_lerp_([t, u], [w, v], 0.1)
        target = torch.relu(x @ t) @ u
        torch._foreach_mul_([t, u], 0.9)
    return F.gelu(target + x @ w) @ v


@program(EFFECTS, "x:TD w:DD v:DD | c:D", infer=1, train=2, ways=("autocast",))
def centred_teacher(x: Tensor, w: Tensor, v: Tensor, c: Tensor) -> Any:
    """Self-distillation: a softmax about a running centre."""
    t = x @ w
    with torch.no_grad():
        target = torch.softmax((t - c) / 0.1, -1)
        c.mul_(0.9).add_(t.mean(0), alpha=0.1)
    return -(target * F.log_softmax(x @ v, -1)).sum(-1)


@program(EFFECTS, "x:TD w:DD k:TD v:TD", infer=9, ways=("dynamic",))
def fast_weights(x: Tensor, w: Tensor, k: Tensor, v: Tensor) -> Any:
    """The delta rule, in chunks."""
    out = []
    for i in range(3):
        part = slice(4 * i, 4 * i + 4)
        out.append(torch.relu(x[part] @ w))
        w.add_(k[part].t() @ (v[part] - k[part] @ w), alpha=0.1)
    return torch.cat(out)


@program(EFFECTS, "x:TD w:DD | u:D s:D", infer=1, train=1)
def spectral_norm(x: Tensor, w: Tensor, u: Tensor, s: Tensor) -> Any:
    """A step of the power method at each call."""
    with torch.no_grad():
        s.copy_(F.normalize(w.t() @ u, dim=0))
        u.copy_(F.normalize(w @ s, dim=0))
    sigma = torch.dot(u.clone(), w @ s.clone())
    return torch.relu(x @ (w / sigma))


# ---- recurrent and streaming state, caches


@program(EFFECTS, "x:TD y:TD w:DD u:DD | s:TD", infer=3, train=5, ways=("inductor",), inductor=False)
def recurrent(x: Tensor, y: Tensor, w: Tensor, u: Tensor, s: Tensor) -> Any:
    """A state that is written within the loop and carried to the next call."""
    h, out = s.clone(), []
    for part in (x, y, x + y):
        h = torch.tanh(part @ w + h @ u)
        with torch.no_grad():
            s.copy_(h)
        out.append(h)
    return torch.stack(out)


@program(EFFECTS, "x:TD y:TD w:DD u:DD | s:TD", infer=3)
def recurrent_in_place(x: Tensor, y: Tensor, w: Tensor, u: Tensor, s: Tensor) -> Any:
    out = []
    for part in (x, y, x + y):
        s.mul_(torch.sigmoid(part @ w)).add_(torch.tanh(s @ u))
        out.append(s.clone())
    return out


@program(EFFECTS, "q:TD k:TD w:DD v:DD | c:MD", infer=1, train=4)
def cache_written(q: Tensor, k: Tensor, w: Tensor, v: Tensor, c: Tensor) -> Any:
    """Keys go into a slot of a cache, attention is over all of it."""
    with torch.no_grad():
        c[: k.shape[0]] = k @ w
    scores = torch.softmax((q @ w) @ c.clone().t(), -1)
    return torch.relu(rms(q + (scores @ c.clone()) @ w) @ v)


@program(EFFECTS, "q:TD k:TD w:DD v:DD | c:MD", infer=2, ways=("dynamic",))
def cache_shifted(q: Tensor, k: Tensor, w: Tensor, v: Tensor, c: Tensor) -> Any:
    """The old part of a ring is read as a tile, then moves."""
    t = k.shape[0]
    h = c[:t] + q @ w
    c[:t] = c[t:].clone()
    c[t:].copy_(torch.tanh(k @ w))
    return h + torch.relu(h @ v), c[:t] + torch.relu(q @ v)


@program(EFFECTS, "x:TD w:DD v:DD | s:TD", infer=1, train=2)
def convolution_state(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> Any:
    """A causal convolution of two taps: the last rows are kept for the next call."""
    both = torch.cat([s[-1:].clone(), x[:-1]])
    h = torch.relu(x @ w + both @ v)
    with torch.no_grad():
        s.copy_(x)
    return h @ w


@program(EFFECTS, "x:TD w:DD v:DD | q:MD", infer=2, train=3, inductor=False)
def queue(x: Tensor, w: Tensor, v: Tensor, q: Tensor) -> Any:
    """Contrastive: negatives of a queue, into which this batch's keys go."""
    z = F.normalize(x @ w, dim=-1)
    logits = z @ q.clone().t()
    with torch.no_grad():
        q[: x.shape[0]] = q[x.shape[0] :].clone()
        q[x.shape[0] :] = F.normalize(x @ v, dim=-1)
    return torch.logsumexp(logits, -1)


@program(EFFECTS, "x:TD w:DD v:DD | c:SD n:S", infer=3, train=3)
def codebook(x: Tensor, w: Tensor, v: Tensor, c: Tensor, n: Tensor) -> Any:
    """Vector quantisation with a codebook of running means, straight through."""
    h = x @ w
    with torch.no_grad():
        hot = F.one_hot((h @ c.t()).argmax(-1), c.shape[0]).to(h.dtype)
        q = hot @ c
        n.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        c.mul_(0.9).add_(hot.t() @ h, alpha=0.1)
    return torch.relu((h + (q - h).detach()) @ v), (h - q).square().mean()


# ---- running statistics


@program(EFFECTS, "x:TD r:TD", infer=2, train=2, ways=("inductor",))
class Batched(nn.Module):
    """nn.BatchNorm1d in training mode between products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor, r: Tensor) -> Any:
        return r + self.second(torch.relu(self.norm(self.first(x))))


@program(EFFECTS, "x:TD r:TD", infer=1, train=2, inductor=False)
class Running(nn.Module):
    """What normalises is the running mean and variance, updated after they were used."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mean", torch.randn(16))
        self.register_buffer("variance", torch.rand(16) + 0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, r: Tensor) -> Any:
        h = self.first(x)
        n = (h - self.mean) * torch.rsqrt(self.variance + 1e-5)
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(h.mean(0), 0.1)
            self.variance.lerp_(h.var(0), 0.1)
        return r + self.second(F.gelu(n)) / self.count


@program(EFFECTS, "x:TD w:DE v:ED | lo:E hi:E", infer=1, train=2)
def observed(x: Tensor, w: Tensor, v: Tensor, lo: Tensor, hi: Tensor) -> Any:
    """The range of an activation, by tokens, then the activation in it."""
    h = x @ w
    with torch.no_grad():
        torch.minimum(lo, h.amin(0), out=lo)
        torch.maximum(hi, h.amax(0), out=hi)
        span = (hi - lo).clamp_min(1e-3)
    return torch.relu(torch.sigmoid(h / span) @ v)


@program(EFFECTS, "x:TD w:DE v:ED | m:E s:E", infer=1, train=2, inductor=False)
def statistics_kept(x: Tensor, w: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Any:
    """Sums over tokens go into buffers; the old ones are read by the same epilogue."""
    h = x @ w + m
    g = F.silu(h)
    with torch.no_grad():
        s.copy_(m * 2)
        m.copy_(g.sum(0))
    return g @ v


@program(EFFECTS, "x:TD w:DD v:DD | m:DD", infer=1, train=2)
def written_in_the_backward(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    h = torch.relu(x @ w)
    return Noted.apply(h, m) @ v  # type: ignore[no-untyped-call]


class Noted(torch.autograd.Function):
    """The identity; its backward adds the second moment of the gradient to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, m: Tensor) -> Tensor:
        ctx.m = m
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.m.add_(grads[0].t() @ grads[0])
        return grads[0] * 2, None


# ---- written in place: intermediates, inputs with gradients, one another


@program(EFFECTS, "x:TD r:TD w:DD v:DD", infer=1, train=1, ways=("autocast", "dynamic"))
def intermediate_written(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    h = x @ w
    h += r
    h[:, :4].mul_(2)
    h.t()[1].copy_(r[:, 0])
    return F.relu(h + 1, inplace=True) @ v


@program(EFFECTS, "x:TD r:TD' w:DD v:DD", infer=1, train=3, ways=("inductor", "dynamic"))
def zeroed_with_gradient(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    h = r + x @ w
    r.zero_()
    return h + torch.relu(h @ v)


@program(EFFECTS, "x:TD w:DD v:DD", infer=1, train=1)
def zeroed_product(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """A tensor of zeros is no multiple of anything."""
    h = (x @ w).zero_()
    return rms(h + h @ v) @ v, torch.relu(x @ w)


@program(EFFECTS, "x:TD r:TD' w:DD v:DD", infer=4, train=3, inductor=False)
def accumulated_residual(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    """A residual stream kept in the caller's tensor."""
    r += torch.tanh(x @ w)
    n = rms(r.clone())
    r += torch.relu(n @ v) @ w
    return rms(r.clone()) @ v


@program(EFFECTS, "x:TD r:TD' w:DD v:DD", infer=2, train=3)
def rows_of_an_input(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    h = r + x @ w
    r[::2] = torch.relu(h @ v)[::2]
    return torch.sin(r) + h


@program(EFFECTS, "a:TD b:TD w:DD v:DD", infer=2, inductor=False)
def exchanged(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    """Each is copied over the other, after both were read."""
    h = a + b @ w
    held = a.clone()
    a.copy_(b)
    b.copy_(held)
    return h + torch.relu(h @ v) + torch.sigmoid(a @ v)


@program(EFFECTS, "a:TD b:TD w:DD v:DD", infer=2, ways=("inductor",))
def exchanged_by_an_operation(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.relu(a @ w) + b
    exchange_(a, b)
    return h @ v, torch.relu(a @ w) + b


@program(EFFECTS, "x:TD w:DD v:DD | m:TD", infer=1, train=1)
def read_between_writes(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    first = m + x @ w
    with torch.no_grad():
        m.mul_(2)
    second = m + first @ v
    with torch.no_grad():
        m.t().add_(1)
    return torch.relu(second) + m


@program(EFFECTS, "x:TD w:DD v:DD | m:TD", infer=2, train=2)
def operations_between(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    first = m + x @ w
    with torch.no_grad():
        was = bump_(m[1:])
        scale_(m.view(-1), 0.5)
    return torch.relu(m + first @ v), was
