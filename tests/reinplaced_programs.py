"""Programs in which an operation of a user's, or one that writes a part, overwrites an input, what is then there is
read, and the input is overwritten again. Inductor lets the operation write to the input itself: what is read must be
kept before the last write, for the backward and for the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from effect_reads import exchange_, scale_
from programs import Program
from torch import Tensor

Write = Callable[[Tensor, Tensor, Tensor], object]
"""To the cosines, the sines, or both; of h, at most."""
Read = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Any]]
"""What a product becomes by the tables, and what else is returned."""


def turned(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Two terms of a product y [tokens, half]; a kernel reads both tables beside one product, not beside two."""
    return y * cos - torch.tanh(y) * sin


FIRST: dict[str, Write] = {
    "scaled": lambda cos, sin, h: scale_(cos, 0.5),
    "exchanged": lambda cos, sin, h: exchange_(cos, sin),
    "computed": lambda cos, sin, h: cos.mul_(0.5),
    "rows": lambda cos, sin, h: cos[1:4].copy_(h[1:4, : cos.shape[1]]),
    "placed": lambda cos, sin, h: cos.index_put_((torch.tensor([3, 1]),), h[4:6, : cos.shape[1]]),
}
READS: dict[str, Read] = {
    "a_copy": lambda y, cos, sin: (turned(y, cos.clone(), sin.clone()), None),
    "a_value": lambda y, cos, sin: (turned(y, torch.tanh(cos), sin.clone()), None),
    "and_returns": lambda y, cos, sin: (turned(y, cos.clone(), sin.clone()), cos.clone()),
    "and_returns_rows": lambda y, cos, sin: (turned(y, cos.clone()[:], sin.clone()), cos[1:].clone()),
}
LAST: dict[str, Write] = {
    "left": lambda cos, sin, h: None,
    "copied": lambda cos, sin, h: cos.copy_(h[:, : cos.shape[1]]),
    "part": lambda cos, sin, h: cos[1:4].copy_(h[1:4, : cos.shape[1]]),
    "halved": lambda cos, sin, h: cos.mul_(0.5),
    "scaled": lambda cos, sin, h: scale_(cos, 0.5),
    "exchanged": lambda cos, sin, h: exchange_(cos, sin),
}


def reinplaced(first: str, read: str, last: str) -> Program:
    """The program of one of each."""

    def run(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Any:
        with torch.no_grad():
            FIRST[first](cos, sin, x)
        h, beside = READS[read](x @ w, cos, sin)
        with torch.no_grad():
            LAST[last](cos, sin, h)
        return h, beside

    run.__name__ = f"{first}_{read}_{last}"
    return Program(run, "x:TD w:DH | cos:TH sin:TH", 1, 1, ways=("inductor",))


PAIRS = [(r, w) for r in READS for w in LAST]
ALL = [([*FIRST][i % 3 if "rows" in r else i % 2], r, w) for i, (r, w) in enumerate(PAIRS)]
ALL += [(f, r, "halved") for f in ("rows", "placed") for r in READS]
REINPLACED = {(p := reinplaced(*names)).name: p for names in ALL}
"""Each way of reading with each last write, behind one of the first writes in turn."""
