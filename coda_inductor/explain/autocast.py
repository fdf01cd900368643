"""torch.autocast("cuda") where CPU tensors stand for CUDA's: the CPU's autocast, with CUDA's float32 operations.

Both compute products in the lower precision. CUDA's list of operations in float32 is longer (norms, softmax, losses,
powers), so those get a kernel that widens what they read: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE in
torch 2.13's ATen/autocast_mode.h, without interpolations and distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
KEY = "AutocastCPU"

WIDE = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
    "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "binary_cross_entropy_with_logits", "logsumexp",
)  # fmt: skip
WIDE_RESULT = ("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "sum")
"""These take a dtype, which is float32 if they are given none."""


def wide(op: Any, sets_dtype: bool) -> Callable[..., Any]:
    """`op` as CUDA's autocast calls it."""
    inside = torch._C.DispatchKeySet(DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(inside):
            if sets_dtype and lower(args[0]) and kwargs.get("dtype") is None and not has_dtype(op, args):
                return op(*args, **kwargs, dtype=torch.float32)
            if sets_dtype:
                return op(*args, **kwargs)
            args, kwargs = tree_map_only(Tensor, lambda t: t.float() if lower(t) else t, (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def lower(x: Tensor) -> bool:
    """Is it of a precision that autocast widens?"""
    return x.dtype in (torch.float16, torch.bfloat16)


def has_dtype(op: Any, args: tuple[Any, ...]) -> bool:
    """Is a dtype among the positional arguments?"""
    named = zip((a.name for a in op._schema.arguments), args, strict=False)
    return any(name == "dtype" and value is not None for name, value in named)


def overloads(name: str, sets_dtype: bool) -> list[Any]:
    """An operation's overloads to widen: the functional ones, of which those that take a dtype if one is to be set."""
    packet = getattr(aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    found = [op for op in found if not op._schema.is_mutable and torch._C._dispatch_has_kernel(op.name())]
    found = [op for op in found if not sets_dtype or any(a.name == "dtype" for a in op._schema.arguments)]
    return [op for op in found if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), KEY)]  # the CPU's own


@contextmanager
def autocast_like_cuda() -> Iterator[None]:
    """Inside, an autocast for CUDA holds for CPU tensors."""
    original = torch.amp.autocast_mode.autocast.__init__

    def on_cpu(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type == "cuda":
            around = "cpu" if torch.is_autocast_enabled("cpu") else "cuda"
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(around)
        original(self, device_type, dtype, enabled, cache_enabled)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", on_cpu))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for names, sets_dtype in ((WIDE, False), (WIDE_RESULT, True)):
            for op in (op for name in names for op in overloads(name, sets_dtype)):
                library.impl(op, wide(op, sets_dtype), KEY)
        yield
