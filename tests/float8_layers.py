"""Linear layers that multiply in 8 bits as torchao 0.18's float8 training does, in plain torch, and blocks of them.

Their joint graphs have the operations that torchao's have. In float64 they are plain linear layers: what the errors of
the others are taken against.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")
WIDTH, INNER = 64, 128


class Scaled:
    """A tensor in 8 bits, of which each number was multiplied by `scale`: one number, or one for each row or column."""

    def __init__(self, x: Tensor, dim: int | None, dtype: torch.dtype = E4M3, power: bool = True) -> None:
        limit = torch.finfo(dtype).max
        largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = (limit / largest.double().clamp(min=1e-12)).float()
        self.scale = torch.exp2(torch.floor(torch.log2(scale))) if power else scale
        self.data = (x.float() * self.scale).clamp(-limit, limit).to(dtype)

    def rows(self) -> Scaled:
        """The same of two dimensions."""
        return self._with(self.data.reshape(-1, self.data.shape[-1]), self._on_scale(lambda s: s.reshape(-1, 1)))

    def t(self) -> Scaled:
        """The transpose."""
        return self._with(self.data.t(), self._on_scale(lambda s: s.t()))

    def _on_scale(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        return f(self.scale) if self.scale.dim() else self.scale

    @staticmethod
    def _with(data: Tensor, scale: Tensor) -> Scaled:
        made = Scaled.__new__(Scaled)
        made.data, made.scale = data, scale
        return made


def product(a: Scaled, b: Scaled, fast: bool = False) -> Tensor:
    """a @ b in bfloat16. Scales of rows or columns are applied afterwards, but for a fast product."""
    left, right = a.data.contiguous(), b.data.t().contiguous().t()
    if a.scale.dim() and not b.scale.dim():
        b.scale = b.scale.repeat(right.shape[1]).view(1, -1)
    rows, columns = a.scale.reciprocal(), b.scale.reciprocal()
    if fast:
        return torch._scaled_mm(left, right, rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)
    if not rows.dim():
        return torch._scaled_mm(left, right, rows, columns, out_dtype=torch.bfloat16)
    both = rows * columns
    one, two = (rows.new_ones(()) for _ in range(2))
    out = torch._scaled_mm(left, right, one, two, out_dtype=torch.bfloat16)
    return (out * both).to(torch.bfloat16)


@torch._dynamo.allow_in_graph  # as torchao does: otherwise Dynamo transposes more often
class Multiply(torch.autograd.Function):
    """x @ w_t, of which both operands and the gradient are cast along the axis that each product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_t: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w_t)
        ctx.recipe, by_row = recipe, recipe != "tensorwise"
        left = Scaled(x, -1 if by_row else None, power=by_row)
        right = Scaled(w_t, 0 if by_row else None, power=by_row)
        return product(left.rows(), right, fast=True).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w_t = ctx.saved_tensors
        recipe, by_row = ctx.recipe, ctx.recipe != "tensorwise"
        of_grad = E4M3 if by_row else E5M2
        flat = grad.reshape(-1, grad.shape[-1])
        left = Scaled(flat, -1 if by_row else None, of_grad, power=by_row)
        right = Scaled(w_t, -1 if recipe == "rowwise" else None, power=by_row)
        grad_x = product(left, right.t()).reshape(*grad.shape[:-1], -1)
        rows = x.reshape(-1, x.shape[-1])
        if recipe == "rowwise_with_gw_hp":
            return grad_x, (flat.t() @ rows).t(), None
        down = 0 if by_row else None
        grad_w = product(Scaled(flat, down, of_grad, power=by_row).t(), Scaled(rows, down, power=by_row))
        return grad_x, grad_w.t(), None


class Linear(nn.Linear):
    """A linear layer by a recipe; of float64 weights an exact one."""

    recipe = "rowwise"

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == torch.float64:
            return F.linear(x, self.weight, self.bias)
        out = Multiply.apply(x, self.weight.t(), self.recipe)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The second half of a Llama layer: RMSNorm, SwiGLU, residual."""

    def __init__(self, linear: type[nn.Linear] = Linear) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = linear(WIDTH, INNER, bias=False), linear(WIDTH, INNER, bias=False)
        self.down = linear(INNER, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        n = F.rms_norm(h, (WIDTH,), self.gain, 1e-5)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """The second half of a GPT-style layer: LayerNorm, GELU, biases, residual."""

    def __init__(self, linear: type[nn.Linear] = Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h)), approximate="tanh"))  # type: ignore[no-any-return]


BLOCKS: dict[str, type[Mlp] | type[Gpt]] = {"mlp": Mlp, "gpt": Gpt}


def by(recipe: str, model: nn.Module) -> nn.Module:
    """The model in bfloat16, with all of its linear layers by this recipe."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.recipe = recipe
    return model.bfloat16()


def exact(model: nn.Module) -> nn.Module:
    """The same model in float64, with plain products."""
    return copy.deepcopy(model).double()


def step(run: Callable[[Tensor], Tensor], x: Tensor, model: nn.Module, grad: Tensor) -> list[Tensor]:
    """The output and all gradients, of the input first."""
    x = x.detach().requires_grad_()
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def errors(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> list[float]:
    """Of each tensor, relative, Frobenius."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


@cache
def why_not() -> str:
    """Why this torch cannot multiply by scales of rows and columns on a CPU, "" if it can."""
    a, rows, columns = torch.ones(16, 16).to(E4M3), torch.ones(16, 1), torch.ones(1, 16)
    try:
        torch._scaled_mm(a, a.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=True)
    except (RuntimeError, ValueError) as refusal:
        return f"torch {torch.__version__}: {str(refusal).splitlines()[0]}"
    return ""


by_row = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")
