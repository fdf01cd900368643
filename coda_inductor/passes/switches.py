"""What may be switched off: laws, kinds of Regions, and passes that make none."""

from __future__ import annotations

from coda_inductor.codegen.target import Target
from coda_inductor.core.region import Region
from coda_inductor.core.settings import RETIRED_KINDS, Settings
from coda_inductor.passes.plain import PLAIN
from coda_inductor.rewrite.laws import LAWS

LAW_NAMES = frozenset(law.name for law in LAWS)
KINDS = {
    "pair": "two products in one tile, as gate and up",
    "summed": "two products in one sum, as the gradients of what gate and up read",
    "halves": "the halves of each head side by side, as for rotary embeddings",
    "statistic": "an epilogue that also sums, over its rows as for a norm or over the tokens",
    "pointwise": "any other epilogue",
    PLAIN: "a large product with nothing beside it, where cuBLAS is slower",
}
REGION_KINDS = frozenset(KINDS)
CASTS, TABLES, LAYOUTS, COMPLEX, ELEMENTWISE = "casts", "tables", "layouts", "complex", "elementwise"
UNDEFINED, ATTENTION, MASKS, WINDOWS, GROUPED = "undefined", "attention", "masks", "windows", "grouped"
POSITIONS, HEADS, PARTS, JOINED, EMBEDDING, LOSS, BLOCKS, PREFIX, FACTORS, ROWS = (
    "positions",
    "heads",
    "parts",
    "joined",
    "embedding",
    "loss",
    "blocks",
    "prefix",
    "factors",
    "rows",
)
PASSES = {
    TABLES: "no Region: sines and cosines that many elements read are computed once",
    CASTS: "no Region: what a product returns in float32 leaves it so; what is copied and rounded is rounded first; "
    "what is written in parts is made as a whole",
    ATTENTION: "no Region: attention that is written out, as products and a softmax, is torch's operation of attention",
    MASKS: "no Region: attention reads no mask that hides the later tokens, or nothing, as transformers builds it",
    WINDOWS: "no Region: attention by a mask that shows a window of tokens is torch's flash attention without a mask",
    POSITIONS: "no Region: what is added to scores by the place of a key, as in SAM, is features of queries and keys, "
    "not a mask",
    GROUPED: "no Region: keys and values that are repeated for several heads are read once by all of them, and nothing "
    "is copied for attention to read",
    COMPLEX: "no Region: products of complex numbers, as of rotary embeddings, are products of real ones; loops "
    "read and write pairs of neighbours as integers",
    ELEMENTWISE: "no Region: casts of one tensor to 8 bits, in rows and transposed, are one pass over memory; so are "
    "the largest of its rows and columns, and of long rows of scores the maximum and the sum of a softmax, and their "
    "gradient",
    PREFIX: "no Region: rows that stay beside those that a rotary embedding turns, as class tokens, are turned by 0",
    HEADS: "no Region: what is computed of a part of each head, as a rotary embedding, is computed of all parts and "
    "chosen",
    FACTORS: "no Region: a number that multiplies a product, as an adapter's, multiplies the smallest of its tensors; "
    "one that divides scores of an odd length multiplies the norm before them",
    PARTS: "no Region: a product that is read in parts, as gate and up of one weight, is a product for each part",
    JOINED: "no Region: a product of two tensors beside each other, as attention's and an MLP's, is a product of each",
    EMBEDDING: "no Region: the gradient of an embedding is written in the rows that occur",
    LOSS: "no Region: the gradient of a loss's scores leaves the epilogue that makes them, and they are not stored",
    BLOCKS: "no Region: scores of a head and its loss, or their gradient, are made of some rows at a time",
    UNDEFINED: "no Region: the gradient of a large output beside a loss is no tensor of zeros where none reaches it",
    ROWS: "no Region: loops of Inductor's that go over each row more than once hold it in registers",
    LAYOUTS: "no Region: what a convolution hands on to norms lies by token; gradients of outputs that lie so, as q, k "
    "and v, are expected so, in torch 2.13 all",
}
NAMES = LAW_NAMES | REGION_KINDS | PASSES.keys()
"""What _DISABLE and _ONLY may name."""


def laws_of(settings: Settings) -> frozenset[str]:
    """The laws that the derivation may use."""
    return frozenset(name for name in LAW_NAMES if allowed(name, LAW_NAMES, settings) and settings.numerics != "strict")


def longest_held(row: Target | None, settings: Settings) -> int:
    """The columns of the longest rows that Inductor's loops hold in registers on a target; 0: as Inductor chooses."""
    return row.longest_held if row and allowed(ROWS, NAMES, settings) else 0


def kind(region: Region) -> str:
    """The region's kind, as _DISABLE and _ONLY name it."""
    if region.half:
        return "halves"
    if region.summed:
        return "summed"
    return "pair" if len(region.products) > 1 else "statistic" if region.reductions else "pointwise"


def allowed(name: str, among: frozenset[str], settings: Settings) -> bool:
    """May a law or a kind of Region be used, or one of PASSES? _ONLY restricts the laws if it names one, and the kinds
    if it names one; if it names anything, a pass must be named, and if it names passes alone, nothing else is used."""
    only = settings.only & among
    if name in PASSES or settings.only <= PASSES.keys() | RETIRED_KINDS:
        only = settings.only
    return name not in settings.disable and (not only or name in only)
