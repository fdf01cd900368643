"""Programs whose outputs and inputs share memory with one another, or must not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from programs import Program, program
from small_tensors import rms
from torch import Tensor, nn

ALIASES: dict[str, Program] = {}


# ---- outputs of one another


@program(ALIASES, "x:TD w:DD", infer=1, train=1, ways=("inductor", "dynamic"))
def view_of_an_output(x: Tensor, w: Tensor) -> Any:
    h = torch.relu(x @ w)
    return h, h[:]


@program(ALIASES, "x:TD w:DD", infer=1, train=1)
def returned_twice(x: Tensor, w: Tensor) -> Any:
    h = torch.relu(x @ w)
    return h, h


@program(ALIASES, "x:TD w:DD v:DD", infer=2, train=3, ways=("dynamic",))
def views_only(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """The base itself is not returned."""
    h = torch.relu(x @ w)
    return h[:4], h[2:], h.view(-1)[3:7], torch.sigmoid(h @ v)


@program(ALIASES, "x:TD w:DD v:DD", infer=2, train=3)
def turned_and_its_base(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.tanh(x @ w)
    return h.t(), h, h.t()[1:] @ x, torch.relu(h @ v)


@program(ALIASES, "x:TD w:DE v:DD", infer=1, train=1)
def halves(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """Both halves of a product and their SwiGLU."""
    gate, up = (x @ w).chunk(2, -1)
    return gate, up, torch.relu((F.silu(gate) * up) @ v)


@program(ALIASES, "x:TD w:DD v:DD", infer=2, train=3)
def copy_of_an_output(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """What is cloned has memory of its own."""
    h = torch.relu(x @ w)
    return h, h.clone(), torch.relu(h.clone() @ v)


@program(ALIASES, "x:TD w:DD n:TD", infer=1, train=1, ways=("inductor",))
def folded_to_an_input(x: Tensor, w: Tensor, n: Tensor) -> Any:
    """What nothing is added to, or is multiplied by one, is a tensor of its own: Inductor folds each to n."""
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    return n + zero, n * one, torch.relu(x @ w), (zero + n)[1:]


@program(ALIASES, "x:TD w:DD", infer=1, ways=("inductor",))
def folded_to_an_output(x: Tensor, w: Tensor) -> Any:
    h = torch.relu(x @ w)
    return h, h - torch.zeros_like(h), h / torch.ones_like(h)


@program(ALIASES, "x:TD w:DD", infer=1)
def parts_of_equal_values(x: Tensor, w: Tensor) -> Any:
    """Views that one operation makes several of, of a value that is stored once for two."""
    h = x @ w
    return *(torch.relu(h) + 0).chunk(2, -1), *(torch.relu(h) * 1).chunk(2, -1)


@program(ALIASES, "x:TD w:DD", infer=1)
def parts_of_a_value_and_its_copy(x: Tensor, w: Tensor) -> Any:
    h = torch.relu(x @ w)
    return *h.split(3, -1), h.clone(), h.unbind(0)[3], h.clone().unbind(0)[2]


@program(ALIASES, "x:TD w:DD v:DD", infer=1, train=3)
def computed_twice(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """The same value, from operations of their own: two tensors."""
    return torch.relu(x @ w), torch.relu(x @ w), torch.relu(x @ w) @ v


@program(ALIASES, "x:TD w:DD v:DD", infer=2, train=1)
def detached(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.relu(x @ w)
    return h, h.detach(), rms(h) @ v


@program(ALIASES, "x:TD w:DD g:D", infer=1, train=1)
def expanded(x: Tensor, w: Tensor, g: Tensor) -> Any:
    h = torch.relu(x @ w + g)
    total = h.sum(0)
    return total.expand(3, -1), total, h.unsqueeze(1).expand(-1, 2, -1), h


@program(ALIASES, "x:BTD w:DD", infer=1, train=1)
def flattened(x: Tensor, w: Tensor) -> Any:
    """A reshape that is a view of one output, and one that is a copy."""
    h = torch.relu(x @ w)
    return h, h.reshape(-1, h.shape[-1]), h.transpose(0, 1).reshape(-1, h.shape[-1]), h.transpose(0, 1)


@program(ALIASES, "x:TD w:DD v:DD r:TD", infer=2, train=2)
def residual_and_its_views(x: Tensor, w: Tensor, v: Tensor, r: Tensor) -> Any:
    """The tile that a Region stores, views of it, and what it becomes."""
    h = r + x @ w
    return h[:, ::2], rms(h) @ v, h.unsqueeze(0), h


@program(ALIASES, "x:TD w:DD v:DD", infer=1, train=2)
def within_structures(x: Tensor, w: Tensor, v: Tensor) -> Any:
    h = torch.sigmoid(x @ w)
    return {"h": h, "list": [h.view(-1), (h[0], h @ v)]}


@program(ALIASES, "x:TD w:DD v:DD", infer=1, train=1)
def written_view_returned(x: Tensor, w: Tensor, v: Tensor) -> Any:
    """A view that was taken before its base was written, by the program itself."""
    h = x @ w
    part = h[2:5]
    h.add_(1)
    return part, torch.relu(h) @ v, h


# ---- inputs and what the program holds, as outputs


@program(ALIASES, "x:TD w:DD r:TD", infer=1, train=1, ways=("inductor",))
def inputs_returned(x: Tensor, w: Tensor, r: Tensor) -> Any:
    return torch.relu(r + x @ w), r, x[2:], x.t()


@program(ALIASES, "x:TD w:DD r:TD' v:DD", infer=2, train=3, ways=("inductor", "dynamic"))
def input_written_and_returned(x: Tensor, w: Tensor, r: Tensor, v: Tensor) -> Any:
    r.add_(torch.tanh(x @ w))
    return r, r[1:], torch.relu(r @ v)


@program(ALIASES, "x:TD w:DD v:DD | m:TD", infer=1, train=3)
def view_of_a_written_input(x: Tensor, w: Tensor, v: Tensor, m: Tensor) -> Any:
    """Read, written, and seen through a view that was taken before."""
    rows = m[3:]
    h = m + x @ w
    with torch.no_grad():
        m.mul_(2)
    return h + torch.relu(h @ v), rows


@program(ALIASES, "x:TD r:TD", infer=2, train=2, ways=("dynamic",))
class Held(nn.Module):
    """A parameter and a buffer of the module, and views of them."""

    m: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("m", torch.randn(8))

    def forward(self, x: Tensor, r: Tensor) -> Any:
        h = rms(r + x @ self.w) + self.m
        return torch.relu(h @ self.v), self.w, self.v[1:], self.w.t(), self.m, self.m.view(2, 4)


@program(ALIASES, "x:TD w:DD", infer=1, train=1)
def no_operation(x: Tensor, w: Tensor) -> Any:
    """Operations that give back what they got, or copy it."""
    h = torch.relu(x @ w)
    return x.contiguous(), w.t().contiguous(), h.to(h.dtype), h.expand_as(h)


# ---- inputs of one another


@program(ALIASES, "x:TD w:DD v:DD", infer=1, train=3, given=lambda x, w, v: (x, x, w, v))
def one_tensor_twice(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    h = a + b @ w
    return h + torch.relu(h @ v), torch.tanh(b @ v), a


@program(ALIASES, "x:DD w:DD v:DD", infer=2, train=1, given=lambda x, w, v: (x, x.t(), w, v), ways=("inductor",))
def with_its_transpose(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    h = a + torch.relu(b @ w)
    return rms(h) @ v, b[1:]


@program(ALIASES, "x:TD w:DD v:DD", infer=1, given=lambda x, w, v: (x, x, w, v))
def one_tensor_twice_written(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    """Through one name it is read, through the other written."""
    h = a + b @ w
    b.mul_(2)
    return h + torch.relu(h @ v), torch.relu(torch.sin(b) @ v) @ w, a + 1


@program(ALIASES, "x:MD w:DD v:DD", infer=1, given=lambda x, w, v: (x[:12], x[6:18], w, v), ways=("inductor",))
def overlapping_slices_written(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    h = a + b @ w
    b.zero_()
    return h + torch.relu(h @ v), torch.sin(a)


@program(ALIASES, "x:MD w:DD v:DD", infer=1, given=lambda x, w, v: (x[:12], x[12:], w, v))
def disjoint_slices_written(a: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Any:
    h = a + b @ w
    a.add_(1)
    b.copy_(h)
    return h + torch.relu(h @ v), a * b


@program(ALIASES, "x:DD w:TD v:DD", infer=2, given=lambda x, w, v: (x, x.t(), w, v))
def transpose_written(a: Tensor, b: Tensor, x: Tensor, v: Tensor) -> Any:
    """A weight, and the same memory turned, which is written between two products."""
    h = torch.relu(x @ a)
    b[1:].mul_(0.5)
    return h @ v, torch.relu(x @ a)


@program(ALIASES, "x:TD w:DD v:DD | m:MD", infer=1, train=3, given=lambda x, w, v, m: (x, w, v, m, m[: len(m) // 2]))
def slice_of_a_state_written(x: Tensor, w: Tensor, v: Tensor, m: Tensor, part: Tensor) -> Any:
    """The whole state and a part of it are inputs: the part is written, the whole is read."""
    h = m[x.shape[0] :] + m[: x.shape[0]] + x @ w
    with torch.no_grad():
        part.add_(h)
    return h + torch.relu(h @ v), m.sum(0)


@program(ALIASES, "x:TD w:DD v:DD | q:MD", infer=1, train=4, given=lambda x, w, v, q: (x, w, v, q[::2], q[1::2]))
def interleaved_states(x: Tensor, w: Tensor, v: Tensor, even: Tensor, odd: Tensor) -> Any:
    h = even + x @ w
    with torch.no_grad():
        even.copy_(odd)
        odd.mul_(-1)
    return h + torch.relu(h @ v), torch.relu(x @ w) @ v, odd
