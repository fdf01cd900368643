"""A model run in float64 (or float32) by eager, with the random numbers that it draws in its own dtypes.

Casts to narrower dtypes, as those of autocast or of a norm that computes in float32, are left out: what remains is the
arithmetic that the model means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from coda_inductor.commands.differences.reached import widened
from coda_inductor.core.errors import Unsupported

aten = torch.ops.aten
DRAWN = frozenset({
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "poisson", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "random", "uniform", "binomial",
})  # fmt: skip
"""Operations of which all results are drawn; with "_" behind them those that draw in place."""
AS_THEY_ARE = frozenset({"view", "_scaled_mm"})
"""Operations of which a dtype that they are given is no rounding: other bits of one memory; an FP8 product's."""


class Draws(Exception):
    """Random numbers are drawn, and none were recorded."""


class Recorder(TorchDispatchMode):
    """Keeps a copy of what each operation drew, in order. Within, nothing else changes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}):
            self.drawn.append((str(func), tree_map_only(Tensor, lambda t: t.detach().clone(), out)))
        return out


class Wide(TorchDispatchMode):
    """Within, all that eager computes it computes in `dtype`, where its own is narrower. What is drawn is what was
    recorded; without a record raises Draws. Raises Unsupported for another order of draws, or for one within
    an operation that also computes."""

    def __init__(self, dtype: torch.dtype, drawn: list[tuple[str, Any]] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.drawn, self.next = dtype, drawn, 0

    def wide(self, x: Any) -> Any:
        """A tensor, or a dtype, that is narrower, in the wide dtype; else itself."""
        if isinstance(x, torch.dtype):
            return widened(x, self.dtype)
        return x.to(widened(x.dtype, self.dtype)) if isinstance(x, Tensor) else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            return self.repeated(func, args, kwargs)
        if name_of(func) not in AS_THEY_ARE:
            dtypes = lambda x: self.wide(x) if isinstance(x, torch.dtype) else x  # noqa: E731
            args, kwargs = tree_map(dtypes, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        return out if func.is_view or func._schema.is_mutable else tree_map(self.wide, out)

    def repeated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What was drawn in this place."""
        if self.drawn is None:
            raise Draws(str(func))
        recorded: str
        out: Any
        recorded, out = self.drawn[self.next] if self.next < len(self.drawn) else ("nothing", None)
        self.next += 1
        name = name_of(func)
        if recorded != str(func):
            raise Unsupported(f"{func} draws where {recorded} drew in the model's own dtypes")
        if name == "native_dropout":
            x, p = args[:2]
            return x * out[1] / (1.0 - p if p < 1 else 1.0), out[1].clone()
        if name.removesuffix("_") not in DRAWN:
            raise Unsupported(f"what {func} draws cannot be drawn again in another dtype")
        if func._schema.is_mutable:
            return args[0].copy_(out)
        return tree_map_only(Tensor, lambda t: self.wide(t.clone()), out)


def name_of(func: Any) -> str:
    """ "bernoulli_" of aten.bernoulli_.float."""
    return str(func._schema.name.split("::")[1])


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Does this call draw random numbers? Attention is said to, also without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    if any(a.name == "dropout_p" for a in func._schema.arguments):
        return bool(given.get("dropout_p", 0.0))
    return name_of(func) != "native_dropout" or bool(given["p"] and given.get("train", True) is not False)
