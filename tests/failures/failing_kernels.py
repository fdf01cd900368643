"""Kernels that fail, in one way each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compiling import Interpreted

from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import Region


def build_fails(region: Region, config: Config, directory: Path, **_: Any) -> Any:
    raise Unsupported(f"no kernel for {config}: RuntimeError: nvvm says no")


class Wrong(Interpreted):
    """A kernel whose numbers are off by a hundredth."""

    def __call__(self, inputs: Any, outs: Any) -> None:
        super().__call__(inputs, outs)
        for out in outs:
            if out is not None:
                out.mul_(1.01)


class OutOfMemory(Interpreted):
    def __call__(self, inputs: Any, outs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Illegal(Interpreted):
    def __call__(self, inputs: Any, outs: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Nan(Interpreted):
    """A kernel that writes nothing."""

    def __call__(self, inputs: Any, outs: Any) -> None:
        return
