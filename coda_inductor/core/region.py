"""The Region: one output tile space [M, N], the products that share it, and everything done to it before it leaves.

What the derivation decided and what code generation consumes: one frozen, flat record for legality, cost, explain,
cache key and launch. M, names of call sites and source lines are not part of it. Its meaning is core/interpret.py. It
is a record and has no optimiser.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from coda_inductor.core.errors import BrokenInvariant

Extent = Literal["token", "feature", "sample", "tile", "table", "scalar"]
"""What an operand varies over: "token" is [M], "feature" is [N], "tile" is [M, N], "sample" is a vector over features
for each sample, of which row m reads its own; "scalar", of an elementwise pass alone, is one number. Where two products
are halves of heads, what varies over columns are pairs: a "feature" is [2 * N], as the heads lie, and a "table"
[M, 2 * half], in which column n of both halves reads the pair at 2 * (n % half). Operations `first` and `second` take
them apart."""


@dataclass(frozen=True, slots=True)
class Product:
    """The accumulator `name`[M, N] = A[M, K] @ B, in float32 (float64 for float64 operands).

    `a_layout` "mk" means that the tensor A is [M, K] (rows of tokens), "km" that it is [K, M] (what a weight's gradient
    sums over the tokens); `b_layout` "nk" that B is [N, K] (nn.Linear's weight), "kn" that it is [K, N] (Conv1D's); all
    with their last dimension contiguous. `a` and `b` index the operation's matrix inputs: products that share an `a`
    share its tensor. `plus`: the accumulator also adds A @ B of two further matrices (their indices) of the same
    layouts, as the gradient of what gate and up both read does; the third number is their K if that is another.
    """

    name: str
    a: int
    b: int
    k: int
    b_layout: Literal["nk", "kn"]
    plus: tuple[int, ...] | None = None
    a_layout: Literal["mk", "km"] = "mk"

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(a, b) of each product that is added up."""
        return tuple((a, b) for a, b, _ in self.terms)

    @property
    def terms(self) -> tuple[tuple[int, int, int], ...]:
        """(a, b, K) of each product that is added up."""
        first = self.a, self.b, self.k
        if self.plus is None:
            return (first,)
        return first, (self.plus[0], self.plus[1], self.plus[2] if len(self.plus) > 2 else self.k)


@dataclass(frozen=True, slots=True)
class Operand:
    """An epilogue input `name`, of `dtype` and `extent`, read as float32 (float64 in a float64 region). One of a sample
    is [ceil(M / tokens), N], and row m reads its row m // tokens."""

    name: str
    extent: Extent
    dtype: str
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Let:
    """name = op(*args). `op` is a key of core.ops.OPS; args are names defined earlier, or Python floats."""

    name: str
    op: str
    args: tuple[str | float, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """The value `value` leaves as a contiguous [M, N] tensor of `dtype`; in a Region of halves, `value` and `second`
    leave as one [M, 2 * N], as the halves of its heads lie."""

    value: str
    dtype: str
    second: str = ""


@dataclass(frozen=True, slots=True)
class Reduction:
    """The row `of` REDUCTIONS (reductions.py) taken of `value` over N or over M; finished: a float32 [M] or [N] vector
    (float64 in a float64 region). With `tokens`, over the M rows of each sample of so many: [M / tokens * N], one
    sample behind the other."""

    value: str
    over: Literal["N", "M"] = "N"
    of: str = "sum"
    tokens: int = 0


SAMPLE = 128
"""Samples come in multiples of so many tokens: each target has tables of tiles of as many rows, which are then all of
one sample."""


def _written(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields, but for two that only later Regions have, where they are not set: what is tuned is known by the texts
    of before."""
    return {name: value for name, value in fields if name not in ("tokens", "adds") or value}


class Keyed:
    """A frozen record, of fields that JSON can write, that is named by its content."""

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal text, equal kernel."""
        fields = dataclasses.asdict(self, dict_factory=_written)  # type: ignore[call-overload]
        return json.dumps(fields, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Names the content: 16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Region(Keyed):
    """products -> lets -> stores and reductions, all over one [M, N].

    With `half`, the two products are the two halves of each head: of one weight [2 * N, K], whose rows are blocks of
    `half`, the first takes the even blocks and the second the odd ones (as rotary embeddings pair features). If
    `neighbours`, the blocks are single rows: a pair of a head is two features beside each other.

    The operation's inputs are the matrices (as many as the products index), then the operands, in this order; its
    outputs are the stores, then the reductions. `dtype` is that of all matrices, or of the left ones if the `right`
    ones have another. `fast`: 8-bit matrices are added up in the tensor cores' own accumulators, of fewer bits. `adds`:
    its one store, of a product and no more, is added to what lies in its memory.
    """

    n: int
    dtype: str
    products: tuple[Product, ...]
    operands: tuple[Operand, ...]
    lets: tuple[Let, ...]
    stores: tuple[Store, ...]
    reductions: tuple[Reduction, ...]
    half: int = 0
    right: str = ""
    fast: bool = False
    neighbours: bool = False
    adds: bool = False

    @property
    def matrices(self) -> int:
        """How many of the inputs are matrices."""
        return 1 + max(max(pair) for p in self.products for pair in p.pairs)

    @property
    def summed(self) -> bool:
        """Does its one accumulator add up two products?"""
        return self.products[0].plus is not None

    @property
    def unlike(self) -> bool:
        """Are these of two K?"""
        return len({k for p in self.products for _, _, k in p.terms}) > 1

    @property
    def spanned(self) -> bool:
        """Does its accumulator add up two products of the same K, so that one descriptor reads both left matrices, and
        one both right ones?"""
        return self.summed and not self.unlike

    @property
    def depth(self) -> int:
        """Over how many numbers one accumulator sums."""
        return sum(k for _, _, k in self.products[0].terms)

    @property
    def ks(self) -> dict[int, int]:
        """K of each matrix."""
        return {i: k for p in self.products for a, b, k in p.terms for i in (a, b)}

    @property
    def is_plain(self) -> bool:
        """Does it only store one product?"""
        alone = len(self.products) == len(self.stores) == 1 and not self.summed
        return alone and not (self.operands or self.lets or self.reductions)

    @property
    def m_axis(self) -> tuple[int, int]:
        """Which input, and which dimension of it, M is."""
        p = self.products[0]
        return p.a, 0 if p.a_layout == "mk" else 1

    def m(self, inputs: Sequence[torch.Tensor]) -> Any:
        """M of these inputs: an int, of fake tensors perhaps a symbol. Raises BrokenInvariant if they are no whole
        samples."""
        i, dim = self.m_axis
        m = inputs[i].shape[dim]
        if isinstance(m, int) and m % self.multiple:
            raise BrokenInvariant(f"{m} rows are no samples of {self.multiple} tokens")
        return m

    def shape(self, operand: Operand, m: int) -> tuple[int, ...]:
        """An operand's, beside `m` rows."""
        columns = {"tile": self.n, "table": 2 * self.half, "sample": self.n}
        rows = -(-m // operand.tokens) if operand.tokens else m
        if operand.extent in columns:
            return rows, columns[operand.extent]
        return (m,) if operand.extent == "token" else (self.width,)

    @property
    def multiple(self) -> int:
        """M is a multiple of it: the tokens of the samples of each of which it takes a sum; 1 if it takes none."""
        return math.lcm(*(r.tokens or 1 for r in self.reductions))

    def rows(self, m: int) -> int:
        """At least `m`, as it can have: whole samples, multiples of 8 where the left operand's rows are M numbers."""
        of = math.lcm(self.multiple, 8 if self.m_axis[1] else 1)
        return -(-m // of) * of

    def length(self, total: Reduction, m: Any) -> Any:
        """Of a finished reduction, of `m` rows."""
        if total.over == "N":
            return m
        return self.n * (m // total.tokens) if total.tokens else self.n

    @property
    def width(self) -> int:
        """The columns of what is stored."""
        return 2 * self.n if self.half else self.n

    @property
    def block(self) -> int:
        """How many rows of the weight one product takes before the other takes as many; 0 if they are no halves."""
        return 1 if self.neighbours else self.half

    @property
    def halved(self) -> bool:
        """Are the two features of a pair half a head apart? A kernel then reads the weight, and stores, in halves."""
        return bool(self.half) and not self.neighbours

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of the left and of the right matrices."""
        return self.dtype, self.right or self.dtype

    @property
    def compute(self) -> torch.dtype:
        """The dtype of accumulators and of all arithmetic between product and store."""
        return torch.float64 if self.dtype == "f64" else torch.float32


def parse(text: str) -> Region:
    """The Region that `Region.text` wrote."""
    d: dict[str, Any] = json.loads(text)
    return Region(
        n=d["n"],
        dtype=d["dtype"],
        products=tuple(Product(**{**p, "plus": tuple(p["plus"]) if p.get("plus") else None}) for p in d["products"]),
        operands=tuple(Operand(**o) for o in d["operands"]),
        lets=tuple(Let(x["name"], x["op"], tuple(x["args"])) for x in d["lets"]),
        stores=tuple(Store(**s) for s in d["stores"]),
        reductions=tuple(Reduction(**r) for r in d["reductions"]),
        half=d["half"],
        right=d["right"],
        fast=d["fast"],
        neighbours=d["neighbours"],
        adds=d.get("adds", False),
    )
