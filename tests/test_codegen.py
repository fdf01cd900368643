"""Code generation without a GPU: legality, the generated functions run on torch tensors, the store."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, get_args

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
    softmax_sum,
    summed,
    swiglu,
    swiglu_backward,
    token_scale,
    weighted_sums,
)
from torch import Tensor

from coda_inductor.codegen import legality, source, target
from coda_inductor.codegen.target import SM_90A
from coda_inductor.codegen.tiles import Config
from coda_inductor.core import settings
from coda_inductor.core.errors import Unsupported
from coda_inductor.core.interpret import interpret
from coda_inductor.core.ops import OPS
from coda_inductor.core.region import DTYPES, Let, Operand, Product, Reduction, Region, Store
from coda_inductor.kernels import launch, library, prebuild, record, store
from coda_inductor.kernels.ahead import Ahead
from coda_inductor.kernels.executable import Run
from coda_inductor.measure import tune

HANGING = 8  # rows and columns by which the simulated last tile hangs over the edge
KINDS = ("LaneVector", "ColVecLoad", "RowVecLoad", "TileLoad", "ColVecReduce", "RowVecReduce", "OnlineLSEReduce")
OF_HALVES = ("HalfStore", "HalfVector", "RotaryCosSinTMALoad")


class Pair(NamedTuple):
    """quack's value of two lanes."""

    a: Tensor
    b: Tensor


def as_float(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A torch function that takes and ignores CuTeDSL's keyword arguments, and accepts literals."""
    return lambda *args, **_: f(*(a if isinstance(a, Tensor) else torch.tensor(a, dtype=torch.float32) for a in args))


def standin() -> dict[str, Any]:
    """The names a generated module imports, on torch. Sinks and loads are strings; the decorator keeps them."""
    used = {name for op in OPS.values() for name in re.findall(r"cute\.math\.(\w+)", op.cute)}
    math = types.SimpleNamespace(**{name: as_float(getattr(torch, name)) for name in {*used, "exp2", "tanh", "erf"}})
    arch = types.SimpleNamespace(
        fmax=as_float(torch.maximum), fmin=as_float(torch.minimum), rcp_approx=as_float(torch.reciprocal)
    )
    names: dict[str, Any] = {"cute": types.SimpleNamespace(math=math, arch=arch), "select_": as_float(torch.where)}
    names |= {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}
    names["float32"] = as_float(torch.clone)
    names["unpack"] = lambda pair: pair
    for kind in (*KINDS, "MaskedColVecReduce", "MaskedRowVecReduce"):
        names[kind] = lambda name, kind=kind, scaled=False: types.SimpleNamespace(kind=kind, scaled=scaled)
    names |= dict.fromkeys(OF_HALVES, lambda *_: None)
    for decorator in ("one_product", "two_products", "summed_products"):
        names[decorator] = lambda **given: lambda fn: (fn, given)
    return names


def run(text: str, region: Region, inputs: list[Tensor], *, swapped: bool = False) -> list[Tensor]:
    """A generated module on torch tensors, as the kernel would run it: over tiles that hang HANGING rows and columns
    over the edge, where hardware fills what ends there with 0, and plain sums add up what they get. A token vector of
    16 bits is copied in pairs: past an odd M comes what lies behind it in memory."""
    names = standin()
    text = text.replace("Float32(", "float32(")  # a type and a function: torch has no one thing that is both
    exec(text[text.index("\n\n", text.index("from quack.epilogue.rotary")) :], names)
    function, given = names["epilogue"]

    def hang(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.float(), (0, HANGING) * x.dim())

    def halves(x: Tensor) -> tuple[Tensor, ...]:
        """Of what varies over 2n features in its first dimension: the two of each head."""
        heads = x.unflatten(0, (-1, 2, region.half))
        return heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)

    def product(p: Product) -> Tensor:
        pairs = [(inputs[a].float(), inputs[b].float()) for a, b in p.pairs]
        turned = [(x if p.a_layout == "mk" else x.t(), w if p.b_layout == "kn" else w.t()) for x, w in pairs]
        return torch.stack([x @ w for x, w in turned]).sum(0)

    products = [product(p) for p in region.products]
    if region.half:
        products = [x.t() for x in halves(products[0].t())]
    m = products[0].shape[0]
    accumulators = [hang(x) for x in (reversed(products) if swapped else products)]
    values: dict[str, Any] = {}
    for slot, o, x in zip(source.slots(region).operands, region.operands, inputs[region.matrices :], strict=True):
        if region.half and o.extent != "token":
            lanes = [t.float().t() for t in halves(x)] if x.dim() == 1 else [x[:, i::2].float() for i in (0, 1)]
            values[slot] = Pair(*(hang(t.expand(m, -1).repeat(1, region.n // t.shape[-1])) for t in lanes))
            continue
        shape = {"token": (-1, 1), "feature": (1, -1), "tile": (m + HANGING, -1)}[o.extent]
        padded = hang(x)
        if o.extent == "token" and o.dtype != "f32" and m % 2:
            padded[m] = torch.nan
        full = padded.reshape(shape).expand(m + HANGING, region.n + HANGING)
        values[slot] = Pair(full, full) if len(products) == 2 and o.extent == "feature" else full
    found = function(Pair(*accumulators) if len(products) == 2 else accumulators[0], **values)
    slots = source.slots(region)

    def stored(slot: str) -> Tensor:
        both = [found[y][:m, : region.n] for y in ((slot, source.second(slot)) if region.half else (slot,))]
        return torch.stack([x.unflatten(1, (-1, region.half or 1)) for x in both], 2).flatten(1)

    stores = [stored(y).to(DTYPES[s.dtype]) for y, s in zip(slots.stores, region.stores, strict=True)]
    sums = []
    for slot in slots.sums:
        sink, value = given["reduces"][slot], found[slot]
        if len(products) == 2:
            value = value[0] + value[1]
        elif sink.scaled:
            value = value[0] * value[1]
        if sink.kind == "OnlineLSEReduce":
            sums.append(value[:m, : region.n].logsumexp(1))
            continue
        dim, size, left = (1, region.n, m) if sink.kind.endswith("ColVecReduce") else (0, m, region.n)
        sums.append((value.narrow(dim, 0, size) if sink.kind.startswith("Masked") else value).sum(dim)[:left])
    return stores + sums


def agree(region: Region, found: list[Tensor], inputs: list[Tensor]) -> bool:
    wanted = interpret(region, inputs)
    return all(relative_error(f, w) < 1e-5 for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("seed", range(120))
def test_generated_functions_mean_what_the_region_means(seed: int) -> None:
    region = random_region(seed)
    inputs = random_inputs(region, 5, "cpu", seed=seed)
    swapped = len(region.products) == 2 and seed % 2 == 0
    assert agree(region, run(source.render(region, swapped=swapped), region, inputs, swapped=swapped), inputs)


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


def small(**changes: Any) -> Region:
    """A legal Region with some fields replaced."""
    fields: dict[str, Any] = {
        "n": 256, "dtype": "bf16", "products": (Product("acc", 0, 1, 64, "nk"),), "operands": (),
        "lets": (), "stores": (Store("acc", "bf16"),), "reductions": (),
    }  # fmt: skip
    return Region(**(fields | changes))


def two(**changes: Any) -> Region:
    lanes = {"products": (Product("g", 0, 1, 64, "nk"), Product("u", 0, 2, 64, "nk")), "stores": (Store("g", "bf16"),)}
    return small(**(lanes | changes))


@pytest.mark.parametrize(
    ("region", "reason"),
    [
        (small(dtype="f64", stores=(Store("acc", "f64"),)), "matrices of f64"),
        (small(n=50257), "n = 50257"),
        (small(products=(Product("acc", 0, 1, 60, "nk"),)), "k = 60"),
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
        (two(products=tuple(Product(f"p{i}", 0, 1 + i, 64, "nk") for i in range(3))), "3 products"),
    ],
)
def test_refusals_say_why(region: Region, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason.replace("[", r"\[")):
        legality.check(region)
    assert not legality.candidates(region, 8192)


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


def test_buckets() -> None:
    assert [legality.bucket(m) for m in (1, 64, 65, 1000, 8192, 8193, 10**9)] == [64, 64, 128, 1024, 8192, 16384, 32768]


def test_the_store_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store.open_store(str(tmp_path / "a" / "kernels"))
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert store.open_store(str(made)) == made
    made.chmod(0o770)
    with pytest.raises(Unsupported, match="others may write"):
        store.open_store(str(made))
    made.chmod(0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(Unsupported, match="belongs to user"):
        store.open_store(str(made))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.open_store(None) == tmp_path / "xdg" / "coda_inductor"


def test_records_stay_and_corrupted_ones_are_absent(tmp_path: Path) -> None:
    region, config = token_scale(256, 64), Config(128, 128, 2, 1, True)
    assert record.remembered(tmp_path, region, 1024) is None
    record.remember(tmp_path, region, 1024, config, 0.5, [])
    record.remember(tmp_path, region, 1024, Config(64, 64, 1, 1, False), 0.1, [])
    assert record.remembered(tmp_path, region, 1024) == config
    assert record.remembered(tmp_path, region, 2048) is None
    assert record.remembered(tmp_path, plain(256, 64), 1024) is None
    (path,) = (tmp_path / "tuning").glob("*.json")
    wrong_type = path.read_text().replace("128", '"x"')
    for text in ("", "[]", "{", '{"config": {"tile_m": 1}}', '{"config": null}', wrong_type):
        path.write_text(text)
        assert record.remembered(tmp_path, region, 1024) is None
    record.remember(tmp_path, region, 1024, config, 0.5, [])


class FakeKernel:
    """Stands in for the compiled kernel: the interpreter, with what it was asked. Two matrices that share a descriptor
    must lie where one can span them, and the second weight of two after the first, unless the kernel is `swapped`."""

    def __init__(self, region: Region, config: Config, directory: Path, *, swapped: bool = False) -> None:
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


def test_an_error_in_any_output_is_found() -> None:
    """On the rows and columns that are compared; what follows from correct stores and sums is no error."""
    region = bias_sums(1000, 16)
    inputs = random_inputs(region, 900, "cpu")
    right = interpret(region, inputs)
    assert [out.shape for out in tune.outputs(region, inputs)] == [out.shape for out in right]
    assert tune.worst_error(region, inputs, right) < 1e-6
    for i in range(len(right)):
        for place in (0, -1):
            wrong = [out.clone() for out in right]
            wrong[i][place] += 1000.0
            assert tune.worst_error(region, inputs, wrong) > tune.TOLERANCE
            wrong[i][place] = float("nan")
            assert not tune.worst_error(region, inputs, wrong) < tune.TOLERANCE


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


def test_a_kernel_that_cannot_be_built_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next configuration, and when none is left by the interpreter."""
    launch.FALLBACKS.clear()
    region = token_scale(64, 32)
    inputs, out = random_inputs(region, 500, "cpu"), torch.empty(500, 64, dtype=torch.bfloat16)
    refused = set(legality.candidates(region, 500)[:2])

    def build(region: Region, config: Config, directory: Path, *, swapped: bool) -> FakeKernel:
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


def test_rendering_is_deterministic_and_by_content() -> None:
    region = norm_producer(4096, 4096)
    assert source.render(region) == source.render(region)
    names = {source.module_name(source.render(make(4096, 4096))) for make in CASES}
    assert len(names) == len(CASES) - 1  # a weight gradient leaves as a plain product does
    lets = (Let("in", "mul", ("acc", float("inf"))),)
    odd = small(lets=lets, stores=(Store("in", "bf16"),), reductions=(Reduction("in"),))
    compile(source.render(odd), "odd", "exec")  # a keyword as a name, an infinite literal


def test_what_is_compiled_idly_gives_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many kernels as there are cores are under way; what is begun by then goes before the rest of them."""
    asked, go, done = list[list[int]](), threading.Semaphore(0), threading.Semaphore(0)

    def ask(jobs: list[prebuild.Job], directory: Path, workers: int | None, known: Callable[..., None]) -> None:
        if jobs[0].region.n == 768:
            time.sleep(0.3)  # who does not wait for it is first
        with here:
            asked.append([job.region.n for job in jobs])
            done.release()
            assert go.acquire(timeout=60)
        for i in range(len(jobs)):
            known(i, prebuild.Outcome("", 0.0))

    def jobs(*widths: int) -> list[prebuild.Job]:
        return [prebuild.Job(plain(n, 64), Config(128, 128, 1, 1, True)) for n in widths]

    here = threading.Lock()  # one request at a time
    monkeypatch.setattr(prebuild, "_ask", ask)
    monkeypatch.setattr(prebuild, "_workers", lambda: 2)
    monkeypatch.setattr(library, "folder", lambda region, *rest, **how: tmp_path / str(region.n))
    over = threading.Event()
    idle = prebuild.begin(jobs(128, 256, 384, 512, 640), str(tmp_path), over=over)
    assert done.acquire(timeout=60)
    pressing = prebuild.begin(jobs(768, 896, 1024), str(tmp_path))
    for _ in range(4):
        go.release()
    for future in (*idle.values(), *pressing.values()):
        assert future.result(timeout=60).reason == ""
    assert asked == [[128, 256], [768, 896, 1024], [384, 512], [640]] and not prebuild._pressing
    over.set()
    (future,) = prebuild.begin(jobs(128), str(tmp_path), over=over).values()
    assert future.result(timeout=60).reason == "not asked for any more" and len(asked) == 4
    assert prebuild.begin([], str(tmp_path)) == {} and not prebuild._pressing
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
    with pytest.raises(RuntimeError, match="no thread"):
        prebuild.begin(jobs(128), str(tmp_path))
    assert not prebuild._pressing


def test_idle_work_is_begun_again_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not if it is done, and not if it was asked for before; what stays idle is given up at the end."""
    begun, given = list[tuple[list[int], bool]](), list[threading.Event]()

    def begin(
        jobs: list[prebuild.Job], cache_dir: str | None, over: threading.Event | None
    ) -> dict[prebuild.Job, Future[prebuild.Outcome]]:
        begun.append(([job.region.n for job in jobs], over is not None))
        given.extend([over] if over else [])
        return {job: Future() for job in jobs}

    monkeypatch.setattr(prebuild, "begin", begin)
    ahead = Ahead(None)
    first, second, third = (prebuild.Job(plain(n, 64), Config(128, 128, 1, 1, True)) for n in (128, 256, 384))
    ahead.begin([first, second, second, third], idle=True)
    ahead.made[first].set_result(prebuild.Outcome("", 0.0))
    ahead.begin([first, second])
    ahead.begin([first, second])
    ahead.begin([second, third], idle=True)
    assert begun == [([128, 256, 384], True), ([256], False), ([], False), ([], True)]
    ahead.end()
    ahead.begin([third], idle=True)
    assert [over.is_set() for over in given] == [True, True, False]


@pytest.mark.parametrize("name", ["device.py", "finish.py"])
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
