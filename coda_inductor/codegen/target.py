"""The machines that kernels are made for, each a row of facts; and is there one here, and a compiler for it?

Looks at versions. Only `capability` imports a library, torch, so that the command line may read the rows.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from coda_inductor.codegen.tiles import Config, tiles
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.versions import numbers

if TYPE_CHECKING:
    import torch


UNTESTED = "compiled, not yet run on such a card"
Tiles = tuple[Config, ...]
"""Those worth timing, the likely best first."""


@dataclass(frozen=True, slots=True)
class Target:
    """The facts of a machine. The rules that ask for them are in legality.py."""

    name: str  # as settings and graphs have it
    capability: tuple[int, int]
    tested: bool  # was run on a card of it; else a kernel must first prove itself on the card
    environment: tuple[str, ...]  # NAME=value: under which the compiler compiles for it
    mainloop: str  # of mainloops.py
    device: str  # the module of device code that its generated modules import from (codegen/)
    overlaps: bool  # may a kernel begin while the one before it ends? Its device code then has device._Overlapping
    shared_memory: int  # bytes that a block may use
    least_stages: int  # steps that the mainloop must have room to load ahead
    max_operands: int  # vectors and tiles together that an epilogue may read
    multiplies: tuple[str, ...]  # dtypes of matrices
    mixes: bool  # may the two matrices of a product be of different 8-bit dtypes?
    unlike: bool  # may two products in one sum be of unlike K? Its GEMM class then loads with `load_tma`
    halves: tuple[int, ...]  # of heads: the widths that two products may be the halves of
    large: Tiles  # for more than 1024 rows; what fits into none of these is no Region
    deep: Tiles  # for widths of `deep_least` and more, and sums as deep
    deep_least: int
    plain: Tiles  # for the same, with nothing beside the product
    adds: Tiles  # for a product that is added to what lies in memory; empty: no kernel does
    heavy: Tiles  # for two tile operands and more: the tiles that spill least come first
    heads: Tiles  # for halves of heads
    fast: Tiles  # for 8-bit matrices that are added up in the tensor cores' own accumulators
    slow: Tiles  # for those that are not: a second accumulator takes as many registers again
    slow_heavy: Tiles  # for the same with two tile operands and more
    middle: Tiles  # for up to 1024 rows
    small: Tiles  # for up to 256 rows
    tiny: Tiles  # for up to 64 rows
    multiprocessors: int = 0  # each of which works at one tile at a time
    even: Tiles = ()  # for many rows of 16 bits, where those of the table would leave many of them idle at the end
    longest_held: int = 0  # columns of the rows that Inductor's loops hold in registers (schedule/held.py)

    @property
    def caveat(self) -> str:
        """What must be said wherever the target is named; nothing of one that was tested."""
        return "" if self.tested else UNTESTED

    @property
    def tiles(self) -> Tiles:
        """Those of all tables, each once."""
        of_many = (*self.large, *self.deep, *self.plain, *self.heavy, *self.heads, *self.fast)
        of_many += (*self.slow, *self.slow_heavy, *self.even, *self.adds)
        return tuple(dict.fromkeys((*of_many, *self.middle, *self.small, *self.tiny)))


SM_90A = Target(
    name="sm_90a",
    capability=(9, 0),
    tested=True,
    environment=("QUACK_ARCH=90", "CUTE_DSL_ARCH=sm_90a"),
    mainloop="wgmma",
    device="device",
    overlaps=True,
    shared_memory=227 * 1024,
    least_stages=3,  # with fewer it starves: a norm backward took 1.6-1.9x as long (H200, 8192 x 4096 x 4096)
    max_operands=12,  # eight row vectors already spill 700 registers in 128x192
    multiplies=("bf16", "f16", "e4m3", "e5m2"),
    mixes=True,
    unlike=True,
    halves=(32, 64, 128),  # what was tried on hardware, in every tile
    # For each of 13 Regions one of these is within 1.5 % of the best of 8 to 15 (mean of both times, H200,
    # bench/tiles.py). 160 columns are for widths that neither 128 nor 192 divides; 208 in their place are 1 to 11 %
    # faster with a residual or a norm's scale, but were the fastest of no kernel that was kept in seven models. What
    # runs untuned is the first: it has registers left.
    large=tiles("128x256co2x1 128x192pp2x1n 128x128pp1x2 128x160pp2x1 128x192pp2x1 128x128pp2x1"),
    # A larger tile, which reads less, is 1 to 2 % faster under a load that lasts.
    deep=tiles("128x256co2x1 256x192co2x1n 256x192co1x2 128x192pp2x1n 128x160pp2x1 128x192pp2x1"),
    deep_least=8192,
    # One of these takes 2 to 6 % less than cuBLAS to write 16 bits, and about as long to 4 % less for 32 (H200,
    # bench/results/tiles.jsonl).
    plain=tiles("256x192co2x1 256x192co1x2 128x192pp2x1"),
    # The best of eight for the gradients of four heads' weights, in 5 to 19 % less time than cuBLAS: of 32000 x 2048 by
    # 2048 rows 0.417 and 0.514 ms, not turned 0.435 (H200).
    adds=tiles("128x192pp2x1t"),
    heavy=tiles("128x128pp1x2 128x128pp2x1 128x160pp2x1 128x256co2x1 128x192pp2x1n 128x192pp2x1"),
    # 128x256 took 7 to 20 % longer (bench/results/rotary.jsonl), 192 rows -1 to +13 %.
    heads=tiles("128x128pp1x2 128x128pp2x1 192x128pp1x2"),
    # The best of 13 for two products with three stores and statistics beside them, of widths 8192 and 14336 (H100).
    fast=tiles("128x160pp2x1 128x128pp1x2 128x192pp2x1n 128x192pp2x1 128x128pp2x1 128x256co2x1"),
    # The best of 13 for scales alone, and with a norm's gradient beside them (H100, 0.55 TFLOP: 424 and 447 us where
    # cuBLAS takes 443 and 399). Other large ones spill, and take 4 to 17 times as long.
    slow=tiles("128x128co2x1 128x192co1x1 128x160co2x1 128x192co2x1 192x128co2x1 256x96co2x1"),
    # SwiGLU's gradient with four statistics, 16384 x 8192 x 2048: 810 us, in 128x128co2x1 1075 (H100).
    slow_heavy=tiles("128x96pp2x1 64x128pp2x1 128x64pp2x1 128x128co2x1"),
    # Few tiles, so smaller ones fill the machine.
    middle=tiles("128x128pp1x2 128x128pp2x1 128x256co1x2 128x192pp2x1 128x64pp1x2 128x64co1x1"),
    # The weight is read once, at the memory's speed.
    small=tiles("128x64co1x1 128x128co1x1 64x64co1x1 64x128co1x1 128x256co1x2"),
    tiny=tiles("64x64co1x1 64x128co1x1 64x32co1x1 64x256co1x1"),
    multiprocessors=132,  # 114 on PCIe, where these tiles are timed in vain now and then
    # 4608 x 3072 x 15360 with a bias, a gate, a residual and sums: 568 and 582 us, in the best of `large` 622, and in
    # cuBLAS 563 for the product alone (H100, bench/results/tiles.jsonl).
    even=tiles("192x192co2x1n 128x224co2x1n"),
    longest_held=8192,  # longer ones were not tried
)
# No card of the two below was at hand: their kernels were compiled and never timed. So their tables are no result, but
# what compiles with the least spilled (bench/results/targets.jsonl), larger tiles first.
_SM_100A = tiles("128x256co1x1 128x256co1x2 128x192co1x1 128x128co1x1 128x128co1x2 128x160co1x1 128x64co1x1")
_SM_100A_HEAVY = tiles("128x128co1x1 128x128co1x2 128x64co1x1 128x192co1x1 128x256co1x1")
_SM_100A_SMALL = tiles("128x64co1x1 128x128co1x1 128x32co1x1 128x256co1x1")
SM_100A = Target(
    name="sm_100a",
    capability=(10, 0),
    tested=False,
    environment=("QUACK_ARCH=100", "CUTE_DSL_ARCH=sm_100a"),
    mainloop="tcgen05",
    device="device_sm100",
    overlaps=False,  # a warp of its own loads tiles [M, N], which device._Overlapping does not hold back
    shared_memory=227 * 1024,
    least_stages=3,
    max_operands=12,
    multiplies=("bf16", "f16", "e4m3", "e5m2"),
    mixes=False,  # GemmSm100 raises
    unlike=False,  # GemmSm100 makes the descriptor of A otherwise
    halves=(32, 64, 128),
    large=_SM_100A,
    deep=_SM_100A,
    deep_least=8192,
    plain=_SM_100A,
    adds=(),  # not tried
    heavy=_SM_100A_HEAVY,
    heads=_SM_100A_HEAVY,
    fast=_SM_100A,
    slow=_SM_100A,  # all accumulate in float32
    slow_heavy=_SM_100A_HEAVY,
    middle=_SM_100A_HEAVY,
    small=_SM_100A_SMALL,
    tiny=_SM_100A_SMALL,
)
# As SM_100A; but code for one does not load on the other.
SM_103A = replace(SM_100A, name="sm_103a", capability=(10, 3), environment=("QUACK_ARCH=103", "CUTE_DSL_ARCH=sm_103a"))
_SM_120A = tiles("128x128pp1x1 128x128co1x1 64x128pp1x1 128x64pp1x1 64x64pp1x1")
_SM_120A_SMALL = tiles("64x128pp1x1 64x64pp1x1 64x32pp1x1")
SM_120A = Target(
    name="sm_120a",
    capability=(12, 0),
    tested=False,
    environment=("QUACK_ARCH=120", "CUTE_DSL_ARCH=sm_120a"),
    mainloop="mma",
    device="device_sm120",
    overlaps=False,  # it might: the warp that loads A and B loads all else. But that was never seen to be right
    shared_memory=99 * 1024,
    least_stages=2,  # three of 128x128 leave an epilogue nothing
    max_operands=12,
    multiplies=("bf16", "f16", "e4m3", "e5m2"),
    mixes=True,
    unlike=True,
    halves=(32, 64, 128),
    large=_SM_120A,
    deep=_SM_120A,
    deep_least=8192,
    plain=_SM_120A,
    adds=(),
    heavy=_SM_120A,
    heads=_SM_120A,
    fast=_SM_120A,
    slow=_SM_120A,
    slow_heavy=_SM_120A,
    middle=_SM_120A,
    small=_SM_120A_SMALL,
    tiny=_SM_120A_SMALL,
)
TARGETS = {row.name: row for row in (SM_90A, SM_100A, SM_103A, SM_120A)}
"""By name. What asks no machine, as the command does, speaks of SM_90A."""

# Tested ranges: lowest, first that was not tested. quack's epilogue interface changed with every minor release so far.
TESTED = {"nvidia-cutlass-dsl": ((4, 8), (4, 9)), "quack-kernels": ((0, 6, 5), (0, 7))}
MODULES = ("cutlass", "quack", "triton")


def arch(capability: tuple[int, int]) -> str:
    """A capability as the compiler writes it: sm_80 of (8, 0)."""
    return "sm_{}{}".format(*capability)


def of_name(name: str) -> Target:
    """The row of that name. Raises KeyError."""
    return TARGETS[name]


def of_capability(capability: tuple[int, int] | None, *, untested: bool = False) -> Target:
    """The row for a device of compute `capability`. Raises Unsupported if there is none (None: no GPU), or if it was
    not tested and `untested` is not asked for."""
    if capability is None:
        raise Unsupported("no NVIDIA GPU", hint="CODA_INDUCTOR_TARGET=reference runs regions on any device")
    for row in TARGETS.values():
        if row.capability == capability and (row.tested or untested):
            return row
        if row.capability == capability:
            opt_in = f"CODA_INDUCTOR_TARGET={row.name} tries them"
            raise Unsupported(f"kernels for {arch(capability)} are {UNTESTED}", hint=opt_in)
    raise Unsupported(f"kernels are generated for {kinds()}, found {arch(capability)}")


def kinds() -> str:
    """The cards that there are kernels for, in words: "sm_90 only (on request for sm_100)"."""
    known = {tested: [arch(r.capability) for r in TARGETS.values() if r.tested is tested] for tested in (True, False)}
    asked = f" (on request for {', '.join(known[False])})" if known[False] else ""
    return f"{', '.join(known[True])} only{asked}"


def capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """The compute capability of `device` (None: the current one), None without a GPU."""
    cuda: Any = importlib.import_module("torch").cuda
    found: tuple[int, int] | None = cuda.get_device_capability(device) if cuda.is_available() else None
    return found


def available(capability: tuple[int, int] | None, *, untested: bool = False) -> None:
    """Raises Unsupported unless a device of compute `capability` can run generated kernels (None: no GPU), and was
    tested, or `untested` is asked for."""
    of_capability(capability, untested=untested)
    for package, (lowest, beyond) in TESTED.items():
        found = installed(package)
        span = f">={_text(lowest)},<{_text(beyond)}"
        if found is None:
            raise Unsupported(f"{package} is not installed", hint=f'pip install "{package}{span}"')
        if not lowest <= numbers(found) < beyond:
            raise Unsupported(f"{package} {found} was not tested", hint=f'pip install "{package}{span}"')
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            raise Unsupported(f"the module {module} cannot be found", hint=f"pip install {module}")


def installed(package: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None


version_of = functools.cache(version)
"""Read once (3 ms; the keys of the tuning of 16 layers ask 2000 times): what is imported stays. One that is missing
may yet be installed."""


def versions() -> dict[str, str]:
    """What a measurement depends on besides the device."""
    return {package: installed(package) or "missing" for package in (*TESTED, "torch")}


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
