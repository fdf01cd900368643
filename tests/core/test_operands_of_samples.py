"""Operands of a sample: what they mean, how they are written, and what is no such operand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from codegen_cases import norm_producer, random_inputs, rotary, sample_gate, sample_swiglu

from coda_inductor.codegen.target import SM_90A
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Operand, Product, Region, Store, parse
from coda_inductor.core.text import show
from coda_inductor.core.verify import verify
from coda_inductor.kernels import proof
from coda_inductor.kernels.executable import _by_rows
from coda_inductor.measure.tune import _some_rows
from coda_inductor.ops.custom import _fake


@pytest.mark.parametrize("m", [1, 4, 7, 12])
def test_rows_read_the_vector_of_their_sample(m: int) -> None:
    region = sample_gate(24, 16, 4)
    inputs = random_inputs(region, m, "cpu")
    rows = [x.repeat_interleave(4, 0)[:m] if o.tokens else x for x, o in zip(inputs[2:], region.operands, strict=True)]
    tiles = tuple(replace(o, extent="tile", tokens=0) if o.tokens else o for o in region.operands)
    wanted = interpret(replace(region, operands=tiles), [*inputs[:2], *rows])
    assert all(torch.equal(a, b) for a, b in zip(interpret(region, inputs), wanted, strict=True))


def test_text_names_tokens_of_samples_alone() -> None:
    for region in (sample_gate(24, 16), sample_swiglu(24, 16)):
        assert parse(region.text) == region and region.text.count('"tokens":768') == 2
    assert "tokens" not in norm_producer(24, 16).text
    assert sample_gate(24, 16).digest != sample_gate(24, 16, 512).digest
    assert "load gate[M / 768, 24] = in4  (bf16, per sample)" in show(sample_gate(24, 16))


@pytest.mark.parametrize(
    "operands",
    [(Operand("x", "sample", "f32"),), (Operand("x", "feature", "f32", 8),), (Operand("x", "tile", "f32", 8),)],
)
def test_tokens_are_those_of_a_sample(operands: tuple[Operand, ...]) -> None:
    with pytest.raises(BrokenInvariant, match="tokens"):
        verify(Region(8, "bf16", (Product("acc", 0, 1, 8, "nk"),), operands, (), (Store("acc", "bf16"),), ()))


def test_none_stands_beside_halves_of_heads() -> None:
    region = rotary(64, 16)
    with pytest.raises(BrokenInvariant, match="beside halves of heads"):
        verify(replace(region, operands=(*region.operands, Operand("x", "sample", "f32", 8))))


def test_shapes_are_checked_while_compiling() -> None:
    region = sample_gate(24, 16, 4)
    inputs = random_inputs(region, 9, "cpu")
    assert [*inputs[4].shape] == [3, 24] and _fake(inputs, region.text, "reference")[0].shape == (9, 24)
    for wrong in (inputs[4][:2], inputs[4][0], inputs[4][:, :8]):
        with pytest.raises(BrokenInvariant):
            _fake([*inputs[:4], wrong, *inputs[5:]], region.text, "reference")


def test_a_kernel_reads_them_where_they_are() -> None:
    """Also of a part of a product's columns."""
    vectors = torch.randn(3, 40)[:, 8:32]
    rows = _by_rows(vectors, 5)
    assert torch.equal(rows.flatten(0, 1), vectors.repeat_interleave(5, 0)) and rows.data_ptr() == vectors.data_ptr()


def test_some_rows_are_compared_with_their_own_samples() -> None:
    """Where a tile is searched for, a few rows are computed on torch."""
    region = sample_gate(24, 16, 64)
    inputs = random_inputs(region, 1000, "cpu")
    part, rows, given = _some_rows(region, inputs)
    wanted = interpret(region, inputs)
    for found, whole in zip(interpret(part, given), wanted, strict=False):
        assert torch.allclose(found.float(), whole[rows].float(), rtol=2e-2, atol=1e-3)


def test_a_proof_sees_two_samples() -> None:
    region = sample_gate(24, 16, 8192)
    config = next(iter(SM_90A.large))
    last = proof.sizes(region, config, 1)[-1]
    assert last > 8192 and [*proof.random_inputs(region, last, torch.device("cpu"))[4].shape] == [2, 24]
