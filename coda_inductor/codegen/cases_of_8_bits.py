"""Regions of 8-bit matrices, as layers that multiply in 8 bits make them: scales of rows and columns, and the largest
values that the next casts need."""

from __future__ import annotations

from coda_inductor.core.region import Let, Operand, Product, Reduction, Region, Store
from coda_inductor.core.verify import verify

ROWS, COLUMNS = Operand("rows", "token", "f32"), Operand("columns", "feature", "f32")


def scaled(n: int, k: int) -> Region:
    """A product in 8 bits with a scale for each row and column, in fast accumulation."""
    return verify(Region(
        n, "e4m3", (Product("acc", 0, 1, k, "nk"),), (ROWS, COLUMNS),
        (Let("y", "scaled", ("acc", "rows", "columns")),), (Store("y", "bf16"),), (), fast=True,
    ))  # fmt: skip


def scaled_swiglu(n: int, k: int) -> Region:
    """SwiGLU of two such products, which share the scales of rows, and the largest of each row and column of it, as it
    is stored. The scales of weights are told as they are multiplied by."""
    return verify(Region(
        n, "e4m3", (Product("g", 0, 1, k, "nk"), Product("u", 0, 2, k, "nk")),
        (ROWS, Operand("of_gate", "feature", "f32"), Operand("of_up", "feature", "f32")),
        (Let("gate", "scaled", ("g", "rows", "of_gate")), Let("s", "sigmoid", ("gate",)),
         Let("silu", "mul", ("gate", "s")), Let("up", "scaled", ("u", "rows", "of_up")),
         Let("y", "mul", ("silu", "up")), Let("size", "abs", ("y",)), Let("stored", "bf16", ("size",))),
        (Store("y", "bf16"), Store("gate", "bf16"), Store("up", "bf16")),
        (Reduction("stored", "M", "max"), Reduction("stored", "N", "max")), fast=True,
    ))  # fmt: skip


def scaled_swiglu_backward(n: int, k: int) -> Region:
    """SwiGLU backwards in slow accumulation: both gradients, with the largest of each row and column of both."""
    return verify(Region(
        n, "e4m3", (Product("acc", 0, 1, k, "nk"),),
        (ROWS, COLUMNS, Operand("gate", "tile", "bf16"), Operand("up", "tile", "bf16")),
        (Let("dh", "scaled", ("acc", "rows", "columns")), Let("s", "sigmoid", ("gate",)),
         Let("dh_gate", "mul", ("dh", "gate")), Let("du", "mul", ("dh_gate", "s")),
         Let("dh_up", "mul", ("dh", "up")), Let("dh_up_s", "mul", ("dh_up", "s")),
         Let("less", "sub", (1.0, "s")), Let("gl", "mul", ("gate", "less")), Let("slope", "add", ("gl", 1.0)),
         Let("dg", "mul", ("dh_up_s", "slope")),
         Let("size_u", "abs", ("du",)), Let("stored_u", "bf16", ("size_u",)),
         Let("size_g", "abs", ("dg",)), Let("stored_g", "bf16", ("size_g",))),
        (Store("du", "bf16"), Store("dg", "bf16")),
        tuple(Reduction(value, over, "max") for value in ("stored_u", "stored_g") for over in ("M", "N")),
    ))  # fmt: skip


def scaled_norm_backward(n: int, k: int) -> Region:
    """e5m2 @ e4m3 with one scale for all, which columns share, in slow accumulation; what a residual adds, the gradient
    of a norm's gain, and the largest of each row of what is stored."""
    return verify(Region(
        n, "e5m2", (Product("acc", 0, 1, k, "nk"),),
        (COLUMNS, Operand("dy", "tile", "bf16"), Operand("sum", "token", "f32"), Operand("h", "tile", "bf16")),
        (Let("dz", "scaled", ("acc", 1.0, "columns")), Let("total", "add", ("dz", "dy")),
         Let("mean", "mul", ("sum", 1.0 / k)), Let("shifted", "add", ("mean", 1e-5)), Let("r", "rsqrt", ("shifted",)),
         Let("hr", "mul", ("h", "r")), Let("p", "mul", ("total", "hr")),
         Let("size", "abs", ("total",)), Let("stored", "bf16", ("size",))),
        (Store("total", "bf16"),), (Reduction("p", "M"), Reduction("stored", "N", "max")), right="e4m3",
    ))  # fmt: skip


EIGHT_BITS = (scaled, scaled_swiglu, scaled_swiglu_backward, scaled_norm_backward)
