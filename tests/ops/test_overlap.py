"""Launches that may overlap: which Regions stand in one line of a compiled graph, where their outputs lie, and what
their kernels are told."""

from __future__ import annotations

import functools
import itertools
import operator
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from codegen_cases import bias_sums, blank_outputs, plain, random_inputs, summed, swiglu, token_scale
from compiling import close, pretend
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import run_and_get_code

from coda_inductor.codegen import doors, source
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.errors import CodaWarning
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Store
from coda_inductor.kernels import executable, launch
from coda_inductor.kernels.executable import Executable, Parts, Run
from coda_inductor.kernels.launch import Launch, Work
from coda_inductor.ops import lowering

SQUARE = replace(plain(64, 64), stores=(Store("acc", "bf16"),)).text
TILE = Config(128, 64, 1, 1, True)


WIDE = replace(plain(1024, 64), stores=(Store("acc", "bf16"),)).text


def region(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = torch.ops.coda.region([x, w], SQUARE, "sm_90a")[0]
    return out


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


class Seen(list[list[int]]):
    """For each line of several Regions how many bytes of its outputs lie in its inputs or in one another."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    pretend(monkeypatch, tmp_path)
    lowering.register()
    torch._dynamo.reset()
    found, whole = Seen(), launch.together

    def together(work: Sequence[Work]) -> None:
        places = [[place(t) for t in ts if t is not None] for _, *given in work for ts in given]
        outs, everything = joined(places[1::2]), joined(places)
        found.append([sum(common(out, other) for other in everything) - out[1] + out[0] for out in outs])
        whole(work)

    monkeypatch.setattr(launch, "together", together)
    return found


def joined(lists: list[list[Any]]) -> list[Any]:
    return functools.reduce(operator.add, lists)


def place(t: Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()


def common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def compiled(f: Any, *args: Tensor) -> tuple[Any, str]:
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):  # whose key knows nothing of ours
        found, (code,) = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        for out, wanted in zip(found, f(*args), strict=True):
            close(out, wanted)
    return found, code


def test_what_reads_nothing_of_one_another_is_launched_in_one_line(seen: Seen) -> None:
    def f(x: Tensor, *weights: Tensor) -> list[Tensor]:
        return [region(x, w) for w in weights]

    _, code = compiled(f, drawn(96, 64), *(drawn(64, 64) for _ in range(3)))
    assert code.count("coda_together([") == 1
    assert seen == [[0, 0, 0]]


def test_a_line_of_any_number_of_tokens(seen: Seen) -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        return [region(x, v), region(x, w)]

    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        g = torch.compile(f, fullgraph=True, dynamic=True)
        for tokens in (96, 40, 7):
            given = drawn(tokens, 64), drawn(64, 64), drawn(64, 64)
            for out, wanted in zip(g(*given), f(*given), strict=True):
                close(out, wanted)
    assert seen == [[0, 0]] * 3


def test_what_reads_another_is_not(seen: Seen) -> None:
    def f(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        return [region(region(x, v), w)]

    _, code = compiled(f, drawn(96, 64), drawn(64, 64), drawn(64, 64))
    assert "coda_together" not in code
    assert seen == []


def test_a_line_ends_at_what_reads_it_and_at_other_kernels(seen: Seen) -> None:
    def f(x: Tensor, *w: Tensor) -> list[Tensor]:
        first, second = region(x, w[0]), region(x, w[1])
        third, fourth = region(second, w[2]), region(x, w[3])
        return [first, third, fourth, region(fourth @ w[4], w[0]), region(x, w[5])]

    _, code = compiled(f, drawn(96, 64), *(drawn(64, 64) for _ in range(6)))
    calls = [re.findall(r"\(coda_\w+, \[(.*?)\], \[(.*?)\]\)", line) for line in code.splitlines()]
    lines = [line for line in calls if line]
    for line in lines:
        assert not {out for _, out in line} & {name for given, _ in line for name in re.findall(r"buf\d+", given)}
    assert [*map(len, lines)] == [2] and len(re.findall(r"= coda_[0-9a-f]{16}\(", code)) == 4
    assert all(not any(row) for row in seen)


def test_what_reads_for_the_last_time_as_much_as_it_stores_ends_a_line(seen: Seen) -> None:
    """Its memory can then be what the next Region writes, as without lines."""

    def f(x: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
        return [region(x.sin() @ v, w), region(x, w)]

    _, code = compiled(f, drawn(64, 64), drawn(64, 64), drawn(64, 64))
    assert "coda_together" not in code and "# reuse" in code


def test_outputs_of_a_line_lie_apart_from_what_its_first_region_reads_last(seen: Seen) -> None:
    """Inductor gives memory that is read for the last time to the next output of its size, here the second Region's,
    which begins while the first still reads it."""

    def f(x: Tensor, v: Tensor, wide: Tensor, w: Tensor) -> list[Tensor]:
        return [torch.ops.coda.region([x.sin() @ v, wide], WIDE, "sm_90a")[0], region(x, w)]

    _, code = compiled(f, drawn(64, 64), drawn(64, 64), drawn(1024, 64), drawn(64, 64))
    assert "coda_together" in code
    assert seen == [[0, 0]]


def test_inputs_are_aligned_before_the_line_that_reads_them(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor copies an input that is not aligned before the kernel that reads it first (on a GPU, torch 2.13)."""
    if not hasattr(PythonWrapperCodegen, "codegen_deferred_alignment_copies"):
        pytest.skip("this torch copies them all at the start")
    monkeypatch.setattr(compile_fx, "get_input_idxs_to_check", lambda inputs, static: range(len(inputs)))
    _, code = compiled(lambda x, v, w: [region(x, v), region(x, w)], *(drawn(64, 64) for _ in range(3)))
    body = code[code.index("def call(") :]
    assert body.count("copy_if_misaligned") == 3 and "copy_if_misaligned" not in body[body.index("coda_together([") :]


def test_regions_on_other_devices_streams_and_parts_of_a_graph_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        def __init__(self, device: str) -> None:
            self.device = device

        def get_device(self) -> str:
            return self.device

    a, b, elsewhere, cut = Node(device="0"), Node(device="0"), Node(device="1"), Node(device="0")
    scheduler = SimpleNamespace(node_to_stream={}, should_partition=lambda node: node is cut)
    monkeypatch.setattr(lowering, "V", SimpleNamespace(graph=SimpleNamespace(scheduler=scheduler)))
    with torch._inductor.config.patch(graph_partition=True):
        assert lowering._alike(a, b) and not lowering._alike(a, elsewhere) and not lowering._alike(a, cut)
    scheduler.node_to_stream[b] = 1
    assert not lowering._alike(a, b)


class Recorded:
    """A launch that writes down when it is prepared and run."""

    def __init__(self, name: str, log: list[str], *, launches: bool = True) -> None:
        self.name, self.log, self.launches = name, log, launches

    def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run | None:
        self.log.append(f"prepare {self.name}")
        return (lambda *doors: self.log.append(f"{self.name} {doors}")) if self.launches else None


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The addresses of the first doors of a machine whose tensors lie on the CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(doors, "_devices", {})
    first, *_ = doors.doors(torch.device("cpu"), 4)
    yield [first + 4 * i for i in range(4)]
    assert not doors._devices[torch.device("cpu")].words.any()


def test_all_are_prepared_before_the_first_runs(built: list[int]) -> None:
    """Copies that a preparation launches, and scratch that it allocates, come before all kernels."""
    log: list[str] = []
    launch.together([(Recorded(name, log), [torch.empty(1)], []) for name in "abc"])
    p, q, *_ = built
    assert log == ["prepare a", "prepare b", "prepare c", f"a (0, {p})", f"b ({p}, {q})", f"c ({q}, 0)"]


def test_what_is_not_launched_lets_no_other_begin_early(built: list[int]) -> None:
    log: list[str] = []
    work = [
        Recorded("a", log, launches=False),
        Recorded("b", log),
        Recorded("c", log, launches=False),
        Recorded("d", log),
    ]
    launch.together([(each, [torch.empty(1)], []) for each in work])
    assert log[4:] == [f"b (0, {built[0]})", f"d ({built[0]}, 0)"]
    log.clear()
    launch.together([(Recorded("a", log), [torch.empty(1)], [])])
    assert log == ["prepare a", "a (0, 0)"]


def test_where_doors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream the same for each line, of lines that are captured none twice, and of a line that failed none again:
    a door that stayed open would let others in too early."""
    here, (capturing, stream) = torch.device("cpu"), (False, 1)
    monkeypatch.setattr(doors, "_devices", {})
    monkeypatch.setattr(doors, "WORDS", 12)
    monkeypatch.setattr(doors, "_stream", lambda device: (capturing, stream))
    capturing = True
    assert doors.doors(here, 1) == []  # memory that a graph's pool gives may be another's
    capturing = False
    mine = doors.doors(here, 2)
    assert doors.doors(here, 1) == mine[:1] and doors.doors(here, 3)[:2] == mine
    stream = 2
    others = doors.doors(here, 2)
    capturing = True
    captured = doors.doors(here, 2), doors.doors(here, 2)
    seen = [*doors._devices[here].of_streams[1], *others, *captured[0], *captured[1]]
    assert len({*seen}) == len(seen) == 9
    assert doors.doors(here, 4) == []
    capturing = False
    doors.forget(here)
    assert not {*doors.doors(here, 2)} & {*seen} and doors.doors(here, 4) == []


def test_a_line_that_fails_leaves_its_doors(built: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Recorded):
        def prepare(self, inputs: Sequence[Tensor], outs: Sequence[Tensor | None]) -> Run | None:
            def run(entrance: int, way_out: int) -> None:
                raise RuntimeError("no")

            return run

    log: list[str] = []
    work: list[Work] = [
        (each, [torch.empty(1)], []) for each in (Recorded("a", log), Failing("b", log), Recorded("c", log))
    ]
    with pytest.raises(RuntimeError, match="no"):
        launch.together(work)
    launch.together([work[0], work[2]])
    assert log[-2].startswith("a (0, ") and str(built[0]) in log[2] and str(built[0]) not in log[-2]


def test_without_a_kernel_a_region_of_a_line_runs_on_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    regions = [token_scale(64, 64), plain(64, 64)]
    inputs = [random_inputs(r, 40, "cpu") for r in regions]
    outs = [blank_outputs(r, 40, "cpu") for r in regions]
    runs: list[Launch] = [lowering.OnTorch(regions[0], "because"), lowering.Launcher(regions[1].text)]
    with pytest.warns(CodaWarning, match="because"):
        launch.together(list(zip(runs, inputs, outs, strict=True)))
    for r, given, found in zip(regions, inputs, outs, strict=True):
        for out, wanted in zip(found, interpret(r, given), strict=True):
            close(out, wanted)


def test_a_kernel_is_told_when_it_runs_and_keeps_its_scratch_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executable, "resident", lambda config: 1)
    r, asked = bias_sums(64, 64), list[tuple[Any, ...]]()
    names = source.slots(r)
    fields = tuple(f for f in (*names.operands, *names.stores, *names.sums) if f not in ("c", "D"))
    fields += (*map(source.whole, names.sums), *source.DOORS)
    kernel = Executable(r, TILE, Parts(lambda *given: asked.append(given), fields, 8, None))
    runs = [kernel.prepare(random_inputs(r, 40, "cpu"), [None] * len(blank_outputs(r, 40, "cpu"))) for _ in range(2)]
    assert asked == []
    for run, given_doors in zip(runs, ((0, 5), (5, 0)), strict=True):
        run(*given_doors)
    told = [dict(zip(fields, given[4], strict=True)) for given in asked]
    assert [tuple(t[name] for name in source.DOORS) for t in told] == [(0, 5), (5, 0)]
    scratch = [place(t[name]) for t in told for name in (*names.sums, *map(source.whole, names.sums))]
    assert not any(common(a, b) for a, b in itertools.combinations(scratch, 2))


def test_a_prepared_kernel_keeps_what_it_reads_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second weight of two is in no argument of its own. It may be a copy that nobody else holds."""
    monkeypatch.setattr(executable, "resident", lambda config: 1)
    for r, addresses in ((swiglu(64, 64), ("lane_offset",)), (summed(64, 64), source.SPANS)):
        names = source.slots(r)
        fields = (*addresses, *(f for f in (*names.operands, *names.stores, *names.sums) if f not in ("c", "D")))
        fields += (*map(source.whole, names.sums), *source.DOORS)
        kernel = Executable(r, TILE, Parts(lambda *given: None, fields, 8, None))
        inputs = random_inputs(r, 40, "cpu")
        kept = [weakref.ref(x) for x in inputs]
        run = kernel.prepare(inputs, blank_outputs(r, 40, "cpu"))
        del inputs
        assert all(x() is not None for x in kept)
        run(0, 0)
        del run
        assert all(x() is None for x in kept)
