"""Generated functions run on torch tensors: they mean what their Regions mean, and have the names of their content."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from codegen_cases import (
    CASES,
    bias_sums,
    lane_sums,
    norm_backward,
    norm_gradients,
    norm_producer,
    random_inputs,
    random_region,
    sample_gate,
    sample_swiglu,
    softmax_sum,
    swiglu_backward,
    weighted_sums,
)
from simulated_epilogues import agree, run, standin
from small_regions import small

from coda_inductor.codegen import source
from coda_inductor.codegen.cases_of_8_bits import scaled_swiglu_backward
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Let, Reduction, Region, Store
from coda_inductor.core.verify import verify


@pytest.mark.parametrize("seed", range(120))
def test_generated_functions_mean_what_the_region_means(seed: int) -> None:
    region = random_region(seed)
    inputs = random_inputs(region, 5, "cpu", seed=seed)
    swapped = len(region.products) == 2 and seed % 2 == 0
    assert agree(region, run(source.render(region, swapped=swapped), region, inputs, swapped=swapped), inputs)


@pytest.mark.parametrize("m", [4, 7, 11])
@pytest.mark.parametrize("make", [sample_gate, sample_swiglu])
def test_rows_read_their_samples_vectors(make: Callable[..., Region], m: int) -> None:
    region = make(24, 16, 4)
    inputs = random_inputs(region, m, "cpu")
    assert agree(region, run(source.render(region), region, inputs), inputs)


def test_what_is_made_of_vectors_of_samples_is_masked_past_the_last_row() -> None:
    region = sample_gate(24, 16, 4)
    region = dataclasses.replace(region, lets=(*region.lets, Let("biased", "add", ("acc", "more"))))
    region = verify(dataclasses.replace(region, reductions=(Reduction("biased", "M"), Reduction("biased"))))
    inputs = random_inputs(region, 7, "cpu")
    text = source.render(region)
    assert "MaskedRowVecReduce(" in text and agree(region, run(text, region, inputs), inputs)
    assert not agree(region, run(text.replace("Masked", ""), region, inputs), inputs)


def test_the_mask_is_needed_and_there() -> None:
    """Every form of the mask, and in the random regions: without it some sum is wrong."""
    for make, sink in ((softmax_sum, "ColVecReduce"), (lane_sums, "ColVecReduce"), (bias_sums, "RowVecReduce")):
        region = make(24, 16)
        inputs = random_inputs(region, 5, "cpu")
        text = source.render(region)
        assert f"Masked{sink}(" in text and agree(region, run(text, region, inputs), inputs)
        assert not agree(region, run(text.replace("Masked", ""), region, inputs), inputs)
    for over in ("N", "M"):
        regions = [dataclasses.replace(r, reductions=(x,)) for r in map(random_region, range(300))
                   for x in r.reductions if x.over == over and source.needs_mask(r, x)]  # fmt: skip
        broken = 0
        for region in regions:
            inputs = random_inputs(region, 5, "cpu")
            broken += not agree(region, run(source.render(region).replace("Masked", ""), region, inputs), inputs)
        assert len(regions) > 8 and broken > len(regions) // 2


def test_a_sum_of_zeros_past_the_edge_is_not_masked() -> None:
    for make in (norm_producer, norm_backward, norm_gradients, swiglu_backward):
        region = make(24, 16)
        assert not any(source.needs_mask(region, total) for total in region.reductions)
    region = bias_sums(24, 16)
    assert [source.needs_mask(region, total) for total in region.reductions] == [True, True, False]


def with_maxima(seed: int) -> Region:
    """A random Region that also takes the largest of a value, of its size or of that as it is rounded, over rows and
    columns."""
    region = random_region(seed)
    values = [s.value for s in region.stores] + [r.value for r in region.reductions]
    value, kind = values[seed % len(values)], seed % 3
    lets = (Let("size", "abs", (value,)), Let("stored", "bf16", ("size",)))[:kind]
    axes: tuple[Literal["N", "M"], ...] = ("N",) if len(region.products) == 2 else ("N", "M")
    largest = tuple(Reduction((value, "size", "stored")[kind], over, "max") for over in axes)
    dtype = "e4m3" if seed % 4 else "bf16"
    return verify(dataclasses.replace(region, dtype=dtype, lets=region.lets + lets, reductions=largest))


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_is_that_of_what_lies_inside(seed: int) -> None:
    region = with_maxima(seed)
    inputs = random_inputs(region, 5, "cpu", seed=seed)
    assert agree(region, run(source.render(region), region, inputs), inputs)


def test_the_largest_is_masked_where_it_must_be() -> None:
    """What may be negative inside, or is not 0 outside, is masked; the size of what is 0 there is not, of 8-bit
    matrices: of others a factor may be infinite where the largest is not."""
    regions = [with_maxima(seed) for seed in range(240)]
    texts = [source.render(region) for region in regions]
    masked = [i for i, text in enumerate(texts) if "masked=True" in text and regions[i].dtype == "e4m3"]
    broken = 0
    for i in masked:
        inputs = random_inputs(regions[i], 5, "cpu", seed=i)
        broken += not agree(regions[i], run(texts[i].replace("masked=True", ""), regions[i], inputs), inputs)
    assert len(masked) > 60 and broken > len(masked) // 5
    unmasked = [r for r, text in zip(regions, texts, strict=True) if "masked=True" not in text]
    assert len(unmasked) > 40 and {r.dtype for r in unmasked} == {"e4m3"}


def test_the_largest_of_rounded_values_is_rounded_once() -> None:
    region = scaled_swiglu_backward(24, 16)
    text = source.render(region)
    assert text.count('rounded="BFloat16"') == 4 and "BFloat16)" not in text
    kept = dataclasses.replace(region, stores=(Store("stored_u", "bf16"), *region.stores[1:]))
    assert [*source.rounded_late(kept)] == ["stored_g"]
    inputs = random_inputs(region, 5, "cpu")
    for found, wanted in zip(run(text, region, inputs), interpret(region, inputs), strict=True):
        if found.dim() == 1:
            assert torch.equal(found.bfloat16().float(), found) and torch.allclose(found, wanted, rtol=2**-7)


def test_what_follows_an_odd_vector_of_16_bits_is_masked() -> None:
    for dtype, wanted in (("f32", [False, False, False]), ("bf16", [True, True, False])):
        region = weighted_sums(24, 16, dtype)
        assert [source.needs_mask(region, total) for total in region.reductions] == wanted
        inputs = random_inputs(region, 5, "cpu")
        assert agree(region, run(source.render(region), region, inputs), inputs)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_the_generated_cases_mean_what_the_region_means(make: Callable[[int, int], Region]) -> None:
    region = make(24, 16)
    if region.products[0].b_layout == "kn":  # the simulation transposes
        region = dataclasses.replace(region, products=(dataclasses.replace(region.products[0], b_layout="nk"),))
    inputs = random_inputs(region, 5, "cpu")
    assert agree(region, run(source.render(region), region, inputs), inputs)


@pytest.mark.parametrize("name", source.HELPERS)
def test_helpers_are_accurate(name: str) -> None:
    names = standin()
    exec(source.HELPERS[name], names)
    x = torch.cat([torch.linspace(-20, 20, 40001), torch.logspace(-8, 0, 1000), torch.tensor([-1e4, 1e4])])
    wanted = getattr(torch, name.removesuffix("_beside_one"))(x.double())
    off = (names[name](x).double() - wanted).abs()
    if name.endswith("_beside_one"):
        assert float(off.max()) < 2e-7
    else:
        assert float((off / wanted.abs()).nan_to_num().max()) < 3e-6


@pytest.mark.parametrize(
    ("uses", "short"),
    [
        ([("add", "t", 1.0)], True),
        ([("add", "t", 1.0), ("mul", "t", "t"), ("neg", "v1"), ("add", "v2", 1.0)], True),
        ([("mul", "t", "t"), ("sub", 1.0, "v0")], True),
        ([("mul", "t", 30.0)], False),  # a cap
        ([("add", "t", 1.0), ("mul", "t", "acc")], False),
        ([("mul", "t", "t"), ("mul", "v0", "acc")], False),
        ([("add", "t", "acc")], False),
        ([("neg", "t"), ("mul", "v0", "acc")], False),
    ],
)
def test_where_a_shorter_tanh_will_do(uses: list[tuple[Any, ...]], short: bool) -> None:
    """Only where nothing sees it but beside 1, of which its error is the last digit."""
    lets = (Let("t", "tanh", ("acc",)), *(Let(f"v{i}", op, tuple(args)) for i, (op, *args) in enumerate(uses)))
    region = small(lets=lets, stores=(Store(lets[-1].name, "bf16"),))
    assert ("tanh_beside_one" in source.render(region)) is short
    for seen in ({"stores": (Store("t", "bf16"),)}, {"reductions": (Reduction("t"),)}):
        assert "tanh_beside_one" not in source.render(dataclasses.replace(region, **seen))
    inputs = random_inputs(region, 5, "cpu")
    assert agree(region, run(source.render(region), region, inputs), inputs)


def test_rendering_is_deterministic_and_by_content() -> None:
    region = norm_producer(4096, 4096)
    assert source.render(region) == source.render(region)
    names = {source.module_name(source.render(make(4096, 4096))) for make in CASES}
    assert len(names) == len(CASES) - 2  # weights' gradients leave as a plain product does
    lets = (Let("in", "mul", ("acc", float("inf"))),)
    odd = small(lets=lets, stores=(Store("in", "bf16"),), reductions=(Reduction("in"),))
    compile(source.render(odd), "odd", "exec")  # a keyword as a name, an infinite literal


@pytest.mark.parametrize("name", ["device.py", "finish.py", "sinks.py"])
def test_kernels_are_named_by_all_of_the_device_code(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a change to either file no kernel may be left that was compiled before."""
    here = Path(source.__file__)
    for path in here.parent.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = source.device_digest()
    monkeypatch.setattr(source, "__file__", str(tmp_path / here.name))
    assert source.device_digest() == before
    (tmp_path / name).write_text((tmp_path / name).read_text() + "# changed\n")
    assert source.device_digest() != before
