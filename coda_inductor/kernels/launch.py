"""A Region on CUDA tensors: the kernel of the tile that suits M, or the interpreter with one warning.

What the compiler needs is imported when the first kernel is compiled, so that this module can be imported anywhere.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import importlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.doors import doors, forget
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.blocks import copied_in_rows, into
from coda_inductor.core.errors import Unsupported, warn
from coda_inductor.core.region import Region, parse
from coda_inductor.core.text import show
from coda_inductor.kernels import library, prebuild, proof, record
from coda_inductor.kernels.executable import Run
from coda_inductor.kernels.store import HINT, open_store

LAUNCHES: collections.Counter[str] = collections.Counter()
"""Kernel launches by region digest."""
FALLBACKS: collections.Counter[str] = collections.Counter()
"""Launches that did not run as one kernel on the tensors given, by reason; each reason is warned about once."""

LAYOUTS = 64  # of one kernel's inputs that are remembered: to check them took a fifth of a launch's time on the host
REACH = 1 << 40  # bytes between two matrices that one TMA descriptor can span; beyond, the hardware wraps silently


class Launch(Protocol):
    """What together launches, as a Kernel."""

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run | None:
        """What runs it, or None once it has run."""


Work = tuple[Launch, Sequence[Tensor], Sequence[Tensor | None]]
"""A launch, its inputs and its outputs."""


class Kernel:
    """Runs one Region at any M. Compiled kernels are shared by all token counts and kept for the process."""

    def __init__(
        self, region: Region, directory: Path, *, strict: bool = False, measured: bool = True, row: Target = SM_90A
    ) -> None:
        """`strict`: what does not run as one kernel is raised, as Unsupported, not computed on torch with a warning.
        `measured`: it runs in the configurations that were measured best; else in the first, which no clock chose.
        `row`: the machine that it runs on."""
        self.region, self.directory, self.strict, self.measured = region, directory, strict, measured
        self.row = row
        self._digest = region.digest
        self._refusal = f"no kernel for region {self._digest}"
        self._ready: dict[tuple[int, bool], Any] = {}  # by size class and lane order; None: no kernel could be built
        self._classes: dict[int, int] = {}  # by token count
        self._sound: set[tuple[tuple[int, ...], ...]] = set()  # strides of inputs, in all of which rows are aligned
        self._here = -1 if row.tested else _device()  # the card of which that, and what is wrong, was found out
        self._compiled: dict[tuple[Config, bool], Any] = {}
        self._wrong: dict[tuple[Config, bool], str] = {}  # of what had to be proved: why it may not run, "" if it may
        first, *others = region.products
        self._lanes = [(first.b, p.b) for p in others if not region.half]  # whose order in memory a kernel is made for
        self._m, self._dim = region.m_axis
        self._spanned = [*zip(*first.pairs, strict=True)] if region.spanned else self._lanes

    def __call__(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        """`inputs`: matrices, then operands. `outs`: [M, n] stores in rows of the pitch of core/blocks.py, then [M] and
        [n] sums; None if unread."""
        together(((self, inputs, outs),))

    def run_in(self, config: Config, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> None:
        """As a call on the current device, but in this configuration, which need not be right: no user's graph comes
        this way. Raises Unsupported if it cannot be built."""
        if (run := self.prepare(inputs, outs, config)) is not None:
            run(0, 0)

    def prepare(
        self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None], config: Config | None = None
    ) -> Run | None:
        """What launches the kernel: addresses, lanes, the bucket's kernel; nothing that depends on M is made here.
        None: nothing is to be launched, `outs` hold the results."""
        m = inputs[self._m].shape[self._dim]
        if not m:
            for out in outs:
                if out is not None and not self.region.adds:
                    out.zero_()  # of no tokens: what is not empty is a sum over them
            return None
        strides, places = tuple(map(Tensor.stride, inputs)), [*map(Tensor.data_ptr, inputs)]
        if strides not in self._sound or functools.reduce(operator.or_, places) & 15:
            inputs = [aligned(t) for t in inputs]
            strides, places = tuple(map(Tensor.stride, inputs)), [*map(Tensor.data_ptr, inputs)]
            if len(self._sound) < LAYOUTS:
                self._sound.add(strides)
        swapped = False
        for i, j in self._spanned:
            distance = places[j] - places[i]
            if not 0 < abs(distance) < REACH or strides[i] != strides[j]:
                inputs, distance = list(inputs), 1
                inputs[i], inputs[j] = adjacent(inputs[i], inputs[j])
                strides, places = tuple(map(Tensor.stride, inputs)), [*map(Tensor.data_ptr, inputs)]
            swapped = distance < 0 and bool(self._lanes)
        if config is not None:
            compiled = self.compiled(config, swapped=swapped)
        else:
            if not self.row.tested:
                self._move()
            key = (self._class(m), swapped)
            compiled = self._ready[key] if key in self._ready else self._choose(*key)
        if compiled is None:
            self.fall_back(inputs, outs, self._refusal)
            return None
        LAUNCHES[self._digest] += 1
        run: Run = compiled.prepare(inputs, outs)
        return run

    def _class(self, m: int) -> int:
        """The size class of `m` tokens."""
        if (found := self._classes.get(m)) is None:
            found = self._classes[m] = legality.size_class(self.region, m, self.row)
        return found

    def _choose(self, size: int, swapped: bool) -> Any:
        """The kernel of a size class: of the configuration that was measured best, there or at the nearest class of
        which that is known, else of the first that can be built and may run here."""
        asked, measured = (self.directory, self.region, size), None
        if self.measured:
            measured = record.remembered(*asked, target=self.row) or record.nearest(*asked, target=self.row)
        found, refusals = None, list[str]()
        for config in (*([measured] if measured else []), *legality.candidates(self.region, size, self.row)):
            try:
                if self._must_wait(config, swapped):
                    self._refusal = f"no kernel for region {self._digest}: {WAIT}"
                    return None
                found = self.admitted(config, swapped=swapped)
                break
            except Unsupported as refusal:
                refusals.append(refusal.what)
        if refusals and found is None:
            self._refusal = f"no kernel for region {self._digest}: {refusals[0]}"
        elif refusals:
            report(f"region {self._digest} runs in another kernel than the best: {refusals[0]}")
        self._ready[size, swapped] = found
        return found

    def admitted(self, config: Config, *, swapped: bool = False) -> Any:
        """The kernel of one configuration, as a user's graph may launch it: on a target that was never run on a card
        it is compared with the interpreter first, once. Raises Unsupported if it cannot be built, or is wrong."""
        found = self.compiled(config, swapped=swapped)
        if not self.row.tested:
            self._move()
            key = (config, swapped)
            if key not in self._wrong:
                self._wrong[key] = self._proved(config, found, swapped)
            if self._wrong[key]:
                raise Unsupported(self._wrong[key])
        return found if self.row.overlaps else Apart(found)

    def _move(self) -> None:
        """Forgets what was found out on another card than the current one."""
        if self._here != (device := _device()):
            self._here = device
            self._ready.clear()
            self._wrong.clear()

    def _proved(self, config: Config, kernel: Any, swapped: bool) -> str:
        """Why the kernel may not run, "" if it may. In a thread of its own, that is without the modes of the compile
        around it, and in no memory of a CUDA graph's."""
        try:
            asked = self.region, config, self.row, kernel, self.directory
            in_own_thread(lambda: proof.prove(*asked, swapped=swapped))
        except Unsupported as refusal:
            return refusal.said
        return ""

    def _must_wait(self, config: Config, swapped: bool) -> bool:
        """Would it have to be compared with the interpreter, while a CUDA graph is captured, which must not be?"""
        if self.row.tested or not capturing():
            return False
        self._move()
        if (config, swapped) in self._wrong:
            return False
        self.compiled(config, swapped=swapped)
        if not proof.known(self.region, config, self.row, self.directory, swapped=swapped):
            return True
        self._wrong[config, swapped] = ""
        return False

    def prove(self, config: Config) -> None:
        """Raises Unsupported if the kernels of a configuration, as far as they have been built, may not run here."""
        for config_, swapped in [key for key in self._compiled if key[0] == config]:
            self.admitted(config_, swapped=swapped)

    def fall_back(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None], reason: str) -> None:
        """Computes the Region on torch instead."""
        if self.strict:
            raise Unsupported(f"{reason}; the region is\n{show(self.region)}", hint=FALL_BACK)
        fall_back(self.region, inputs, outs, reason)

    def build(self, m: int) -> None:
        """Builds the kernel of `m` tokens now, and proves it where that is needed. Raises Unsupported if there is
        none."""
        key = (self._class(m), False)
        if (self._ready[key] if key in self._ready else self._choose(*key)) is None:
            raise Unsupported(self._refusal)

    def config(self, m: int) -> Config | None:
        """The configuration in which `m` tokens run, None before the first launch of their bucket."""
        found = self._ready.get((self._class(m), False)) or self._ready.get((self._class(m), True))
        return found.config if found else None

    def use(self, size: int, config: Config) -> None:
        """Runs this bucket in `config` from now on: as far as it has been built, and may run here, at once, else as it
        is remembered."""
        for swapped in (False, True):
            self._ready.pop((size, swapped), None)
            if (config, swapped) in self._compiled:
                with contextlib.suppress(Unsupported):
                    self._ready[size, swapped] = self.admitted(config, swapped=swapped)

    def compiled(self, config: Config, *, swapped: bool = False) -> Any:
        """The kernel of one configuration, loaded or compiled at the first call. Raises Unsupported."""
        key = (config, swapped)
        if key not in self._compiled:
            with BUILDING, uncollected():
                found: Any = library.load(self.region, config, self.directory, swapped=swapped, target=self.row)
                if found is None:
                    job = prebuild.Job(self.region, config, swapped, self.row.name)
                    if prebuild.ABORTED and job.place(self.directory) in prebuild.ABORTED:
                        raise Unsupported(f"no kernel for {config}: {prebuild.ENDED}")
                    build = compiler().Compiled
                    try:
                        found = build(self.region, config, self.directory, swapped=swapped, target=self.row)
                    except OSError as error:  # the store: full, read-only, gone
                        raise Unsupported(f"no kernel for {config}: {error}", hint=HINT) from error
                self._compiled[key] = found
        return self._compiled[key]


class Apart:
    """A kernel that begins when the one before it has ended, and ends before the next begins: no door reaches it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.config = kernel, kernel.config

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run:
        """As Executable.prepare."""
        run: Run = self.kernel.prepare(inputs, outs)
        return lambda entrance, way_out: run(0, 0)


def together(work: Sequence[Work]) -> None:
    """Launches kernels of one device on its current stream, none of which reads what another writes: each may begin
    where blocks of the one before have ended, through the door between them. The outputs' memory must be apart, and
    apart from all inputs'. What each reads, and its scratch, is kept until all are launched."""
    example = work[0][1][0]
    if example.get_device() != torch.cuda.current_device():
        with torch.cuda.device(example.device):
            together(work)
        return
    prepared = [kernel.prepare(inputs, outs) for kernel, inputs, outs in work]
    runs = [run for run in prepared if run is not None]
    if len(runs) < 2:
        for run in runs:
            run(0, 0)
        return
    between = doors(example.device, len(runs) - 1) or [0] * (len(runs) - 1)
    try:
        for run, entrance, way_out in zip(runs, [0, *between], [*between, 0], strict=False):
            run(entrance, way_out)
    except BaseException:
        forget(example.device)
        raise


def compiler() -> Any:
    """The module codegen.kernel. Raises Unsupported if what compiles kernels is installed and cannot be loaded."""
    try:
        with uncollected():
            return in_own_thread(lambda: importlib.import_module("coda_inductor.kernels.kernel"))
    except Exception as error:  # a driver too old for it, half an installation: each library has its own
        what = f"the kernel compiler cannot be loaded: {type(error).__name__}: {error}"
        raise Unsupported(what, hint="`coda-inductor doctor` tries it alone") from error


def in_own_thread(make: Callable[[], Any]) -> Any:
    """What `make` returns in a thread of its own, on this thread's GPU: importing quack 0.6.5 leaves a tensor there,
    which must not lie in the memory of a CUDA graph that this thread prepares."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    with ThreadPoolExecutor(1) as thread:
        if device is not None:
            thread.submit(torch.cuda.set_device, device).result()
        return thread.submit(make).result()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python's collector from walking all of torch's objects again and again beside many new ones: it took 0.4 of
    the 0.85 s in which the compiler is imported."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


BUILDING = threading.Lock()  # autograd runs the backward in threads of its own
KERNELS: dict[tuple[str, str | None, bool, bool, str], Kernel] = {}
WAIT = "a CUDA graph is captured before it was compared with the interpreter (run the model once before)"
FALL_BACK = "without CODA_INDUCTOR_STRICT it runs as separate operations"


def kernel(region_text: str, cache_dir: str | None = None, *, strict: bool = False, measured: bool = True) -> Kernel:
    """The Kernel of a Region's text on the current device, one per process and cache directory. Raises Unsupported if
    none can exist."""
    row = here()
    key = (region_text, cache_dir, strict, measured, row.name)
    if key not in KERNELS:
        region = parse(region_text)
        legality.check(region, row)
        KERNELS[key] = Kernel(region, open_store(cache_dir), strict=strict, measured=measured, row=row)
    return KERNELS[key]


def here() -> Target:
    """The current device's row; without a GPU that of which everything speaks that asks none. Raises Unsupported if
    there is none for it."""
    capability = target.capability()
    return SM_90A if capability is None else target.of_capability(capability, untested=True)


def _device() -> int:
    """The current device's number, -1 without a GPU."""
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def capturing() -> bool:
    """Is the current stream captured into a CUDA graph?"""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def aligned(t: Tensor) -> Tensor:
    """`t`, or a copy whose rows are contiguous and start at multiples of 16 bytes."""
    if t.data_ptr() & 15:
        why = "it does not start at a multiple of 16 bytes"
    elif t.stride(-1) != 1:
        why = f"its elements are {t.stride(-1)} apart"
    elif t.dim() > 1 and t.stride(0) * t.element_size() & 15:
        why = "its rows do not start at multiples of 16 bytes"
    else:
        return t
    kind = "vector" if t.dim() == 1 else "matrix"
    report(f"an input was copied, a {kind} of {str(t.dtype).removeprefix('torch.')}: {why}")
    return t.new_empty(t.shape).copy_(t) if t.dim() == 1 else copied_in_rows(t)


def adjacent(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of two matrices of one shape, one behind the other. Beside NCCL, the driver gave one process addresses
    that lie further apart than REACH (two H200s)."""
    report("two matrices were copied: they are of different pitch, or too far apart for one descriptor")
    both = torch.empty((2, *a.shape), dtype=a.dtype, device=a.device)
    return both[0].copy_(a), both[1].copy_(b)


def fall_back(region: Region, inputs: Sequence[Tensor], outs: Sequence[Tensor | None], reason: str) -> None:
    """Computes the Region on torch instead."""
    report(f"a region runs as separate operations: {reason}")
    into(region, inputs, outs)


def report(reason: str) -> None:
    """Counts the reason, and warns about it the first time."""
    warn(reason)
    FALLBACKS[reason] += 1
