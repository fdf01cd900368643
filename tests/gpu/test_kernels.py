"""Generated kernels on a Hopper GPU against the interpreter: any M, ragged N, outputs poisoned with NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from codegen_cases import (
    CASES,
    bias_sums,
    blank_outputs,
    lane_sums,
    norm_backward,
    norm_gradients,
    norm_producer,
    plain,
    random_inputs,
    random_region,
    relative_error,
    rotary,
    rotary_neighbours,
    rotary_neighbours_alone,
    rotary_tables,
    sample_gate,
    sample_swiglu,
    scores,
    softmax_sum,
    summed,
    summed_norm_backward,
    swiglu,
    swiglu_backward,
    turned_left,
    unlike,
    unlike_columns,
    weight_gradient,
    weight_gradient_added,
    weighted_sums,
)
from eight_bit_cases import EIGHT_BITS
from torch import Tensor

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.target import SM_90A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core.dtypes import DTYPES
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Product, Reduction, Region
from coda_inductor.core.verify import verify
from coda_inductor.kernels import executable, launch, record
from coda_inductor.kernels.prebuild import Job, prebuild
from coda_inductor.kernels.proof import FAST_TOLERANCE
from coda_inductor.measure.tune import tune


def logsumexp(n: int, k: int) -> Region:
    """A head's normaliser, and nothing else."""
    return Region(n, "bf16", (Product("acc", 0, 1, k, "nk"),), (), (), (), (Reduction("acc", "N", "logsumexp"),))


RANDOM = [random_region(seed, n=328, k=136) for seed in range(12)]
TOLERANCE = 4e-3  # relative Frobenius: one rounding to bf16 is 2e-3. Of fast accumulation FAST_TOLERANCE.


def missing() -> str:
    """Why kernels cannot run here, "" if they can."""
    try:
        target.available(torch.cuda.get_device_capability() if torch.cuda.is_available() else None)
    except Unsupported as refusal:
        return str(refusal)
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing()), reason=missing() or "none")]


EVERYWHERE = (
    norm_producer, swiglu, softmax_sum, scores, lane_sums, norm_backward, norm_gradients, summed, summed_norm_backward,
    unlike, unlike_columns, swiglu_backward, bias_sums, weight_gradient, turned_left, sample_gate, sample_swiglu,
    *EIGHT_BITS,
)  # fmt: skip
TILES = tuple(dict.fromkeys(SM_90A.large + SM_90A.deep + SM_90A.plain + SM_90A.even + SM_90A.adds))


def tiles(region: Region) -> tuple[Config, ...]:
    """Those of the tables for many rows that the Region's matrices have."""
    if DTYPES[region.dtype].itemsize > 1:
        return TILES
    return SM_90A.fast if region.fast else tuple(dict.fromkeys(SM_90A.slow + SM_90A.slow_heavy))


def ragged_is_legal(make: Callable[[int, int], Region], n: int, k: int) -> bool:
    """Are there kernels for so many columns and so long rows?"""
    try:
        legality.check(make(n, k))
    except (Unsupported, AssertionError):
        return False
    return True


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of its own, filled by all cores at once with what the tests launch."""
    directory = str(tmp_path_factory.mktemp("store") / "kernels")
    regions = [make(1000, 528) for make in CASES]
    jobs = [Job(r, legality.candidates(r, m)[0], swap) for r in regions for m in (64, 8192) for swap in lane_orders(r)]
    jobs += [Job(r, c) for make in EVERYWHERE if (r := make(1000, 528)) for c in tiles(r) if legality.is_legal(r, c)]
    prebuild(jobs + [Job(r, legality.candidates(r, 200)[0]) for r in RANDOM], directory)
    return directory


def lane_orders(region: Region) -> tuple[bool, ...]:
    return (False, True)[: 1 if region.half else sum(len(p.pairs) for p in region.products)]


def verdict(region: Region, inputs: list[Tensor], outs: list[Tensor]) -> dict[int, float]:
    """The outputs that are wrong, with their relative errors (NaN: something was not written)."""
    wanted = interpret(region, inputs)
    errors = {i: relative_error(out, want) for i, (out, want) in enumerate(zip(outs, wanted, strict=True))}
    return {i: error for i, error in errors.items() if not error < (FAST_TOLERANCE if region.fast else TOLERANCE)}


@pytest.mark.parametrize("m", [1, 37, 4097])
@pytest.mark.parametrize("n", [1000, 2056])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_cases(make: Callable[[int, int], Region], n: int, m: int, cache_dir: str) -> None:
    region = make(n, 528)  # K is ragged too: 8 tiles of 64 and a bit, of 8 bits 4 of 128
    for up_first in lane_orders(region):
        inputs, outs = random_inputs(region, m, "cuda", seed=m, up_first=up_first), blank_outputs(region, m, "cuda")
        before = launch.LAUNCHES[region.digest]
        launch.kernel(region.text, cache_dir)(inputs, outs)
        assert verdict(region, inputs, outs) == {}
        assert launch.LAUNCHES[region.digest] == before + 1


@pytest.fixture(scope="module")
def adding(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of its own."""
    return str(tmp_path_factory.mktemp("adding") / "kernels")


@pytest.mark.parametrize("config", SM_90A.adds, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(4104, 2056, 528), (1000, 520, 4096), (264, 1048, 1064)])
@pytest.mark.parametrize("layouts", [("km", "kn"), ("mk", "kn"), ("mk", "nk"), ("km", "nk")], ids="".join)
def test_it_is_added_to_what_lies_there(
    layouts: tuple[Any, Any], m: int, n: int, k: int, config: Config, adding: str
) -> None:
    """Not once, but each time, in every layout of the two matrices; and nothing beside it changes."""
    region = weight_gradient_added(n, k)
    (product,) = region.products
    region = verify(replace(region, products=(replace(product, a_layout=layouts[0], b_layout=layouts[1]),)))
    inputs = random_inputs(region, m, "cuda")
    around = torch.randn((m + 16, n), device="cuda")
    before, out = around.clone(), around[8:-8]
    kernel = launch.kernel(region.text, adding)
    for _ in range(3):
        kernel.run_in(config, inputs, [out])
    (once,) = interpret(region, inputs)
    assert relative_error(out - before[8:-8], 3 * once) < 1e-5
    assert torch.equal(around[:8], before[:8]) and torch.equal(around[-8:], before[-8:])


@pytest.mark.parametrize("make", [weight_gradient, plain], ids=lambda make: make.__name__)
@pytest.mark.parametrize("m", [8, 40, 4104])
def test_a_turned_product(make: Callable[[int, int], Region], m: int, adding: str) -> None:
    """Of any layout and dtype, into poisoned memory."""
    region = make(1000, 528)
    inputs, outs = random_inputs(region, m, "cuda"), blank_outputs(region, m, "cuda")
    launch.kernel(region.text, adding).run_in(SM_90A.adds[0], inputs, outs)
    assert SM_90A.adds[0].turned and verdict(region, inputs, outs) == {}


RAGGED = [(make, n, k) for make in CASES for n, k in ((1001, 528), (1002, 528), (2056, 1001))]
RAGGED = [case for case in RAGGED if ragged_is_legal(*case)]


@pytest.mark.parametrize("m", [1, 37, 4097])
@pytest.mark.parametrize(("make", "n", "k"), RAGGED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_rows_of_no_multiple_of_8(make: Callable[[int, int], Region], n: int, k: int, m: int, cache_dir: str) -> None:
    """As of a vocabulary of 50257: rows of N or of K that lie farther apart than they are long."""
    region = make(n, k)
    inputs, outs = random_inputs(region, m, "cuda", seed=m), blank_outputs(region, m, "cuda")
    launch.kernel(region.text, cache_dir)(inputs, outs)
    assert verdict(region, inputs, outs) == {} and not launch.FALLBACKS


def test_as_many_clusters_are_resident_as_the_driver_says() -> None:
    from quack.cute_dsl_utils import get_max_active_clusters

    torch.zeros(1, device="cuda")  # it asks the driver about the current context
    for m, n in {(c.cluster_m, c.cluster_n) for c in TILES}:
        assert executable.resident(Config(128, 128, m, n, True)) == get_max_active_clusters(m * n)


@pytest.mark.parametrize("make", EVERYWHERE, ids=lambda make: make.__name__)
def test_every_configuration(make: Callable[[int, int], Region], cache_dir: str) -> None:
    region = make(1000, 528)
    m = 777
    inputs = random_inputs(region, m, "cuda")
    wrong: dict[str, dict[int, float]] = {}
    for config in tiles(region):
        if legality.is_legal(region, config):
            outs = blank_outputs(region, m, "cuda")
            launch.kernel(region.text, cache_dir).run_in(config, inputs, outs)
            wrong |= {str(config): found} if (found := verdict(region, inputs, outs)) else {}
    assert wrong == {}


HALVES = [rotary, rotary_tables, rotary_neighbours, rotary_neighbours_alone]


@pytest.mark.parametrize("half", SM_90A.halves)
@pytest.mark.parametrize("make", HALVES, ids=lambda make: make.__name__)
def test_halves_of_heads_in_every_tile(make: Callable[[int, int, int], Region], half: int, cache_dir: str) -> None:
    """Of an odd number of heads, which end within a tile. A tile that does not fit them waits for ever."""
    region = make(1000, 528, half)
    legal = [config for config in SM_90A.tiles if legality.is_legal(region, config)]
    assert len(legal) > 8
    prebuild([Job(region, config) for config in legal], cache_dir)
    inputs = random_inputs(region, 777, "cuda")
    wrong: dict[str, dict[int, float]] = {}
    for config in legal:
        outs = blank_outputs(region, 777, "cuda")
        launch.kernel(region.text, cache_dir).run_in(config, inputs, outs)
        wrong |= {str(config): found} if (found := verdict(region, inputs, outs)) else {}
    assert wrong == {}


@pytest.mark.parametrize("region", RANDOM, ids=lambda region: region.digest)
def test_random_regions(region: Region, cache_dir: str) -> None:
    inputs, outs = random_inputs(region, 200, "cuda"), blank_outputs(region, 200, "cuda")
    before = launch.LAUNCHES[region.digest]
    launch.kernel(region.text, cache_dir)(inputs, outs)
    assert verdict(region, inputs, outs) == {} and launch.LAUNCHES[region.digest] == before + 1


def test_two_allocations_in_either_order(cache_dir: str) -> None:
    region = swiglu(1000, 528)
    inputs = random_inputs(region, 300, "cuda")
    weights = [inputs[1].clone(), torch.empty(1 << 24, device="cuda"), inputs[2].clone()]
    for first, second in ((0, 2), (2, 0)):
        given, outs = [inputs[0], weights[first], weights[second], *inputs[3:]], blank_outputs(region, 300, "cuda")
        launch.kernel(region.text, cache_dir)(given, outs)
        assert verdict(region, given, outs) == {}


@pytest.mark.parametrize("tokens", [128, 256, 1024])
@pytest.mark.parametrize("make", [sample_gate, sample_swiglu])
def test_vectors_of_samples_are_parts_of_a_product(
    make: Callable[[int, int, int], Region], tokens: int, cache_dir: str
) -> None:
    """Rows that lie apart are read where they are, of as many samples as there are, the last of them whole or not."""
    region = make(1000, 528, tokens)
    place = next(i for i, o in enumerate(region.operands, region.matrices) if o.extent == "sample")
    before = sum(launch.FALLBACKS.values())
    for config in (c for c in tiles(region) if legality.is_legal(region, c)):
        for m in (1, tokens, tokens + 1, 5 * tokens, 5 * tokens + 65):
            inputs, outs = random_inputs(region, m, "cuda", seed=m), blank_outputs(region, m, "cuda")
            whole = torch.full((len(inputs[place]), 3000), torch.nan, dtype=inputs[place].dtype, device="cuda")
            inputs[place] = whole[:, 1000:2000].copy_(inputs[place])
            launch.kernel(region.text, cache_dir).run_in(config, inputs, outs)
            assert verdict(region, inputs, outs) == {}, (str(config), m)
    assert sum(launch.FALLBACKS.values()) == before


def test_one_kernel_serves_many_sizes_and_skips_what_nobody_reads(cache_dir: str) -> None:
    region = norm_producer(1000, 528)
    kernel = launch.kernel(region.text, cache_dir)
    kernel(random_inputs(region, 8000, "cuda"), blank_outputs(region, 8000, "cuda"))
    count = len(kernel._compiled)
    for m in (4100, 5001, 8191):
        inputs, outs = random_inputs(region, m, "cuda", seed=m), blank_outputs(region, m, "cuda")
        kernel(inputs, [None, outs[1], None])
        assert 0 not in verdict(region, inputs, [interpret(region, inputs)[0], outs[1], outs[2]])
        assert relative_error(outs[1], interpret(region, inputs)[1]) < TOLERANCE and bool(outs[2].isnan().all())
    assert len(kernel._compiled) == count


def test_sums_over_tokens_at_every_edge(cache_dir: str) -> None:
    """One row before, at and after the end of a tile, one tile and two of a cluster; whether or not all are read."""
    region = bias_sums(1000, 528)
    for config in legality.candidates(region, 64)[:1] + SM_90A.large[:3]:
        for m in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 385):
            inputs, outs = random_inputs(region, m, "cuda", seed=m), blank_outputs(region, m, "cuda")
            launch.kernel(region.text, cache_dir).run_in(config, inputs, outs)
            assert verdict(region, inputs, outs) == {}, (str(config), m)
    outs = blank_outputs(region, 385, "cuda")
    launch.kernel(region.text, cache_dir).run_in(config, inputs, [None, None, outs[2], None])
    assert relative_error(outs[2], interpret(region, inputs)[2]) < TOLERANCE and bool(outs[1].isnan().all())


@pytest.mark.parametrize(("region", "m"), [(scores(20008, 64), 300), (bias_sums(1000, 64), 8321)])
def test_sums_of_more_tiles_than_are_added_at_once(region: Region, m: int, cache_dir: str) -> None:
    inputs, outs = random_inputs(region, m, "cuda"), blank_outputs(region, m, "cuda")
    for config in (Config(128, 64, 1, 1, False), legality.candidates(region, legality.bucket(m))[0]):
        launch.kernel(region.text, cache_dir).run_in(config, inputs, outs)
        assert verdict(region, inputs, outs) == {}, str(config)


def test_the_logsumexp_of_scores_that_are_not_finite(cache_dir: str) -> None:
    """As torch's, but for a score of inf, of which quack's logsumexp in the epilogue makes NaN."""
    region, m = logsumexp(1000, 64), 300
    a, b = (torch.zeros(rows, 64, dtype=torch.bfloat16, device="cuda") for rows in (m, 1000))
    a[:, 0], b[:, 0] = 1, torch.arange(1000, device="cuda") % 17  # scores up to 16, then rows of others
    a[1, 0], a[2, 0], a[3, 0], a[4, 0] = -1e38, 0, float("nan"), 1e4
    b[:, 1] = 1
    a[5, 1] = float("-inf")
    (found,) = outs = blank_outputs(region, m, "cuda")
    launch.kernel(region.text, cache_dir)([a, b], outs)
    wanted = torch.logsumexp(a.double() @ b.double().t(), 1)
    assert bool(wanted[5].isneginf()) and bool(wanted[3].isnan())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_follows_a_vector_in_memory_does_not_count(cache_dir: str) -> None:
    region = weighted_sums(1000, 528)
    for m in (1, 37, 4097):
        inputs, outs = random_inputs(region, m, "cuda"), blank_outputs(region, m, "cuda")
        longer = torch.full((m + 8,), float("inf"), dtype=torch.bfloat16, device="cuda")
        longer[:m] = inputs[2]
        launch.kernel(region.text, cache_dir)([*inputs[:2], longer[:m]], outs)
        assert verdict(region, inputs, outs) == {}


def test_rows_of_a_wider_tensor(cache_dir: str) -> None:
    """Slices of packed weights and activations need no copy; misaligned rows get one."""
    region = norm_producer(1000, 528)
    inputs, outs = random_inputs(region, 100, "cuda"), blank_outputs(region, 100, "cuda")
    wide = torch.zeros(100, 1040, dtype=torch.bfloat16, device="cuda")
    for offset in (16, 1):
        wide[:, offset : offset + 528] = inputs[0]
        copies = sum(launch.FALLBACKS.values())
        launch.kernel(region.text, cache_dir)([wide[:, offset : offset + 528], *inputs[1:]], outs)
        assert verdict(region, inputs, outs) == {}
        assert sum(launch.FALLBACKS.values()) == copies + (offset == 1)


def test_a_cuda_graph_replays(cache_dir: str) -> None:
    region = norm_producer(1000, 528)
    kernel, inputs, outs = launch.kernel(region.text, cache_dir), random_inputs(region, 300, "cuda"), None
    outs = blank_outputs(region, 300, "cuda")
    kernel(inputs, outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(inputs, outs)
    for old, new in zip(inputs, random_inputs(region, 300, "cuda", seed=5), strict=True):
        old.copy_(new)
    for out in outs:
        out.fill_(float("nan"))
    graph.replay()
    assert verdict(region, inputs, outs) == {}


def test_tuning_remembers_the_winner(cache_dir: str) -> None:
    region = norm_producer(1024, 512)
    tuned = tune(region, random_inputs(region, 4096, "cuda"), cache_dir, rounds=3)
    kernel = launch.kernel(region.text, cache_dir)
    assert tuned.config in legality.candidates(region, 4096) and tuned.ms > 0
    assert record.remembered(Path(kernel.directory), region, 4096) == tuned.config
    assert kernel._ready[4096, False] is kernel._compiled[tuned.config, False]
    assert all(("ms" in row) != ("why" in row) for row in tuned.rows)
