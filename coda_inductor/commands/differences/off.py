"""How far a tensor is off, of both backends, and what is allowed: one record for each tensor, and its verdict.

An error is the Frobenius norm of the difference over that of the reference, in float64; the norm itself where the
reference is 0. Coda's may be FACTOR times
Inductor's. Chance decides where Inductor's is less than a rounding, or a tensor has few numbers: so much is always
allowed, the floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 1.5  # of Inductor's error, which coda's may be
ROUNDINGS = 1  # as much as so many roundings of the tensor's dtype is always allowed; normal numbers rounded once: 0.43
FEW, ROUNDINGS_OF_FEW = 64, 8  # of fewer numbers: so many roundings of the narrowest dtype of the model, but no more
LUCK = 16  # than so many times Inductor's error, which of few numbers may be small by chance, or one rounding
NOISE = 10.0  # the factor where Inductor's own error exceeds the value: a gradient that is 0 but for roundings
LABELS = 0.01  # of integers and booleans: the part that may differ, as where two scores are nearly equal
ALONE = 16  # roundings of the tensor's dtype instead, where coda is compared with Inductor alone


@dataclass(frozen=True, slots=True)
class Off:
    """One backend's tensor against the reference. `lost`: not finite where the reference is, or otherwise not finite
    than it is; `at`: the place of the largest difference. Of integers the error is the part that differs; of a
    reference that is 0 (`zero`) it is the norm itself."""

    error: float
    largest: float
    lost: int
    at: tuple[int, ...]
    zero: bool = False


def off(found: Tensor, wanted: Tensor, device: torch.device) -> Off:
    """Compares tensors of one shape."""
    if not wanted.numel():
        return Off(0.0, 0.0, 0, ())
    found, wanted = found.to(device), wanted.to(device)
    if not _is_real(wanted):
        differs = found != wanted
        first = int(differs.flatten().to(torch.uint8).argmax())
        return Off(float(differs.double().mean()), float(differs.any()), 0, _place(first, wanted))
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    found, wanted = found.to(wide), wanted.to(wide)
    bad = lost(found, wanted)
    finite = found.isfinite() & wanted.isfinite()
    found, wanted = (torch.where(finite, x, 0.0) for x in (found, wanted))
    scale = float(wanted.abs().max()) or 1.0  # squares of large numbers are not finite
    difference = (found / scale - wanted / scale).abs()
    size, norm = (float(torch.linalg.vector_norm(x)) for x in (wanted / scale, difference))
    place = int((bad.to(torch.uint8) if bad.any() else difference).argmax())
    error = norm / size if size else norm
    return Off(error, float(difference.max()) * scale, int(bad.sum()), _place(place, wanted), zero=not size)


def lost(found: Tensor, wanted: Tensor) -> Tensor:
    """Where only one of two tensors is finite, or both are not in different ways."""
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return ~same & ~(found.isfinite() & wanted.isfinite())


def _is_real(x: Tensor) -> bool:
    """Or complex: has it numbers that are rounded?"""
    return x.is_floating_point() or x.is_complex()


def _place(flat: int, like: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), like.shape))


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: 2^-8 of bfloat16."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def floor(like: Tensor, narrowest: torch.dtype, ours: Off, theirs: Off | None) -> float:
    """The error that is always allowed to a tensor of this dtype and size; none where the reference is 0."""
    if not _is_real(like):
        return LABELS
    if ours.zero:
        return 0.0
    one, few = rounding(narrowest), 0.0
    if like.numel() < FEW:
        few = ROUNDINGS_OF_FEW * one if theirs is None else max(one, min(ROUNDINGS_OF_FEW * one, LUCK * theirs.error))
    return max((ROUNDINGS if theirs else ALONE) * rounding(like.dtype), few)


def allowed(theirs: Off | None, least: float) -> float:
    """Coda's error, at most: by Inductor's and the floor, or of what is compared with Inductor alone, by the floor."""
    if theirs is None:
        return least
    return max(least, (NOISE if theirs.zero or theirs.error >= 1 else FACTOR) * theirs.error)


def verdict(ours: Off, theirs: Off | None, least: float, same: bool, lost_by_us: int) -> str:
    """In words; `same`: both backends gave the same bits; `lost_by_us`: places that are lost by coda alone."""
    if lost_by_us:
        return f"WRONG: {lost_by_us} not finite" + (f", {theirs.lost} of Inductor's" if theirs and theirs.lost else "")
    if same:
        said = "the same bits as Inductor"
    elif theirs is None:
        said = f"{ours.error:.1e} from Inductor"
    elif not theirs.error:
        said = "exact, as Inductor" if not ours.error else "Inductor is exact"
    else:
        said = f"coda {times(ours, theirs)} of Inductor's error"
    if not ours.error <= allowed(theirs, least):
        return f"WRONG: {said}, allowed {allowed(theirs, least):.1e}"
    if ours.lost:
        return f"{said}; {ours.lost} not finite, as Inductor's"
    if theirs is not None and (theirs.zero or theirs.error >= 1) and theirs.error:
        return f"{said}; which exceeds the value"
    return said + ("; within the floor" if theirs and not same and theirs.error * FACTOR < ours.error else "")


def times(ours: Off, theirs: Off) -> str:
    """The ratio of two errors."""
    ratio = ours.error / theirs.error if theirs.error else math.inf
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x" if ratio < 1e6 else f"{ratio:.0e}x"
