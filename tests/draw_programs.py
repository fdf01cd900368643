"""Programs whose operations keep an order that no data says: random numbers, collectives, logs, checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from effect_reads import scale_
from programs import Program, program
from small_tensors import rms
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DRAWS: dict[str, Program] = {}
again: Any = partial(checkpoint, use_reentrant=False)


@program(DRAWS, "x:TD r:TD w:DD v:DD", infer=2, train=3, ways=("inductor",))
def two_dropouts(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    """The first waits for a product, the second for nothing."""
    h = F.dropout(F.gelu(x @ w), 0.3)
    return F.gelu((h + F.dropout(r, 0.3)) @ v)


@program(DRAWS, "x:TD r:TD w:DD v:DD", infer=1, train=1)
def dropouts_of_branches(x: Tensor, r: Tensor, w: Tensor, v: Tensor) -> Any:
    gate = F.dropout(torch.sigmoid(x @ w), 0.2)
    up = F.dropout(r @ v, 0.2)
    return rms(F.dropout(gate * up, 0.2)) @ w


@program(DRAWS, "x:TD w:DE v:ED", infer=3, train=9, ways=("dynamic",))
class Dropping(nn.Module):
    """Two layers with dropout on the residual, one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Any:
        x = x + F.dropout(self.down(F.gelu(self.up(rms(x)))), 0.4)
        return x + F.dropout(F.silu(rms(x) @ w) @ v, 0.4) + self.down(F.dropout(self.up(x), 0.4))


@program(DRAWS, "x:TD w:DD v:DD", infer=1, train=1)
def noise_beside_products(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = x @ w + 0.1 * torch.randn_like(x)
    n = torch.rand(x.shape[0], 1, dtype=x.dtype, device=x.device)
    return torch.relu(h * n) @ v


@program(DRAWS, "x:TD w:DD v:DD", infer=1, train=2)
def depth_dropped(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """Whole rows are kept or not; the products between two draws."""
    first = F.dropout(torch.ones_like(x[:, :1]), 0.3)
    x = x + torch.tanh(x @ w) * first
    second = F.dropout(torch.ones_like(x[:, :1]), 0.5)
    return torch.relu((x + torch.tanh(x @ v) * second) @ w)


@program(DRAWS, "x:TD w:DD v:DD", infer=1, train=2)
def gumbel(x: Tensor, w: Tensor, v: Tensor) -> Any:
    logits = x @ w
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
    soft = torch.softmax(logits + noise, -1)
    picked = torch.multinomial(soft.detach(), 1)
    return torch.relu(soft @ v), picked


@program(DRAWS, "x:TD w:DD v:DD | m:TD", infer=2, train=2, ways=("inductor",))
def drawn_into_a_state(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    h = m + x @ w
    with torch.no_grad():
        m.uniform_(-1, 1)
    return F.dropout(torch.relu(h @ v), 0.5) + m


@program(DRAWS, "x:TD w:DD v:DD | m:TD", infer=1, train=2, inductor=False)
def mask_kept(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    """Variational: the mask of the last call is used, then drawn anew."""
    h = (x @ w) * torch.sin(m)
    with torch.no_grad():
        m.copy_((torch.rand_like(m) > 0.3).to(m.dtype))
    return F.dropout(h, 0.1) @ v


@program(DRAWS, "x:TD w:DD v:DD", infer=1, train=2)
def shuffled(x: Tensor, w: Tensor, v: Tensor) -> Any:
    order = torch.argsort(torch.rand(x.shape[0], device=x.device))
    h = torch.relu(x[order] @ w)
    return F.dropout(h, 0.2) @ v, order


@program(DRAWS, "x:TD w:DD v:DD", infer=2, train=4, ways=("inductor",))
def checkpointed_dropout(x: Tensor, w: Tensor, v: Tensor) -> Any:
    def block(x: Tensor) -> Tensor:
        return x + F.dropout(torch.relu(rms(x) @ w) @ v, 0.3)

    return again(block, again(block, x))


@program(DRAWS, "x:TD w:DD v:DD | m:TD s:D", infer=2, train=1)
def checkpointed_beside_a_state(x: Tensor, w: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Any:
    """What is computed again reads a state that was written before, and the state that is written is not read there."""
    with torch.no_grad():
        s.mul_(0.5).add_(x.mean(0))
    h = again(lambda x: torch.tanh(x @ w - s) @ v, x)
    with torch.no_grad():
        m.copy_(h)
    return rms(h) @ w


@torch.library.custom_op("coda_effects::logged_", mutates_args={"log"})
def logged_(log: Tensor, x: Tensor, place: int) -> None:
    """Puts a sum at a place, and the number of entries so far behind it."""
    log[-1, 0] += 1
    log[place, 0] = x.sum()
    log[place, 1] = log[-1, 0]


@program(DRAWS, "x:TD w:DD v:DD | log:TD", infer=1, train=2, ways=("inductor",))
def logs(x: Tensor, w: Tensor, v: Tensor, log: Tensor) -> Any:
    """Entries are numbered as they are made."""
    h = torch.relu(x @ w)
    logged_(log, h.detach(), 0)
    logged_(log, x.detach(), 1)
    y = rms(h + x @ v)
    logged_(log, y.detach(), 2)
    logged_(log, w.detach(), 3)
    return y @ w


@program(DRAWS, "x:TD w:DD v:DD | m:TD", infer=1, train=3)
def asserted_between(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    h = m + x @ w
    torch._assert_async(h.detach().isfinite().all(), "infinite")
    with torch.no_grad():
        m.zero_()
        torch._assert_async((m == 0).all(), "not zero")
        scale_(m, 2.0)
    return h + torch.relu(h @ v)


# ---- with a process group of one rank

COLLECTIVES: dict[str, Program] = {}


@program(COLLECTIVES, "x:TD w:DD v:DD | m:TD", infer=1)
def reduced_in_place(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    """The memory that a Region's tile reads is what the collective writes."""
    h = m + x @ w
    m.mul_(2)
    dist.all_reduce(m)
    return h + torch.relu(h @ v), m + 1


@program(COLLECTIVES, "x:TD w:DD v:DD | m:TD s:D", infer=1)
def reduced_statistics(x: Tensor, w: Tensor, v: Tensor, m: Tensor, s: Tensor) -> Any:
    """Sums over tokens, of all ranks; running ones."""
    h = x @ w - s
    total = h.sum(0)
    dist.all_reduce(total)
    s.lerp_(total, 0.1)
    m.copy_(h)
    return torch.relu(h * total) @ v


@program(COLLECTIVES, "x:TD w:DD v:DD | m:TD", infer=2)
def gathered_into_an_input(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    h = torch.tanh(m + x @ w)
    dist.all_gather_into_tensor(m, h)
    return rms(h) @ v + m


@program(COLLECTIVES, "x:TD w:DD v:DD r:TD", infer=1)
def reduced_product(x: Tensor, w: Tensor, v: Tensor, r: Tensor) -> Any:
    """Tensor parallel: a product's sum over ranks, then the residual, which the caller finds overwritten."""
    h = x @ w
    dist.all_reduce(h)
    n = r + h
    r.copy_(n)
    return torch.relu(rms(n) @ v)


@program(COLLECTIVES, "x:TD w:DD v:DD p:DD", infer=3)
def step_of_a_rank(x: Tensor, w: Tensor, v: Tensor, p: Tensor) -> Any:
    """Gradients, their sum over ranks, a step."""
    gradient, value = torch.func.grad_and_value(lambda w: (torch.tanh(x @ w) @ v).square().mean())(w)
    dist.all_reduce(gradient)
    p.mul_(0.9).add_(gradient)
    w.sub_(p)
    return value
