"""The number formats that a Region reads, multiplies, computes in and stores: one row each.

A row is all that knows a format: `verify`, legality, the roundings among the scalar operations (ops.py), the terms that
a graph's casts become, and the imports of generated modules are read from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Format:
    """`cute` is the CuTeDSL type that a kernel reads and writes (None: no kernel does), `words` how a report calls it,
    `triton` Triton's name. `narrow`: it is computed with in float32, and a cast to it rounds."""

    torch: torch.dtype
    cute: str | None
    words: str
    triton: str
    narrow: bool = False


FORMATS = {
    "bf16": Format(torch.bfloat16, "BFloat16", "16 bits", "bfloat16", narrow=True),
    "f16": Format(torch.float16, "Float16", "16 bits", "float16", narrow=True),
    "f32": Format(torch.float32, "Float32", "float32", "float32"),
    "f64": Format(torch.float64, None, "float64", "float64"),
    "e4m3": Format(torch.float8_e4m3fn, "Float8E4M3FN", "8 bits", "float8e4nv"),
    "e5m2": Format(torch.float8_e5m2, "Float8E5M2", "8 bits", "float8e5"),
}

DTYPES = {name: row.torch for name, row in FORMATS.items()}
DTYPE_NAMES = {row.torch: name for name, row in FORMATS.items()}
NARROW = {row.torch: name for name, row in FORMATS.items() if row.narrow}
"""The formats that a cast rounds to, by dtype."""
ROUNDED = {name: dtype for dtype, name in NARROW.items()}
"""The dtypes that they round to, by the names of the operations."""
EIGHT_BITS = {row.torch: name for name, row in FORMATS.items() if row.torch.itemsize == 1}
"""The formats of 8 bits, by dtype: matrices have them, and results of casts; nothing is computed in them."""
