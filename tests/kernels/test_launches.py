"""A Region's launches, with the interpreter in its kernel's place: which kernel, of which inputs, and what if none."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from codegen_cases import bias_sums, blank_outputs, norm_producer, random_inputs, summed, swiglu, token_scale
from torch import Tensor

from coda_inductor.codegen import doors, legality
from coda_inductor.codegen.target import SM_90A, Target
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Region
from coda_inductor.kernels import launch, record
from coda_inductor.kernels.executable import Run


class FakeKernel:
    """Stands in for the compiled kernel: the interpreter, with what it was asked. Two matrices that share a descriptor
    must lie where one can span them, and the second weight of two after the first, unless the kernel is `swapped`."""

    def __init__(
        self, region: Region, config: Config, directory: Path, *, swapped: bool = False, target: Target = SM_90A
    ) -> None:
        self.region, self.config, self.swapped = region, config, swapped

    def prepare(self, inputs: list[Tensor], outs: list[Tensor | None]) -> Run:
        return lambda entrance, way_out: self.run(inputs, outs)

    def run(self, inputs: list[Tensor], outs: list[Tensor | None]) -> None:
        first, *others = self.region.products
        lanes = [] if self.region.half else [(first.b, p.b) for p in others]
        for i, j in [*zip(*first.pairs, strict=True)] if self.region.summed else lanes:
            distance = inputs[j].data_ptr() - inputs[i].data_ptr()
            assert inputs[i].stride() == inputs[j].stride() and 0 < abs(distance) < 1 << 40
            assert self.region.summed or self.swapped == (distance < 0)
        for out, value in zip(outs, interpret(self.region, inputs), strict=True):
            if out is not None:
                out.copy_(value)


def launched(
    monkeypatch: pytest.MonkeyPatch, region: Region, directory: Path, build: Callable[..., FakeKernel] = FakeKernel
) -> launch.Kernel:
    """The Region's Kernel, on CPU tensors, with what `build` returns for the compiled kernel."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor reports
    kernel = types.SimpleNamespace(Compiled=build)
    monkeypatch.setattr(launch, "importlib", types.SimpleNamespace(import_module=lambda name: kernel))
    return launch.kernel(region.text, str(directory / "kernels"))


def test_launch_picks_the_bucket_and_the_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = swiglu(64, 32)
    k = launched(monkeypatch, region, tmp_path)
    assert launch.kernel(region.text, str(tmp_path / "kernels")) is k
    before = launch.LAUNCHES[region.digest]
    for m, up_first in ((1, False), (300, True), (0, False)):
        inputs = random_inputs(region, m, "cpu", up_first=up_first)
        outs = [torch.empty(m, 64, dtype=torch.bfloat16) for _ in region.stores]
        k(inputs, [outs[0], None, outs[2]])
        assert torch.equal(outs[2], interpret(region, inputs)[2])
    assert launch.LAUNCHES[region.digest] == before + 2
    assert [(c.tile_m, swapped) for c, swapped in k._compiled] == [(64, False), (128, True)]


def test_no_tokens_sum_to_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = bias_sums(64, 32)
    before, outs = launch.LAUNCHES[region.digest], blank_outputs(region, 0, "cpu")
    launched(monkeypatch, region, tmp_path)(random_inputs(region, 0, "cpu"), [*outs[:2], None, *outs[3:]])
    assert torch.equal(outs[1], torch.zeros(64)) and bool(outs[2].isnan().all())
    assert launch.LAUNCHES[region.digest] == before


def test_launch_mends_or_falls_back_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch.FALLBACKS.clear()
    region = swiglu(64, 32, train=False)
    k = launched(monkeypatch, region, tmp_path)
    inputs, out = random_inputs(region, 8, "cpu"), torch.empty(8, 64, dtype=torch.bfloat16)
    inputs[0] = torch.randn(8, 33).bfloat16()[:, 1:]  # rows of 66 bytes, first element at 2
    with pytest.warns(RuntimeWarning, match="copied"):
        k(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0])
    inputs[2] = inputs[1]  # one weight twice: no distance to encode
    with pytest.warns(RuntimeWarning, match="two matrices"):
        k(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0])
    k(inputs, [out])  # counted, not warned about again
    assert sorted(launch.FALLBACKS.values()) == [2, 3]


def test_a_layout_seen_before_may_start_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides are checked once, addresses at each launch; a layout that had to be mended is mended each time."""
    launch.FALLBACKS.clear()
    region = swiglu(64, 32, train=False)
    k = launched(monkeypatch, region, tmp_path)
    inputs, out = random_inputs(region, 8, "cpu"), torch.empty(8, 64, dtype=torch.bfloat16)
    k(inputs, [out])
    assert not launch.FALLBACKS
    inputs[0] = torch.randn(8 * 32 + 1).bfloat16()[1:].view(8, 32)  # the same strides, at 2 bytes
    odd = torch.randn(8, 33).bfloat16()[:, :32]
    with pytest.warns(RuntimeWarning, match="does not start"):
        k(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0])
    inputs[0] = odd
    with pytest.warns(RuntimeWarning, match="its rows"):
        k(inputs, [out])
    k(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0]) and sum(launch.FALLBACKS.values()) == 3


@pytest.mark.parametrize("make", [swiglu, summed])
@pytest.mark.parametrize("way", ["of another pitch", "the same twice", "too far apart"])
def test_launch_copies_what_no_descriptor_spans(
    make: Callable[[int, int], Region], way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then runs, also where no fallback is allowed."""
    launch.FALLBACKS.clear()
    launched(monkeypatch, region := make(64, 64), tmp_path)
    k, first = launch.kernel(region.text, str(tmp_path / "kernels"), strict=True), region.products[0]
    inputs, before = random_inputs(region, 8, "cpu"), launch.LAUNCHES[region.digest]
    i, j = [*zip(*first.pairs, strict=True)][1] if region.summed else (first.b, region.products[1].b)
    n, width = inputs[j].shape
    if way == "too far apart":
        monkeypatch.setattr(launch, "REACH", 1)
    else:
        wide = torch.randn(n, 2 * width).to(inputs[j].dtype)
        inputs[j] = wide[:, :width] if way == "of another pitch" else inputs[i]
    outs = [torch.empty_like(out) for out in interpret(region, inputs)]
    with pytest.warns(RuntimeWarning, match="two matrices were copied"):
        k(inputs, outs)
    assert all(map(torch.equal, outs, interpret(region, inputs)))
    pairs = 2 if region.summed and way == "too far apart" else 1
    assert launch.LAUNCHES[region.digest] == before + 1 and sum(launch.FALLBACKS.values()) == pairs


def test_an_even_tile_runs_where_it_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own number of rows. Others of the bucket run in what won there, and so does one that was not measured."""
    region, even = norm_producer(3072, 512), SM_90A.even[0]
    k = launched(monkeypatch, region, tmp_path)
    table = legality.candidates(region, 8192)[1]
    record.remember(k.directory, region, 8192, table, 1.0, [])
    assert legality.size_class(region, 4608) == 4608 and even in legality.candidates(region, 4608)
    assert k._choose(4608, False).config == table
    k._ready.clear()
    record.remember(k.directory, region, 4608, even, 0.9, [])
    assert [k._choose(k._class(m), False).config for m in (4608, 8192, 5000)] == [even, table, table]


def test_a_size_that_was_not_measured_runs_in_what_won_at_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a head in blocks of rows does. Of two as near it is the larger; a tile that no search would time there is
    none."""
    region = norm_producer(4096, 512)
    k = launched(monkeypatch, region, tmp_path)
    first, *_, at_most, at_least = legality.candidates(region, 32768)
    assert [k._choose(m, False).config for m in (4096, 512)] == [legality.candidates(region, m)[0] for m in (4096, 512)]
    for size, config in ((32768, at_most), (2048, at_least)):
        record.remember(k.directory, region, size, config, 1.0, [])
    k._ready.clear()
    assert [k._choose(m, False).config for m in (16384, 8192, 4096)] == [at_most, at_most, at_least]
    assert at_least not in legality.candidates(region, 64) and first != at_least
    assert k._choose(64, False).config == legality.candidates(region, 64)[0]
    k.measured = False
    assert k._choose(8192, False).config == first


def test_a_kernel_that_cannot_be_built_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next configuration, and when none is left by the interpreter."""
    launch.FALLBACKS.clear()
    region = token_scale(64, 32)
    inputs, out = random_inputs(region, 500, "cpu"), torch.empty(500, 64, dtype=torch.bfloat16)
    refused = set(legality.candidates(region, 500)[:2])

    def build(region: Region, config: Config, directory: Path, *, swapped: bool, target: Target) -> FakeKernel:
        if config in refused:
            raise Unsupported(f"no kernel for {config}")
        return FakeKernel(region, config, directory, swapped=swapped)

    k = launched(monkeypatch, region, tmp_path, build)
    with pytest.warns(RuntimeWarning, match="no kernel for"):
        k(inputs, [out])
    assert torch.equal(out, interpret(region, inputs)[0])
    assert k._ready[512, False].config == legality.candidates(region, 500)[2]
    refused |= set(SM_90A.tiles)
    few, few_out = random_inputs(region, 3, "cpu"), torch.empty(3, 64, dtype=torch.bfloat16)
    with pytest.warns(RuntimeWarning, match="separate operations"):
        k(few, [few_out])
    assert torch.equal(few_out, interpret(region, few)[0]) and k._ready[64, False] is None


def test_a_line_in_which_nothing_runs_takes_no_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doors of a captured line are its own for ever: one that was taken back would be another graph's, too."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(doors, "_devices", {})
    doors.doors(cpu, 1)
    monkeypatch.setattr(doors, "_stream", lambda device: (True, 7))
    first = doors.doors(cpu, 1)
    nothing = types.SimpleNamespace(prepare=lambda inputs, outs: None)
    launch.together([(nothing, [torch.zeros(0, 8)], [])] * 2)
    assert not doors.doors(cpu, 0) and not doors.doors(cpu, -1)
    assert len({*first, *doors.doors(cpu, 1)}) == 2


def test_a_matrix_of_two_pairs_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """x W + y W with one W: its copy lies elsewhere, and so may the other pair's."""
    launch.FALLBACKS.clear()
    region = summed(64, 64)
    k = launched(monkeypatch, region, tmp_path)
    k._spanned = [(0, 2), (1, 2)]
    inputs = random_inputs(region, 64, "cpu")
    inputs[0], inputs[1] = (torch.randn(64, 128).bfloat16()[:, :64] for _ in range(2))
    inputs[2] = inputs[0]
    given = list[list[Tensor]]()
    monkeypatch.setattr(FakeKernel, "run", lambda self, inputs, outs: given.append(inputs))
    with pytest.warns(RuntimeWarning, match="two matrices"):
        k(inputs, [None] * (len(region.stores) + len(region.reductions)))
    _, b, c = given[0][:3]
    assert c.data_ptr() != inputs[0].data_ptr() and b.stride() == c.stride()
