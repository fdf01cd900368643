"""An elementwise pass on CUDA tensors: its Triton kernel, compiled at the first call and kept by Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from coda_inductor.codegen.source import module_name
from coda_inductor.codegen.triton_source import KIND, render
from coda_inductor.core.elementwise import Elementwise
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels.module import load_module
from coda_inductor.kernels.store import open_store

BLOCK_M, BLOCK_N, WARPS = 128, 128, 8  # the only ones that were tried


class TritonKernel:
    """One record's kernel, for tensors of any M."""

    def __init__(self, record: Elementwise, cache_dir: str | None) -> None:
        """Writes the module to the store, for Triton reads its source. Raises Unsupported if it cannot, or if there is
        no Triton."""
        text = render(record)
        self.record = record
        try:
            self.function = load_module(text, module_name(text, KIND), open_store(cache_dir)).kernel
        except ImportError as error:
            raise Unsupported(f"no kernel for elementwise pass {record.digest}: {error}") from error

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        """Computes the outputs, contiguous, from the inputs, on their device; `outs` of None are not read. Inputs are
        copied unless they are contiguous."""
        first = inputs[0]
        if first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return self(inputs, outs)
        m, n = inputs[self.record.tile].shape
        if m:
            grid = (-(-m // BLOCK_M) * -(-n // BLOCK_N),)
            given = [x if x.is_contiguous() else x.contiguous() for x in inputs]
            self.function[grid](
                *given, *outs, m, n, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=WARPS, enable_fp_fusion=False
            )


triton_kernel = cache(TritonKernel)
"""The kernel of a record and a cache directory, one for each in a process."""
