"""How many bytes of tensors are alive at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """The most bytes of tensors made within that are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.seen = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is(t)}
        out = function(*args, **kwargs or {})
        for t in filter(_is, torch.utils._pytree.tree_leaves(out)):
            storage = t.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return out

    def _gone(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.now -= nbytes


def _is(x: object) -> bool:
    return isinstance(x, Tensor)
