"""An elementwise pass on CUDA tensors: its Triton kernel, compiled at the first call and kept by Triton."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from coda_inductor.codegen.source import module_name
from coda_inductor.codegen.triton_source import KIND, render
from coda_inductor.core.elementwise import LARGEST, Elementwise
from coda_inductor.core.errors import Unsupported
from coda_inductor.kernels.module import load_module
from coda_inductor.kernels.store import open_store

BLOCK = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
"""Of nineteen that were tried for what is written transposed, within 1 % of the fastest (5 % where three vectors are
read): casts of 16384 x 8192 in both layouts take 141 us, transposed alone 102, in blocks of 128 x 128 153 and 122
(H200; on an H100 those in both layouts take as long as before)."""
BLOCK_OF_LARGEST = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 2}
"""Of twelve the fastest for the largest of rows and columns: 93 us, where BLOCK takes 125, 16384 x 8192."""
BLOCK_OF_TILES = {"BLOCK_M": 1, "BLOCK_N": 2048, "num_warps": 4}
"""Of thirty-two that were tried by hand the fastest for what is written as it lies: 985 us for the gradient of 8192 x
128256 scores in bf16 (H200)."""
BLOCK_OF_ROWS = {"BLOCK_M": 1, "BLOCK_N": 4096, "num_warps": 4}
"""Of eleven the fastest for sums along rows of 128256: 526 us, the others 541 to 946 (H200, 8192 rows)."""


def block_of(record: Elementwise) -> dict[str, int]:
    """What a program takes at a time."""
    if record.along_rows:
        return BLOCK_OF_ROWS
    if all(out.over for out in record.outputs):
        return BLOCK_OF_LARGEST
    as_it_lies = not any(out.over or out.transposed for out in record.outputs)
    return BLOCK_OF_TILES if as_it_lies else BLOCK


class TritonKernel:
    """One record's kernel, for tensors of any M."""

    def __init__(self, record: Elementwise, cache_dir: str | None) -> None:
        """Writes the module to the store, for Triton reads its source. Raises Unsupported if it cannot, or if there is
        no Triton."""
        text = render(record)
        self.record = record
        self.largest = [i for i, out in enumerate(record.outputs) if out.over and out.taken == LARGEST]
        self.integers = {len(record.operands) + i for i in self.largest}
        """The arguments that the kernel compares as integers."""
        self.compiled = dict[tuple[object, ...], Any]()
        self.block = block_of(record)
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
        if begun := [o for i in self.largest if (o := outs[i]) is not None]:
            torch._foreach_zero_(begun)
        if m:
            columns = 1 if self.record.along_rows else -(-n // self.block["BLOCK_N"])
            grid = (-(-m // self.block["BLOCK_M"]) * columns, 1, 1)
            given = [*(x if x.is_contiguous() else x.contiguous() for x in inputs), *outs]
            self.launch(grid, given, m, n)

    def launch(self, grid: tuple[int, int, int], given: list[Tensor | None], m: int, n: int) -> None:
        """Launches what Triton has compiled for arguments of this kind. (Triton finds that by itself, too, and looks
        each pointer up: 24 to 58 us a launch, this 19 to 31, an H100's host.)"""
        addresses = [None if x is None else x.data_ptr() for x in given]
        aligned = not any(a & 15 for a in addresses if a)
        kind = (m == 1, m % 16 == 0, given[0].get_device(), *(a is None for a in addresses))  # type: ignore[union-attr]
        if aligned and kind in self.compiled:
            self.compiled[kind][grid](*addresses, m, n, self.block["BLOCK_M"], self.block["BLOCK_N"])
            return
        viewed = [x.view(torch.int32) if x is not None and i in self.integers else x for i, x in enumerate(given)]
        found = self.function[grid](*viewed, m, n, **self.block, enable_fp_fusion=False)
        if aligned:
            self.compiled[kind] = found


triton_kernel = cache(TritonKernel)
"""The kernel of a record and a cache directory, one for each in a process."""
