"""Regions that stand for the program: at least one for everything that a kernel can be asked for.

Each makes one of `n` columns and a depth of `k`, for tests, benchmarks and checks. (8 bits: cases_of_8_bits.py.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from coda_inductor.codegen.cases_of_8_bits import EIGHT_BITS
from coda_inductor.core.ops import OF_PAIRS, OPS, OVER_HEAD
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Let, Operand, Product, Reduction, Region, Store
from coda_inductor.core.verify import verify


def norm_producer(n: int, k: int) -> Region:
    """o-proj or down with a residual: the new stream, the stream times the next norm's gain, the sum of squares."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),),
        (Operand("residual", "tile", "bf16"), Operand("gain", "feature", "bf16")),
        (Let("h", "add", ("acc", "residual")), Let("z", "mul", ("h", "gain")), Let("hh", "mul", ("h", "h"))),
        (Store("h", "bf16"), Store("z", "bf16")), (Reduction("hh"),),
    ))  # fmt: skip


def sample_gate(n: int, k: int, tokens: int = 768) -> Region:
    """A residual stream with the gate of each sample, as of several images, the next norm's scale of each, its sums."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),),
        (Operand("stream", "tile", "bf16"), Operand("bias", "feature", "bf16"),
         Operand("gate", "sample", "bf16", tokens), Operand("scale", "sample", "f32", tokens)),
        (Let("y", "add", ("acc", "bias")), Let("gated", "mul", ("y", "gate")), Let("h", "add", ("stream", "gated")),
         Let("more", "add", ("scale", 1.0)), Let("z", "mul", ("h", "more")), Let("hh", "mul", ("h", "h"))),
        (Store("h", "bf16"), Store("z", "bf16")), (Reduction("h"), Reduction("hh"), Reduction("z", "M")),
    ))  # fmt: skip


def sample_swiglu(n: int, k: int, tokens: int = 768) -> Region:
    """Two products, each with a vector of every sample."""
    return verify(Region(
        n, "bf16", (Product("g", 0, 1, k, "nk"), Product("u", 0, 2, k, "nk")),
        (Operand("of_gate", "sample", "f32", tokens), Operand("of_up", "sample", "bf16", tokens)),
        (Let("gate", "add", ("g", "of_gate")), Let("up", "add", ("u", "of_up")), Let("s", "sigmoid", ("gate",)),
         Let("silu", "mul", ("gate", "s")), Let("y", "mul", ("silu", "up"))),
        (Store("y", "bf16"),), (),
    ))  # fmt: skip


def sample_sums(n: int, k: int, tokens: int = 768) -> Region:
    """The gradient of a scale and of a shift of each sample, beside sums over all tokens and over features."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),),
        (Operand("x", "tile", "bf16"), Operand("scale", "sample", "bf16", tokens), Operand("mean", "token", "f32")),
        (Let("d", "sub", ("x", "mean")), Let("dx", "mul", ("acc", "scale")), Let("ds", "mul", ("acc", "d")),
         Let("dxx", "mul", ("dx", "x"))),
        (Store("dx", "bf16"),),
        (Reduction("ds", "M", tokens=tokens), Reduction("acc", "M", tokens=tokens), Reduction("dx", "M"),
         Reduction("dxx")),
    ))  # fmt: skip


def nested_sums(n: int, k: int, tokens: int = 384) -> Region:
    """Sums over videos of three frames, over their frames, and again over videos: of two lengths."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (Operand("x", "tile", "bf16"),),
        (Let("y", "mul", ("acc", "x")),), (),
        (Reduction("y", "M", tokens=3 * tokens), Reduction("acc", "M", tokens=tokens),
         Reduction("acc", "M", tokens=3 * tokens)),
    ))  # fmt: skip


def token_scale(n: int, k: int) -> Region:
    """A product after a deferred norm: rsqrt(sum / k + eps) of the row."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (Operand("sum", "token", "f32"),),
        (Let("mean", "mul", ("sum", 1.0 / k)), Let("shifted", "add", ("mean", 1e-5)), Let("r", "rsqrt", ("shifted",)),
         Let("y", "mul", ("acc", "r"))),
        (Store("y", "bf16"),), (),
    ))  # fmt: skip


def swiglu(n: int, k: int, *, train: bool = True) -> Region:
    """gate and up after a deferred norm: silu(gate) * up, and both for the backward."""
    return verify(Region(
        n, "bf16", (Product("g", 0, 1, k, "nk"), Product("u", 0, 2, k, "nk")), (Operand("sum", "token", "f32"),),
        (Let("mean", "mul", ("sum", 1.0 / k)), Let("shifted", "add", ("mean", 1e-5)), Let("r", "rsqrt", ("shifted",)),
         Let("gate", "mul", ("g", "r")), Let("up", "mul", ("u", "r")), Let("s", "sigmoid", ("gate",)),
         Let("silu", "mul", ("gate", "s")), Let("y", "mul", ("silu", "up"))),
        (Store("y", "bf16"), *((Store("gate", "bf16"), Store("up", "bf16")) if train else ())), (),
    ))  # fmt: skip


def lane_sums(n: int, k: int) -> Region:
    """Two products with a bias for each column, summed: one sum that needs no mask and one that does."""
    return verify(Region(
        n, "bf16", (Product("g", 0, 1, k, "nk"), Product("u", 0, 2, k, "nk")), (Operand("bias", "feature", "bf16"),),
        (Let("biased", "add", ("g", "bias")), Let("y", "mul", ("biased", "u")), Let("yy", "mul", ("y", "y")),
         Let("t", "tanh", ("u",)), Let("e", "exp", ("t",))),
        (Store("y", "bf16"),), (Reduction("yy"), Reduction("e")),
    ))  # fmt: skip


def bias_gelu(n: int, k: int) -> Region:
    """GPT-2's first product (a weight [K, N]) with bias and tanh-GELU."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "kn"),), (Operand("bias", "feature", "bf16"),),
        (Let("x", "add", ("acc", "bias")), Let("xx", "mul", ("x", "x")), Let("xxx", "mul", ("xx", "x")),
         Let("c", "mul", ("xxx", 0.044715)), Let("i", "add", ("x", "c")), Let("j", "mul", ("i", 0.7978845608028654)),
         Let("t", "tanh", ("j",)), Let("t1", "add", ("t", 1.0)), Let("half", "mul", ("x", 0.5)),
         Let("y", "mul", ("half", "t1"))),
        (Store("y", "bf16"), Store("x", "bf16")), (),
    ))  # fmt: skip


def plain(n: int, k: int) -> Region:
    """The bare product, in float32."""
    return verify(Region(n, "f16", (Product("acc", 0, 1, k, "nk"),), (), (), (Store("acc", "f32"),), ()))


def weight_gradient(n: int, k: int) -> Region:
    """The bare product of two tensors of K rows, as dW = dZ^T X over the tokens."""
    of = Product("acc", 0, 1, k, "kn", a_layout="km")
    return verify(Region(n, "bf16", (of,), (), (), (Store("acc", "bf16"),), ()))


def weight_gradient_added(n: int, k: int) -> Region:
    """The same in float32, added to what lies there."""
    return verify(replace(weight_gradient(n, k), stores=(Store("acc", "f32"),), adds=True))


def turned_left(n: int, k: int) -> Region:
    """A left operand of [K, M], with everything that an epilogue may read, store and sum."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk", a_layout="km"),),
        (Operand("scale", "token", "f32"), Operand("gain", "feature", "bf16"), Operand("before", "tile", "f32")),
        (Let("scaled", "mul", ("acc", "scale")), Let("gained", "mul", ("scaled", "gain")),
         Let("total", "add", ("gained", "before"))),
        (Store("total", "f32"), Store("scaled", "bf16")), (Reduction("total"), Reduction("scaled", "M")),
    ))  # fmt: skip


def softmax_sum(n: int, k: int) -> Region:
    """Sums of exp(x - m): at a column past N it would add exp(-m), so it needs the mask. Nothing is stored."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (Operand("m", "token", "f32"),),
        (Let("x", "sub", ("acc", "m")), Let("e", "exp", ("x",))), (), (Reduction("e"), Reduction("acc")),
    ))  # fmt: skip


def scores(n: int, k: int) -> Region:
    """Capped scores: stored, added up, and the logsumexp of what is stored, to which columns past N must not add."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (),
        (Let("less", "mul", ("acc", 1 / 30)), Let("t", "tanh", ("less",)), Let("x", "mul", ("t", 30.0)),
         Let("stored", "bf16", ("x",))),
        (Store("x", "bf16"),), (Reduction("x"), Reduction("stored", "N", "logsumexp")),
    ))  # fmt: skip


def norm_backward(n: int, k: int) -> Region:
    """dz of a deferred norm, with the triangle's statistic: two tile operands, three vectors, one sum."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "kn"),),
        (Operand("dy", "tile", "bf16"), Operand("h", "tile", "bf16"), Operand("gain", "feature", "bf16"),
         Operand("r", "token", "f32"), Operand("t", "token", "f32")),
        (Let("dz", "mul", ("acc", "gain")), Let("scaled", "mul", ("dz", "r")), Let("ht", "mul", ("h", "t")),
         Let("dh", "sub", ("scaled", "ht")), Let("dx", "add", ("dh", "dy")), Let("p", "mul", ("dx", "h"))),
        (Store("dx", "bf16"),), (Reduction("p"),),
    ))  # fmt: skip


def norm_gradients(n: int, k: int) -> Region:
    """A norm's backward with the gradients of its gain and bias: sums over tokens that are 0 past the last one."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "kn"),),
        (Operand("dres", "tile", "bf16"), Operand("h", "tile", "bf16"), Operand("gain", "feature", "bf16"),
         Operand("r", "token", "f32"), Operand("c", "token", "f32")),
        (Let("dz", "mul", ("acc", "gain")), Let("scaled", "mul", ("dz", "r")), Let("hc", "mul", ("h", "c")),
         Let("dn", "sub", ("scaled", "hc")), Let("dh", "add", ("dres", "dn")), Let("normed", "mul", ("h", "r")),
         Let("dgain", "mul", ("normed", "acc"))),
        (Store("dh", "bf16"),), (Reduction("dgain", "M"), Reduction("acc", "M")),
    ))  # fmt: skip


def summed(n: int, k: int) -> Region:
    """The gradient of what keys and values both read: one accumulator of two products. K is a multiple of 64."""
    return verify(Region(
        n, "f16", (Product("acc", 0, 1, deep(k), "nk", (2, 3)),), (), (), (Store("acc", "f16"),), (Reduction("acc"),),
    ))  # fmt: skip


def summed_norm_backward(n: int, k: int) -> Region:
    """A norm's backward behind gate and up: the sum of both their gradients in one accumulator."""
    region = norm_gradients(n, k)
    return verify(replace(region, products=(Product("acc", 2, 1, deep(k), "kn", (0, 3)),)))


def unlike(n: int, k: int) -> Region:
    """An output projection of attention's result beside an MLP's, with a residual: two products of unlike K."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, deep(k), "nk", (2, 3, 2 * deep(k))),), (Operand("x", "tile", "bf16"),),
        (Let("y", "add", ("acc", "x")), Let("yy", "mul", ("y", "y"))), (Store("y", "bf16"),), (Reduction("yy"),),
    ))  # fmt: skip


def unlike_columns(n: int, k: int) -> Region:
    """The same of weights [K, N], and nothing beside it; the second is the less deep one."""
    products = (Product("acc", 1, 0, 2 * deep(k), "kn", (2, 3, deep(k))),)
    return verify(Region(n, "f16", products, (), (), (Store("acc", "f16"),), ()))


def adapter(n: int, k: int) -> Region:
    """A layer and its adapter of 16 features, behind a norm whose scale leaves both: a second K that fills no step."""
    products = (Product("acc", 0, 1, deep(k), "nk", (2, 3, 16)),)
    operands = Operand("s", "token", "f32"), Operand("h", "tile", "bf16")
    lets = Let("y", "mul", ("s", "acc")), Let("z", "add", ("y", "h"))
    return verify(Region(n, "bf16", products, operands, lets, (Store("z", "bf16"),), ()))


def deep(k: int) -> int:
    """About k, as two products in one sum want it."""
    return max(1, k // 64) * 64


def swiglu_backward(n: int, k: int) -> Region:
    """The gradients of gate and up from that of their product, the product anew, and the dots that a norm's backward
    takes of them: three stores, two sums."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "kn"),), (Operand("g", "tile", "bf16"), Operand("u", "tile", "bf16")),
        (Let("s", "sigmoid", ("g",)), Let("silu", "mul", ("g", "s")), Let("y", "mul", ("silu", "u")),
         Let("du", "mul", ("acc", "silu")), Let("less", "sub", (1.0, "s")), Let("gl", "mul", ("g", "less")),
         Let("more", "add", ("gl", 1.0)), Let("slope", "mul", ("s", "more")), Let("dy", "mul", ("acc", "u")),
         Let("dg", "mul", ("dy", "slope")), Let("dgg", "mul", ("dg", "g")), Let("duu", "mul", ("du", "u"))),
        (Store("dg", "bf16"), Store("du", "bf16"), Store("y", "bf16")), (Reduction("dgg"), Reduction("duu")),
    ))  # fmt: skip


def bias_sums(n: int, k: int) -> Region:
    """SiLU with a bias backwards, summed over tokens. A row past M reads the bias, so it needs the mask; the sum over
    features beside it needs none."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (Operand("x", "tile", "bf16"), Operand("bias", "feature", "bf16")),
        (Let("z", "add", ("x", "bias")), Let("s", "sigmoid", ("z",)), Let("y", "mul", ("z", "s")),
         Let("less", "sub", (1.0, "s")), Let("zl", "mul", ("z", "less")), Let("more", "add", ("zl", 1.0)),
         Let("slope", "mul", ("s", "more")), Let("dz", "mul", ("acc", "slope"))),
        (Store("dz", "bf16"),), (Reduction("dz", "M"), Reduction("y", "M"), Reduction("dz")),
    ))  # fmt: skip


def weighted_sums(n: int, k: int, dtype: str = "bf16") -> Region:
    """Sums over tokens that read a token vector: of 16 bits it does not end with 0 when M is odd."""
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (Operand("w", "token", dtype),),
        (Let("y", "mul", ("acc", "w")), Let("z", "add", ("acc", "w"))),
        (), (Reduction("y", "M"), Reduction("z", "M"), Reduction("y")),
    ))  # fmt: skip


TURNED = (
    Let("cos", "first", ("table",)), Let("sin", "second", ("table",)),
    Let("xc", "mul", ("x", "cos")), Let("ys", "mul", ("y", "sin")), Let("first_half", "sub", ("xc", "ys")),
    Let("yc", "mul", ("y", "cos")), Let("xs", "mul", ("x", "sin")), Let("second_half", "add", ("yc", "xs")),
)  # fmt: skip
"""The rotary embedding of x and y."""


def rotary(n: int, k: int, half: int = 64) -> Region:
    """q after a deferred norm, with a bias, through a rotary embedding whose halves share cosines and sines."""
    return verify(Region(
        heads(n, half) * half, "bf16", (Product("a", 0, 1, k, "nk"), Product("b", 0, 1, k, "nk")),
        (Operand("r", "token", "f32"), Operand("table", "table", "bf16"), Operand("bias", "feature", "bf16")),
        (Let("bias_a", "first", ("bias",)), Let("bias_b", "second", ("bias",)),
         Let("ar", "mul", ("a", "r")), Let("br", "mul", ("b", "r")),
         Let("x", "add", ("ar", "bias_a")), Let("y", "add", ("br", "bias_b")),
         *TURNED),
        (Store("first_half", "bf16", "second_half"),), (), half,
    ))  # fmt: skip


def rotary_neighbours(n: int, k: int, half: int = 64) -> Region:
    """As `rotary`, of neighbouring features."""
    return verify(replace(rotary(n, k, half), neighbours=True))


def rotary_neighbours_alone(n: int, k: int, half: int = 32) -> Region:
    """As `rotary_alone`, of neighbouring features."""
    return verify(replace(rotary_alone(n, k, half), neighbours=True))


def rotary_alone(n: int, k: int, half: int = 64) -> Region:
    """q through a rotary embedding, whose halves share cosines and sines, with nothing else."""
    return verify(Region(
        heads(n, half) * half, "bf16", (Product("x", 0, 1, k, "nk"), Product("y", 0, 1, k, "nk")),
        (Operand("table", "table", "bf16"),),
        TURNED,
        (Store("first_half", "bf16", "second_half"),), (), half,
    ))  # fmt: skip


def rotary_tables(n: int, k: int, half: int = 32) -> Region:
    """The same of a product alone, whose halves have tables of their own; and the halves as they were."""
    return verify(Region(
        heads(n, half) * half, "bf16", (Product("a", 0, 1, k, "nk"), Product("b", 0, 1, k, "nk")),
        (Operand("cosines", "table", "f32"), Operand("sines", "table", "bf16")),
        (Let("c0", "first", ("cosines",)), Let("c1", "second", ("cosines",)),
         Let("s0", "first", ("sines",)), Let("s1", "second", ("sines",)),
         Let("ac", "mul", ("a", "c0")), Let("bs", "mul", ("b", "s0")), Let("x", "sub", ("ac", "bs")),
         Let("bc", "mul", ("b", "c1")), Let("as1", "mul", ("a", "s1")), Let("y", "add", ("bc", "as1"))),
        (Store("x", "bf16", "y"), Store("a", "bf16", "b")), (), half,
    ))  # fmt: skip


def head_norm(n: int, k: int, head: int = 64) -> Region:
    """q after a deferred norm, with a bias, and a norm of each head with its weight."""
    return verify(Region(
        max(n // head, 1) * head, "bf16", (Product("acc", 0, 1, k, "nk"),),
        (Operand("r", "token", "f32"), Operand("bias", "feature", "bf16"), Operand("weight", "feature", "bf16")),
        (Let("ar", "mul", ("acc", "r")), Let("x", "add", ("ar", "bias")), Let("square", "mul", ("x", "x")),
         *_normalising("square", 0.0, head, head), Let("normed", "mul", ("x", "rstd")),
         Let("out", "mul", ("normed", "weight"))),
        (Store("out", "bf16"), Store("x", "bf16")), (Reduction("normed"), Reduction("square", "M")),
    ))  # fmt: skip


def _normalising(x: str, y: str | float, columns: int, head: int) -> tuple[Let, ...]:
    """1 / sqrt(mean over each head + eps), of the squares x, and y where the halves of heads are apart."""
    return (
        Let("total", "over_head", (x, y, float(columns))), Let("mean", "mul", ("total", 1 / head)),
        Let("more", "add", ("mean", 1e-6)), Let("rstd", "rsqrt", ("more",)),
    )  # fmt: skip


def rotary_norm(n: int, k: int, half: int = 64) -> Region:
    """q with a bias through a norm of each head with its weight, and a rotary embedding."""
    return verify(Region(
        heads(n, half) * half, "bf16", (Product("a", 0, 1, k, "nk"), Product("b", 0, 1, k, "nk")),
        (Operand("r", "token", "f32"), Operand("table", "table", "bf16"), Operand("weight", "feature", "bf16"),
         Operand("bias", "feature", "bf16")),
        (Let("bias_a", "first", ("bias",)), Let("bias_b", "second", ("bias",)),
         Let("as_a", "mul", ("a", "r")), Let("as_b", "mul", ("b", "r")),
         Let("ar", "add", ("as_a", "bias_a")), Let("br", "add", ("as_b", "bias_b")),
         Let("aa", "mul", ("ar", "ar")), Let("bb", "mul", ("br", "br")), *_normalising("aa", "bb", half, 2 * half),
         Let("wa", "first", ("weight",)), Let("wb", "second", ("weight",)),
         Let("an", "mul", ("ar", "rstd")), Let("bn", "mul", ("br", "rstd")),
         Let("x", "mul", ("an", "wa")), Let("y", "mul", ("bn", "wb")),
         *TURNED),
        (Store("first_half", "bf16", "second_half"),), (), half,
    ))  # fmt: skip


def rotary_norm_neighbours(n: int, k: int, half: int = 64) -> Region:
    """As `rotary_norm`, of neighbouring features."""
    return verify(replace(rotary_norm(n, k, half), neighbours=True))


def heads(n: int, half: int) -> int:
    """How many heads of two halves about n columns have, but at least an odd number of them."""
    return n // (2 * half) | 1


def every_op(n: int, k: int) -> Region:
    """One let of each operation on numbers in the vocabulary, and what it gives rounded, all added up."""
    lets = [Let("near", "add", ("acc", "tile")), Let("pos", "abs", ("near",)), Let("one", "add", ("pos", 1.0))]
    total = "one"
    for i, (name, op) in enumerate((name, op) for name, op in OPS.items() if name not in (*OF_PAIRS, OVER_HEAD)):
        argument = "one" if op.positive else "near"
        lets.append(Let(f"o{i}", name, (argument, 0.5, 0.25)[: op.arity]))
        lets += [Let(f"r{i}", "bf16", (f"o{i}",)), Let(f"t{i}", "add", (f"o{i}", f"r{i}"))]
        lets.append(Let(f"s{i}", "add", (total, f"t{i}")))
        total = f"s{i}"
    return verify(Region(
        n, "bf16", (Product("acc", 0, 1, k, "nk"),), (Operand("tile", "tile", "f32"),), tuple(lets),
        (Store(total, "f32"),), (Reduction(total),),
    ))  # fmt: skip


_MADE: tuple[Callable[[int, int], Region], ...] = (
    norm_producer, sample_gate, sample_swiglu, token_scale, swiglu, lane_sums, bias_gelu, plain, softmax_sum, scores,
    norm_backward, norm_gradients, summed, summed_norm_backward, unlike, unlike_columns, adapter, swiglu_backward,
    bias_sums, every_op, rotary, rotary_tables, rotary_neighbours, rotary_neighbours_alone, weight_gradient,
    turned_left, sample_sums, nested_sums, head_norm, rotary_norm, rotary_norm_neighbours,
)  # fmt: skip


def alone(of: str, over: str) -> Callable[[int, int], Region]:
    """A reduction of a product by itself."""

    def make(n: int, k: int) -> Region:
        return verify(Region(n, "bf16", (Product("acc", 0, 1, k, "nk"),), (), (), (), (Reduction("acc", over, of),)))  # type: ignore[arg-type]

    make.__name__ = f"{of}_over_{over.lower()}"
    return make


_REDUCED = {(r.of, r.over) for make in _MADE for r in make(64, 64).reductions}
_ALONE = tuple(alone(of, over) for of, row in REDUCTIONS.items() for over in row.sinks if (of, over) not in _REDUCED)
CASES = (*_MADE, *_ALONE, *EIGHT_BITS, weight_gradient_added)
"""Each row of core/reductions.py is in one."""
