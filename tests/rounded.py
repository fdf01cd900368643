"""Programs with worse rounding: where results move, a comparison in float64 says little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Rounded(TorchDispatchMode):
    """Under it each operation that makes a new tensor rounds a little worse."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = any(r.alias_info is not None for r in func._schema.returns)
        if not aliases and torch.Tag.nondeterministic_seeded not in func.tags:
            for x in tree_leaves(out):
                if isinstance(x, Tensor) and x.dtype == torch.float64:
                    x.mul_(1 + 1e-15 * torch.arange(x.numel(), dtype=x.dtype).view(x.shape).fmod(5))
        return out
