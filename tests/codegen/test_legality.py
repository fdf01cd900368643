"""Which Regions have a kernel, in which tiles and on which targets, and why others have none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from codegen_cases import (
    CASES,
    norm_backward,
    norm_producer,
    plain,
    sample_gate,
    sample_sums,
    sample_swiglu,
    swiglu,
    token_scale,
    unlike,
    weighted_sums,
)
from small_regions import small, two

from coda_inductor.codegen import legality, target
from coda_inductor.codegen.target import SM_90A, SM_100A, Target
from coda_inductor.codegen.tiles import tiles
from coda_inductor.core import settings
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.region import SAMPLE, Operand, Product, Reduction, Region, Store


@pytest.mark.parametrize(
    ("region", "reason"),
    [
        (small(dtype="f64", stores=(Store("acc", "f64"),)), "matrices of f64"),
        (small(n=50257, dtype="e4m3", products=(Product("acc", 0, 1, 64, "kn"),)), "do not lie in rows"),
        (small(n=50257, operands=(Operand("bias", "feature", "bf16"),)), "odd beside a vector of 16 bits"),
        (sample_swiglu(1002, 64), "n = 1002 beside vectors of samples"),
        (small(n=1028, dtype="e4m3"), "n = 1028 is not a multiple of 8"),
        (small(dtype="e4m3", products=(Product("acc", 0, 1, 72, "nk"),)), "k = 72"),
        (small(operands=(Operand("x", "tile", "f64"),)), "operand x of f64"),
        (
            small(operands=tuple(Operand(f"x{i}", "tile", "f32") for i in range(12))),
            "0 of the 3 steps that it loads ahead",
        ),
        (small(operands=tuple(Operand(f"x{i}", "token", "f32") for i in range(13))), "13 operands"),
        (two(products=(Product("g", 0, 1, 64, "nk"), Product("u", 2, 3, 64, "nk"))), "different left operands"),
        (two(products=(Product("g", 0, 1, 64, "kn"), Product("u", 0, 2, 64, "kn"))), "[K, N] weights"),
        (two(stores=(Store("g", "f32"),)), "f32 store"),
        (two(operands=(Operand("x", "tile", "bf16"),)), "tile operand x"),
        (two(reductions=(Reduction("g", "M"),)), "a sum over M beside two products"),
        (two(reductions=(Reduction("g", "N", "logsumexp"),)), "a logsumexp beside two products"),
        (two(products=tuple(Product(f"p{i}", 0, 1 + i, 64, "nk") for i in range(3))), "3 products"),
    ],
)
def test_refusals_say_why(region: Region, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason.replace("[", r"\[")):
        legality.check(region)
    assert not legality.candidates(region, 8192)


def sums_alone(n: int, k: int, tokens: int) -> Region:
    """Without a vector of a sample beside them."""
    return replace(weighted_sums(n, k), reductions=(Reduction("y", "M", tokens=tokens), Reduction("y", "M")))


@pytest.mark.parametrize("row", target.TARGETS.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("make", [sample_gate, sample_swiglu, sample_sums, sums_alone])
def test_a_tile_is_of_one_sample(make: Callable[..., Region], row: Target) -> None:
    """Each target has tiles for samples of SAMPLE tokens, whatever M is, and none that two samples would share."""
    for tokens in (SAMPLE, 3 * SAMPLE, 4096):
        region = make(4096, 4096, tokens)
        legality.check(region, row)
        for m in (1, 64, 300, 1024, 8192, 100000):
            found = legality.candidates(region, m, row)
            assert found and all(tokens % config.tile_m == 0 for config in found), (tokens, m)
    shared = [c for c in row.tiles if SAMPLE % c.tile_m]
    region = make(4096, 4096, SAMPLE)
    assert not any(legality.is_legal(region, c, row) for c in shared)
    with pytest.raises(Unsupported, match="samples of 100 tokens do not fit"):
        legality.check(make(4096, 4096, 100), row)


def test_candidates_are_legal_at_every_size() -> None:
    for make in CASES:
        region = make(4096, 4096)
        legality.check(region)
        for m in (1, 64, 65, 300, 1024, 8192, 100000):
            found = legality.candidates(region, m)
            assert found and len(set(found)) == len(found)
            for config in found:
                legality.require(region, config)
                assert legality.stages(region, config).ab >= SM_90A.least_stages


def test_tiles_for_wide_and_deep_products() -> None:
    """Larger ones, unless they cannot run or would spill. What runs untuned is the first."""

    def names(region: Region) -> list[str]:
        return [str(c) for c in legality.candidates(region, 8192)]

    large = {"256x192co2x1n", "256x192co1x2"}
    for region in (swiglu(22016, 8192), token_scale(8192, 8192)):
        assert large <= set(names(region)) and names(region)[0] == "128x256co2x1"
    for n, k in ((8192, 8184), (8184, 8192)):
        assert names(token_scale(n, k)) == [str(c) for c in SM_90A.large]
    assert names(norm_producer(8192, 22016)) == [str(c) for c in SM_90A.large]  # no stages left for larger ones
    assert names(norm_backward(8192, 22016)) == [str(c) for c in SM_90A.heavy if c.tile_n != 256]


def test_tiles_that_divide_the_machine_better() -> None:
    """4608 x 3072: 128 x 256 gives a multiprocessor four tiles, 192 x 192 three, of 1.125 times the size."""
    region, even = norm_producer(3072, 15360), [str(c) for c in SM_90A.even]
    assert [str(c) for c in legality.candidates(region, 4608)] == [str(c) for c in SM_90A.large] + even
    assert legality.candidates(region, 4608)[0] == SM_90A.large[0]  # what runs untuned is still the first of the table
    assert not set(legality.candidates(norm_producer(2048, 8192), 8192)) & set(SM_90A.even)
    assert not set(legality.candidates(region, 1000)) & set(SM_90A.even)  # few rows have tables of their own
    assert set(legality.candidates(unlike(3072, 3072), 4608)) >= set(SM_90A.even)
    assert not set(legality.candidates(plain(3072, 15360), 4608)) & set(SM_90A.even)
    sizes = [legality.size_class(region, m) for m in (100, 4608, 5000, 8192)]
    assert sizes == [128, 4608, 8192, 8192]  # what wins at 4608 rows runs there only
    assert legality.size_class(region, 4608, SM_100A) == 8192
    assert legality.candidates(region, 4608, SM_100A) == legality.candidates(region, 8192, SM_100A)


@pytest.mark.parametrize("make", [norm_backward, swiglu])
def test_tiles_whose_columns_are_shared(make: Callable[..., Region]) -> None:
    """A weight [K, N] ends the compiler's process there, and two products come out wrong."""
    shared, whole = tiles("192x192co2x1n 128x224co2x1n")
    with pytest.raises(Unsupported, match="192x192co2x1n is for a tile of one product"):
        legality.require(make(3072, 3072), shared)
    legality.require(make(3072, 3072), whole)
    legality.require(norm_producer(3072, 3072), shared)


def test_buckets() -> None:
    assert [legality.bucket(m) for m in (1, 64, 65, 1000, 8192, 8193, 10**9)] == [64, 64, 128, 1024, 8192, 16384, 32768]


def test_targets_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, reason in ((None, "no NVIDIA GPU"), ((8, 0), "found sm_80"), ((10, 0), "sm_100")):
        with pytest.raises(Unsupported, match=reason):
            target.available(capability)
    monkeypatch.setattr(target, "installed", lambda package: "0.5.9")
    with pytest.raises(Unsupported, match="was not tested"):
        target.available((9, 0))
    monkeypatch.setattr(target, "installed", lambda package: None)
    with pytest.raises(Unsupported, match="is not installed"):
        target.available((9, 0))


def test_a_target_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*get_args(settings.Target)} == {"auto", "reference"} | target.TARGETS.keys()
    assert all(name == row.name for name, row in target.TARGETS.items())
    assert target.of_capability(SM_90A.capability) is SM_90A
    less = dataclasses.replace(SM_90A, name="less", shared_memory=SM_90A.shared_memory // 2)
    monkeypatch.setitem(target.TARGETS, "less", less)
    region = token_scale(4096, 4096)
    legality.require(region, SM_90A.large[0])
    with pytest.raises(Unsupported, match="shared memory for 1 of the 3 steps"):
        legality.require(region, SM_90A.large[0], target.of_name("less"))
