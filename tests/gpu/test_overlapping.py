"""Kernels that begin before the one before them has ended, on a Hopper GPU: each output bit for bit what kernels one
after the other give, whatever the kernels before and behind the line write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from codegen_cases import (
    bias_sums,
    blank_outputs,
    norm_producer,
    random_inputs,
    relative_error,
    rotary,
    scores,
    swiglu,
    token_scale,
    weight_gradient,
)
from test_kernels import missing
from torch import Tensor

from coda_inductor.codegen import doors, legality
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Product, Region, Store
from coda_inductor.kernels import launch
from coda_inductor.kernels.prebuild import Job, prebuild

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "none")]


def plain(n: int, k: int) -> Region:
    return Region(n, "bf16", (Product("acc", 0, 1, k, "nk"),), (), (), (Store("acc", "bf16"),), ())


DEEP = 1 << 16
LINES = {  # Regions that stand side by side: the first takes long, or the last, or they leave sums
    "queries, keys, values": [rotary(2048, 512), rotary(512, 512), token_scale(512, 512)],
    "the first takes long": [plain(4096, 4096), plain(128, 64), token_scale(64, 512)],
    "the first runs on few multiprocessors": [plain(128, DEEP), token_scale(4096, 64), plain(128, 64)],
    "the last takes long": [token_scale(64, 64), plain(128, 64), plain(4096, 4096)],
    "with sums": [bias_sums(1000, 520), norm_producer(1000, 520), scores(1000, 64), swiglu(1000, 520)],
    "gradients of weights": [weight_gradient(1000, 520), weight_gradient(2056, 520)],
}
SIZES = (1, 37, 4097)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("store") / "kernels")
    regions = dict.fromkeys(r for line in LINES.values() for r in line)
    prebuild([Job(r, c) for r in regions for c in {legality.candidates(r, m)[0] for m in SIZES}], directory)
    return directory


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Every door that a line has used is closed when it has run, or a later one would begin too early."""
    yield
    torch.cuda.synchronize()
    assert not any(own.words.any() for own in doors._devices.values())


Given = tuple[Region, list[Tensor], list[Tensor]]


def on_gpu(work: list[Given], cache_dir: str) -> list[launch.Work]:
    return [(launch.kernel(region.text, cache_dir), inputs, outs) for region, inputs, outs in work]


def given(line: list[Region], m: int, seed: int) -> list[Given]:
    found = []
    for region in line:
        found.append((region, random_inputs(region, m, "cuda", seed=seed), blank_outputs(region, m, "cuda")))
    return found


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("line", LINES)
def test_a_line_gives_what_its_regions_give_alone(line: str, m: int, cache_dir: str) -> None:
    work = given(LINES[line], m, m)
    for region, inputs, outs in work:
        launch.kernel(region.text, cache_dir)(inputs, outs)
        for out, wanted in zip(outs, interpret(region, inputs), strict=True):
            assert relative_error(out, wanted) < 4e-3
    alone = [[out.clone() for out in outs] for _, _, outs in work]
    read = [(x, x.clone()) for _, inputs, _ in work for x in inputs]
    for _ in range(20):
        for *_, outs in work:
            for out in outs:
                out.fill_(float("nan"))
        launch.together(on_gpu(work, cache_dir))
        for x, _ in read:  # what comes behind a line may write what the line reads
            x.fill_(float("nan"))
        for (*_, found), before in zip(work, alone, strict=True):
            assert all(map(torch.equal, found, before))
        for x, old in read:
            x.copy_(old)


@pytest.mark.parametrize("k", [512, DEEP])
def test_a_line_reads_what_the_kernel_before_it_writes(k: int, cache_dir: str) -> None:
    """A residual stream and the sum of its squares, fresh each time, then three Regions that read both. Blocks of the
    deep producer run on few multiprocessors, and long: those of the line could begin at once."""
    producer, line = norm_producer(128, k), [token_scale(1024, 128), token_scale(64, 128), token_scale(512, 128)]
    for seed in range(10):
        inputs, (h, z, squares) = random_inputs(producer, 100, "cuda", seed=seed), blank_outputs(producer, 100, "cuda")
        weights = [random_inputs(r, 100, "cuda", seed=seed)[1] for r in line]
        work = [(r, [z, w, squares], blank_outputs(r, 100, "cuda")) for r, w in zip(line, weights, strict=True)]
        launch.kernel(producer.text, cache_dir)(inputs, [h, z, squares])
        launch.together(on_gpu(work, cache_dir))
        for r, read, (end,) in work:
            assert relative_error(end, interpret(r, read)[0]) < 4e-3


def test_what_comes_behind_a_line_waits_for_all_of_it(cache_dir: str) -> None:
    """The first takes long, on few multiprocessors, the last ends at once; the kernel behind reads what the first
    writes."""
    slow, quick, reader = plain(128, DEEP), plain(128, 64), plain(64, 128)
    for seed in range(10):
        work = [*given([slow], 100, seed), *given([quick], 37, seed)]
        (_, read, (out,)), _ = work
        weight, found = random_inputs(reader, 1, "cuda", seed=seed)[1], blank_outputs(reader, 100, "cuda")
        launch.together(on_gpu(work, cache_dir))
        launch.kernel(reader.text, cache_dir)([out, weight], found)
        assert relative_error(found[0], interpret(reader, [out, weight])[0]) < 4e-3
        assert relative_error(out, interpret(slow, read)[0]) < 4e-3


def test_a_cuda_graph_of_a_line_replays(cache_dir: str) -> None:
    work = given(LINES["queries, keys, values"], 300, 0)
    run = on_gpu(work, cache_dir)
    launch.together(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.together(run)
    for seed in range(1, 6):
        for region, inputs, outs in work:
            for old, new in zip(inputs, random_inputs(region, 300, "cuda", seed=seed), strict=True):
                old.copy_(new)
            for out in outs:
                out.fill_(float("nan"))
        graph.replay()
        for region, inputs, outs in work:
            for out, wanted in zip(outs, interpret(region, inputs), strict=True):
                assert relative_error(out, wanted) < 4e-3


def test_two_graphs_of_one_capture_replay_at_once(cache_dir: str) -> None:
    """Each captured line has doors of its own, whatever stream it is replayed on."""
    work, graphs = [given(LINES["queries, keys, values"], 300, seed) for seed in (0, 1)], list[torch.cuda.CUDAGraph]()
    for each in work:
        launch.together(on_gpu(each, cache_dir))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            launch.together(on_gpu(each, cache_dir))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for *_, outs in (one for each in work for one in each):
            for out in outs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        for region, inputs, outs in (one for each in work for one in each):
            for out, wanted in zip(outs, interpret(region, inputs), strict=True):
                assert relative_error(out, wanted) < 4e-3


def test_lines_on_several_streams_run_at_once(cache_dir: str) -> None:
    work = [given(LINES["with sums"], 300, seed) for seed in range(3)]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    for _ in range(20):
        for each, stream in zip(work, streams, strict=True):
            with torch.cuda.stream(stream):
                launch.together(on_gpu(each, cache_dir))
    torch.cuda.synchronize()
    for region, inputs, outs in (one for each in work for one in each):
        for out, wanted in zip(outs, interpret(region, inputs), strict=True):
            assert relative_error(out, wanted) < 4e-3
