"""Is a kernel right on this card? Its outputs at three sizes of M, compared with the interpreter's.

A target that was never run on a card (`tested` is False in its row) has to show this of each kernel before a graph gets
it (launch.py), and `coda-inductor doctor --check` prints it. Outputs are poisoned with NaN, inputs are drawn anew, and
every number is compared. What passed is kept on disk. It is believed only while everything that it depends on is the
same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coda_inductor.codegen import target
from coda_inductor.codegen.target import Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.blocks import into, outputs, pitch, poison
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.reductions import REDUCTIONS
from coda_inductor.core.region import Region
from coda_inductor.kernels import library, record, store
from coda_inductor.kernels.entries import PROOFS

log = logging.getLogger("coda_inductor")

TOLERANCE = 4e-3  # relative Frobenius: one rounding to bf16 is 2e-3, and an output may be rounded twice
FAST_TOLERANCE = 1.6e-2  # SwiGLU of two products in the tensor cores' own accumulators was 2e-3 to 6.4e-3 off (H100)
# One number may be off by so many times the tolerance, of its own size and the output's root mean square together: it
# finds one wrong row of thousands, which the norm of all of them hides.
PEAK = 8
SIZES = (1, 37, 4097)  # of M: one row, a part of a tile, many tiles and a part of one
TIMES = 3  # that it runs at the last size: a race does not show each time
WAVES = 2  # so many times as many tiles as the card has multiprocessors, so that blocks take more than one
BYTES = 1 << 30  # that the last size may take for inputs and outputs
LEAST = 513  # of the last size, whatever it takes
PIECE = 1 << 24  # numbers at a time
GUARD = 4096  # bytes before and behind each output that must stay as they are
FAINT = 2**-6  # what tiles are multiplied by at the middle size, so that they hide no product


class Error(NamedTuple):
    """How far a kernel is off at M rows: the relative error (Frobenius) of its worst output, and the most that one
    number is off, as a part of its own size and the output's root mean square together. NaN: not written, or NaN."""

    m: int
    relative: float
    peak: float

    def within(self, allowed: float) -> bool:
        """Is it right? (NaN is not.)"""
        return self.relative < allowed and self.peak < PEAK * allowed

    def __str__(self) -> str:
        return f"at M = {self.m} relative error {self.relative:.1e}, of one number {self.peak:.1e}"


def allowed(region: Region) -> float:
    """The relative error that a kernel of the Region may have."""
    return FAST_TOLERANCE if region.fast else TOLERANCE


def prove(region: Region, config: Config, row: Target, kernel: Any, directory: Path, *, swapped: bool = False) -> None:
    """Raises Unsupported, with the numbers, unless the kernel is right on the current card: as it is remembered, or
    else as it is seen now."""
    place = library.folder(region, config, directory, swapped=swapped, target=row)
    facts = depends_on(region, config, row, place, swapped=swapped)
    if facts is not None and remembered(directory, facts, allowed(region)):
        return
    errors = list[Error]()
    for error in measured(region, config, kernel, swapped=swapped):
        if not error.within(allowed(region)):
            order = ", its second weight first" if swapped else ""
            numbers = f"{error}, {allowed(region)} is allowed"
            what = f"region {region.digest} in {config}{order} is wrong on this card: {numbers}"
            raise Unsupported(f"{what}; please report what `coda-inductor doctor --check` prints")
        errors.append(error)
    if facts is not None:
        remember(directory, facts, errors)


def known(region: Region, config: Config, row: Target, directory: Path, *, swapped: bool = False) -> bool:
    """Is it remembered that the kernel is right here?"""
    place = library.folder(region, config, directory, swapped=swapped, target=row)
    facts = depends_on(region, config, row, place, swapped=swapped)
    return facts is not None and remembered(directory, facts, allowed(region))


# ---- what is seen


def measured(region: Region, config: Config, kernel: Any, *, swapped: bool = False) -> Iterator[Error]:
    """Runs the kernel at each size and says how far it is off. Allocates, and waits for the card. Raises Unsupported if
    the kernel cannot be launched, or there is nothing to compare."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with torch.no_grad():
        for turn, m in enumerate(sizes(region, config, multiprocessors(device))):
            times = TIMES if turn == len(SIZES) - 1 else 1
            try:
                yield compared(region, kernel, m, device, swapped=swapped, turn=turn, times=times)
            except Unsupported:
                raise
            except torch.OutOfMemoryError as error:
                what = f"region {region.digest} in {config} cannot be checked: no memory for M = {m}"
                raise Unsupported(what, hint="compile before memory is filled") from error
            except Exception as error:  # a driver that refuses it, an illegal address: there is no such kernel here
                what = f"region {region.digest} in {config} fails at M = {m}: {type(error).__name__}: {error}"
                raise Unsupported(what) from error


def compared(
    region: Region, kernel: Any, m: int, device: torch.device, *, swapped: bool, turn: int, times: int = 1
) -> Error:
    """How far the kernel is off at `m` rows, in the worst of so many `times`. `turn`: which of two summed matrices lies
    first."""
    inputs, wanted = drawn(region, m, device, swapped=swapped, turn=turn)
    off, before = list[tuple[float, float]](), [x.clone() for x in inputs]
    for _ in range(times):
        guarded = [_guarded(out) for out in wanted]
        poison(region, found := [out for out, _ in guarded])
        kernel.prepare(inputs, found)(0, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        off += [difference(*pair) for pair in zip(found, wanted, strict=True)]
        if not all(bool((edge == MARK).all()) for _, edges in guarded for edge in edges):
            raise Unsupported(f"region {region.digest} at M = {m} writes beside its outputs")
    if not all(torch.equal(_bits(x), _bits(y)) for x, y in zip(inputs, before, strict=True)):
        raise Unsupported(f"region {region.digest} at M = {m} overwrites what it reads")
    relatives, peaks = zip(*off, strict=True)
    return Error(m, _worst(relatives), _worst(peaks))


MARK = 0x5A


def _guarded(like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(an output as that one; the bytes before and behind it, which are marked)."""
    size = like.numel() * like.element_size()
    whole = torch.full((GUARD + -(-size // 16) * 16 + GUARD,), MARK, dtype=torch.uint8, device=like.device)
    out = whole[GUARD : GUARD + size].view(like.dtype).view(like.shape)
    return out, [whole[:GUARD], whole[GUARD + size :]]


def _bits(x: Tensor) -> Tensor:
    """The tensor as bytes: NaN equals itself."""
    return x.contiguous().view(torch.uint8)


def _worst(numbers: Sequence[float]) -> float:
    """The largest, NaN if one is NaN."""
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(relative error of all of it, the most that one number is off) as Error has them; NaN if anything is NaN."""
    rows = max(1, PIECE // max(1, wanted.numel() // len(wanted)))
    square = size = torch.zeros((), dtype=torch.float64, device=wanted.device)
    for x, y in zip(found.split(rows), wanted.split(rows), strict=True):
        x, y = x.double(), y.double()
        square, size = square + (x - y).square().sum(), size + y.square().sum()
    mean = (size / wanted.numel()).sqrt().clamp_min(1e-30)
    peaks = [
        ((x.double() - y.double()).abs() / (y.double().abs() + mean)).max()
        for x, y in zip(found.split(rows), wanted.split(rows), strict=True)
    ]
    return float((square / size.clamp_min(1e-60)).sqrt()), float(torch.stack(peaks).max())


def sizes(region: Region, config: Config, blocks: int) -> tuple[int, ...]:
    """SIZES, the last of them larger where the card would take few tiles a block, and smaller where it would take more
    than BYTES. Multiples of 8, none of a tile, where a row of the left operand is M numbers; of samples where it sums
    each."""
    columns = -(-region.n * len(region.products) // config.tile_n)
    last = max(SIZES[-1], (WAVES * blocks // columns + 1) * config.tile_m)
    last = max(last, *(o.tokens + 1 for o in region.operands), 0)  # of two samples
    last = max(LEAST, min(last, BYTES // row_bytes(region)) // 64 * 64 + 1)
    last = max(last, 2 * region.multiple if region.multiple > 1 else 0)  # of two samples, how large they may be
    return tuple(region.rows(m) for m in (*SIZES[:-1], last))


def row_bytes(region: Region) -> int:
    """Of all inputs and outputs that have a row for each of M, the outputs twice; of one row."""
    left = {a: k for p in region.products for a, _, k in p.terms}
    total = sum(left.values()) * DTYPES[region.dtype].itemsize
    columns = {"tile": region.n, "table": 2 * region.half, "token": 1}
    total += sum(columns.get(o.extent, 0) * DTYPES[o.dtype].itemsize for o in region.operands)
    return total + 2 * sum(region.width * DTYPES[s.dtype].itemsize for s in region.stores) + 8 * len(region.reductions)


def multiprocessors(device: torch.device) -> int:
    """Of the card; 1 without one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# ---- what it is compared on


def drawn(
    region: Region, m: int, device: torch.device, *, swapped: bool, turn: int
) -> tuple[list[Tensor], list[Tensor]]:
    """(random inputs, what the interpreter makes of them). Where that is not finite, as a logarithm of a product that
    may be negative, all numbers are drawn positive. Raises Unsupported if it is not finite then either."""
    for positive in (False, True):
        seed = f"{region.digest} {m} {swapped} {positive}"
        draw = _Draw(device, int(hashlib.sha256(seed.encode()).hexdigest()[:15], 16), positive)
        inputs = draw.inputs(region, m, swapped=swapped, turn=turn)
        into(region, inputs, wanted := outputs(region, inputs))
        if all(
            bool(piece.float().isfinite().all())
            for out in wanted
            for piece in out.split(max(1, PIECE // out[0].numel()))
        ):
            return inputs, wanted
    raise Unsupported(f"region {region.digest} cannot be checked: random numbers give no finite results")


def random_inputs(region: Region, m: int, device: torch.device) -> list[Tensor]:
    """Random inputs of `m` rows, as a comparison draws them."""
    return _Draw(device, 0, positive=False).inputs(region, m, swapped=False, turn=0)


class _Draw:
    """Random numbers of a generator of its own: the program's are what they were."""

    def __init__(self, device: torch.device, seed: int, positive: bool) -> None:
        self.device, self.positive = device, positive
        self.generator = torch.Generator(device).manual_seed(seed)

    def inputs(self, region: Region, m: int, *, swapped: bool, turn: int) -> list[Tensor]:
        """Matrices, then operands, about 1 in size; token vectors are positive. Two weights lie in one allocation, the
        second one first if `swapped`; of two summed pairs the `turn` says which lies first."""
        made = dict[int, Tensor]()
        of_left, of_right = (DTYPES[dtype] for dtype in region.dtypes)
        first, *others = region.products
        lefts, rights = [first.a], list(dict.fromkeys(b for p in region.products for _, b in p.pairs))
        if region.summed:
            lefts = list(dict.fromkeys(a for a, _ in first.pairs))
            lefts, rights = (lefts[::-1] if turn & 1 else lefts), (rights if turn & 1 else rights[::-1])
        elif others and swapped:
            rights = rights[::-1]
        k = max(region.ks.values())
        left = (m, k) if first.a_layout == "mk" else (k, m)
        right = (region.width, k) if first.b_layout == "nk" else (k, region.n)
        made |= zip(lefts, self.numbers((len(lefts), *left), of_left), strict=True)
        scale = 1 / k if self.positive else k**-0.5
        made |= zip(rights, self.numbers((len(rights), *right), of_right, scale), strict=True)
        if region.unlike:  # parts of wider ones: most then lie with gaps
            of_k = {i: 1 if i in lefts or first.b_layout == "nk" else 0 for i in made}
            made = {i: x.narrow(of_k[i], 0, region.ks[i]) for i, x in made.items()}
        operands = [
            self.numbers(region.shape(o, m), DTYPES[o.dtype], least=0.5 * (o.extent == "token"))
            for o in region.operands
        ]
        if turn == 1:  # what is added to a product is small, and what is a maximum may be negative everywhere
            for o, x in zip(region.operands, operands, strict=True):
                x.mul_(FAINT if o.extent == "tile" else 1.0)
            if any(not REDUCTIONS[r.of].linear for r in region.reductions):
                for i, x in made.items():
                    x.copy_(-x.float().abs() if i in rights else x.float().abs())
        return [made[i] for i in range(region.matrices)] + operands

    def numbers(self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0, least: float = 0.0) -> Tensor:
        """Normal ones, of which only PIECE are wider than `dtype` at a time; from `least` on if that is not 0."""
        *rows, columns = shape
        apart = pitch(columns) if rows else columns
        out = torch.empty((*rows, apart), dtype=dtype, device=self.device)
        for piece in out.view(-1).split(PIECE):
            value = torch.randn(piece.shape, generator=self.generator, device=self.device) * scale
            piece.copy_(value.abs() + least if least or self.positive else value)
        return out[..., :columns]


# ---- what is kept of it


def depends_on(region: Region, config: Config, row: Target, place: Path, *, swapped: bool) -> dict[str, Any] | None:
    """All that a proof depends on: the kernel's machine code in `place`, the card and its driver, sources, packages.
    None if there is no machine code on disk: nothing is remembered then."""
    code = machine_code(place)
    if not code:
        return None
    return {
        "text": region.text, "config": str(config), "swapped": swapped, "target": row.name, "card": card(),
        "driver": driver(), "versions": target.versions(), "sources": record.sources_digest(),
        "made_by": library.made_by(), "code": code,
    }  # fmt: skip


def machine_code(place: Path) -> str:
    """The digest of the compiled files of a kernel; empty if there are none."""
    files = sorted([*place.glob("*/*.o"), *place.glob("*/*.so")])
    try:
        parts = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    except OSError:
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def card() -> str:
    """The current GPU: its name, capability and multiprocessors."""
    if not torch.cuda.is_available():
        return "none"
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.name} {found.major}.{found.minor} {found.multi_processor_count}"


def driver() -> str:
    """What NVIDIA's kernel driver says of itself; empty without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().strip()
    except OSError:
        return ""


def sealed(facts: dict[str, Any], errors: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A proof as it is written: with a digest of all of it, so that one that was edited is none."""
    found = {**facts, "errors": [list(error) for error in errors]}
    return {**found, "seal": hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()}


def path_of(directory: Path, facts: dict[str, Any]) -> Path:
    """Where the proof of these facts lies."""
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return directory / PROOFS / f"{name}.json"


def remember(directory: Path, facts: dict[str, Any], errors: Sequence[Error]) -> None:
    """Keeps a proof. One that cannot be kept is made again by the next process."""
    path = path_of(directory, facts)
    try:
        store.write(path, json.dumps(sealed(facts, errors), indent=1, sort_keys=True) + "\n")
    except Unsupported as error:
        log.info("a proof is not kept: %s", error)


def remembered(directory: Path, facts: dict[str, Any], within: float) -> bool:
    """Is there a proof of exactly these facts, as it was written, whose every error is allowed?"""
    path = path_of(directory, facts)
    try:
        found = json.loads(path.read_text())
        errors = [Error(int(m), float(relative), float(peak)) for m, relative, peak in found["errors"]]
        right = len(errors) == len(SIZES) and all(error.within(within) for error in errors)
        if not right or found != sealed(facts, errors):
            return False
    except (OSError, ValueError, TypeError, KeyError):
        return False
    with contextlib.suppress(OSError):
        os.utime(path)  # reading it is use (limit.py)
    return True
