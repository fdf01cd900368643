"""Programs in which Inductor, left alone, reads memory after it was overwritten: it computes what was read where it is
needed, drops copies, and makes values of the forward again in the backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from effect_reads import exchange_, scale_
from programs import Program, program
from small_tensors import rms
from torch import Tensor

LATE: dict[str, Program] = {}


# ---- needed behind an operation of the user's


@program(LATE, "x:TD w:DD | n:TD", infer=1, train=1, ways=("inductor",))
def late_activation(x: Tensor, w: Tensor, n: Tensor) -> Any:
    """In training Inductor scales n before it computes what was read of it."""
    y, z = F.gelu(n.clone()), torch.tanh(n)
    u = torch.exp(z)
    scale_(n, 0.5)
    return torch.sigmoid(y), torch.sin(u), torch.relu(x @ w)


@program(LATE, "x:TD w:DD | n:TD", infer=1, train=1, ways=("inductor",))
def late_views(x: Tensor, w: Tensor, n: Tensor) -> Any:
    """Returned and viewed values as well, and of memory that the program itself has made."""
    y = torch.tanh(n).view(-1)
    t = n.cumsum(0)
    z = torch.exp(t).t()
    scale_(n.t(), 0.5)
    scale_(t, 0.25)
    return y, y.view_as(n), torch.sin(z), torch.relu(x @ w), t


# ---- needed by the backward


@program(LATE, "x:TD w:DD g:D | m:TD", infer=1, train=1, inductor=False)
def norm_of_a_copy(x: Tensor, w: Tensor, g: Tensor, m: Tensor) -> Any:
    """The copy is dropped, and the backward would normalise the new m."""
    h = rms(m.clone()) * g
    m.add_(x.detach())
    return h, torch.relu(x @ w)


@program(LATE, "x:TD w:DD v:DD | m:TD", infer=1, train=1, inductor=False)
def copy_of_a_copy(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    h = m.clone() + x @ w
    left = m.clone().clone()
    with torch.no_grad():
        m.add_(h)
    return h, h + left @ v.t()


@program(LATE, "x:TD w:DD | m:TD", infer=0, train=2, ways=("inductor",))
def scores_of_a_copy(x: Tensor, w: Tensor, m: Tensor) -> Any:
    """Inductor takes the copy for its source, and lets the operation write to that. (Of random program 75135.)"""
    h = x @ w + x
    with torch.no_grad():
        m.mul_(0.5)
    out = torch.softmax(m.clone() @ h.t(), -1) @ h
    with torch.no_grad():
        exchange_(m[:2], m[2:4])
    return out


@program(LATE, "x:TD r:TD' w:DD", infer=1, train=1, inductor=False)
def loss_of_an_input(x: Tensor, r: Tensor, w: Tensor) -> Any:
    """AOTAutograd overwrites an input that needs a gradient behind the graph."""
    h = torch.relu(x @ w)
    value = (r - h).square().mean()
    r[:, ::2].add_(1)
    return h, value, r[1:]


@program(LATE, "x:TD w:DD u:DD | m:TD n:TD", infer=2, train=2)
def largest_of_a_row(x: Tensor, w: Tensor, u: Tensor, m: Tensor, n: Tensor) -> Any:
    """The gradient of the largest value is that of the values that equal it, and of a product that was computed again,
    in another order, none does. (Of random program 71013.)"""
    h = rms(F.dropout(m.clone(), 0.3) + n.clone() @ w.t()) @ u
    y = x.clone()
    total, scaled = h.sum(0), (y - h.amax(-1, keepdim=True)) * y.mean(-1, keepdim=True)
    return scaled, total, (h - n).square().mean()


# ---- returned


@program(LATE, "x:TD w:DD v:DD", infer=2, train=3)
def copies_of_a_value(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """Two tensors, none of them the value itself."""
    h = torch.relu(torch.tanh(x @ w) @ v)
    return h.clone(), h.clone(), h.clone()[1:]


@program(LATE, "x:TD w:DD r:TD", infer=1, ways=("inductor",))
def copied_over(x: Tensor, w: Tensor, r: Tensor) -> Any:
    """What is copied over an operation's result: the copy has two inputs. (Of random program 114010.)"""
    h = x @ w
    seen = h[:]
    scale_(h[3:], -1.0)
    scale_(h, 0.5)
    h.copy_(r + x @ w)
    return seen, h[1:]


@program(LATE, "x:TD w:DD r:TD g:D", infer=1, ways=("inductor",))
def copied_over_wider(x: Tensor, w: Tensor, r: Tensor, g: Tensor) -> Any:
    """Of another shape than what is copied."""
    h = r.clone()
    scale_(h, 0.5)
    h.copy_(g)
    return h, torch.relu(x @ w)


@program(LATE, "x:TD w:DD r:TD' | n:TD", infer=1, train=1, ways=("inductor",))
def copied_and_forgotten(x: Tensor, w: Tensor, r: Tensor, n: Tensor) -> Any:
    """What is copied over was read before by nobody else. (Of random program 122007.)"""
    h = torch.relu(x @ w)
    with torch.no_grad():
        exchange_(n[:2], n[6:8])
    r.copy_(n)
    with torch.no_grad():
        n.mul_(0.5)
    return h


@program(LATE, "x:TD b:D | n:TD", infer=0, train=0, ways=("inductor",))
def norm_without_a_product(x: Tensor, b: Tensor, n: Tensor) -> Any:
    """Graphs without a product are kept right, too. (Of random program 123081.)"""
    h = rms(n) * b
    with torch.no_grad():
        n.copy_(x)
    return h, x.sin()
