"""Sums over the tokens of each sample: what they mean, how they are written, and what is no such sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from codegen_cases import (
    blank_outputs,
    nested_sums,
    norm_producer,
    random_inputs,
    relative_error,
    sample_sums,
    whole,
)
from torch import Tensor, fx

from coda_inductor.codegen import source
from coda_inductor.codegen.target import SM_90A
from coda_inductor.commands.differences.bisect import inputs as drawn
from coda_inductor.core import blocks
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.interpret import interpret
from coda_inductor.core.region import Reduction, parse
from coda_inductor.core.text import show
from coda_inductor.core.verify import verify
from coda_inductor.kernels import proof
from coda_inductor.kernels.executable import Executable, Parts
from coda_inductor.measure.tune import worst_error
from coda_inductor.ops.custom import REGION, _fake
from coda_inductor.write.rows import NotByRow, _region


def test_each_sample_is_summed_by_itself() -> None:
    region = sample_sums(24, 16, 4)
    inputs = random_inputs(region, 12, "cpu")
    x, w, _, scale, _ = inputs
    made = x.float() @ w.float().t()
    wanted = made.view(3, 4, 24).sum(1)
    found = interpret(region, inputs)
    assert found[2].shape == (72,) and torch.allclose(found[2].view(3, 24), wanted, atol=1e-5)
    assert torch.allclose(found[3], (made * scale.float().repeat_interleave(4, 0)).sum(0), atol=1e-5)


def test_text_names_tokens_of_samples_alone() -> None:
    region = sample_sums(24, 16)
    assert parse(region.text) == region and region.text.count('"tokens":768') == 3
    assert "sum over M of acc -> [M / 768 * 24]" in show(region)
    assert "tokens" not in norm_producer(24, 16).text and norm_producer(24, 16).multiple == 1


def test_none_is_over_the_columns_of_a_sample() -> None:
    region = sample_sums(24, 16, 4)
    with pytest.raises(BrokenInvariant, match="over the columns of each sample"):
        verify(replace(region, reductions=(Reduction("acc", "N", tokens=4),)))


def test_rows_are_whole_samples() -> None:
    region = sample_sums(24, 16, 4)
    inputs = random_inputs(region, 9, "cpu")
    assert whole(region, 9) == 12 == inputs[0].shape[0]
    assert [*_fake(inputs, region.text, "reference")[1].shape] == [72]
    rows = [x[:10] if x.shape[0] == 12 else x for x in inputs]
    with pytest.raises(BrokenInvariant, match="10 rows are no samples of 4 tokens"):
        _fake(rows, region.text, "reference")
    assert all(m % 4 == 0 for m in proof.sizes(region, next(iter(SM_90A.large)), 1))


@pytest.mark.parametrize("numbers", [1, 150, 300, 1 << 20])
def test_blocks_of_rows_end_with_a_sample(numbers: int) -> None:
    region = sample_sums(24, 16, 4)
    inputs, outs = random_inputs(region, 20, "cpu"), blank_outputs(region, 20, "cpu")
    blocks.into(region, inputs, outs, numbers)
    for found, wanted in zip(outs, interpret(region, inputs), strict=True):
        assert relative_error(found, wanted) < 2e-6


def test_blocks_of_rows_do_not_cut_samples() -> None:
    """A head that is made in blocks of rows has no such Region among them: whole ones only would do."""
    graph, region = fx.Graph(), sample_sums(24, 16)
    region = replace(region, operands=region.operands[:1], lets=(), stores=())
    for totals, refused in ((Reduction("acc", "M", tokens=768), True), (Reduction("acc"), False)):
        text = verify(replace(region, reductions=(totals,))).text
        node = graph.call_function(REGION, ([graph.placeholder(name) for name in "axw"], text, "reference"))
        if refused:
            with pytest.raises(NotByRow, match="knows of samples"):
                _region(node)
        else:
            assert len(_region(node)) == 3


def test_a_launch_gives_each_sum_its_length() -> None:
    """Partial results for each tile of rows, whoever reads the sums."""
    region = sample_sums(24, 16, 256)
    names = source.slots(region)
    fields = (*names.operands, *names.stores, *names.sums, *map(source.whole, names.sums), *source.DOORS)
    seen: list[dict[str, Any]] = []

    def run(*args: Any) -> None:
        seen.append(dict(zip(fields, args[4], strict=True)))

    config = next(c for c in SM_90A.large if c.tile_m == 128)
    kernel = Executable(region, config, Parts(run, fields, 1, 0))
    inputs, outs = random_inputs(region, 768, "cpu"), list[Tensor | None](blank_outputs(region, 768, "cpu"))
    outs[1] = None
    kernel.prepare(inputs, outs)(0, 0)
    (given,) = seen
    assert [given[source.whole(s)].numel() for s in names.sums] == [72, 72, 24, 768]
    assert given[source.whole(names.sums[1])] is outs[2]
    assert [[*given[s].shape] for s in names.sums[:3]] == 3 * [[6, 24]]


def test_sums_of_one_length_are_finished_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is as long as its first sum: of longer ones it would leave the end unwritten."""
    pytest.importorskip("cutlass")
    from coda_inductor.codegen import finish

    region = nested_sums(24, 16)
    totals = [finish.Total(f"r{i}", f"r{i}w", True, "sum", tokens=r.tokens) for i, r in enumerate(region.reductions)]
    totals += [finish.Total("n", "nw", False, "sum"), finish.Total("m", "mw", True, "sum")]
    launched = list[list[str]]()
    monkeypatch.setattr(finish, "finish_sums", lambda parts, wholes, kinds, length, stream: launched.append(wholes))
    monkeypatch.setattr(finish, "_first_lanes", lambda parts, lanes: parts)
    monkeypatch.setattr(finish, "_by_samples", lambda parts, whole: parts)
    stub = SimpleNamespace(size=len, make_tensor=lambda *_: "", select=lambda *_, mode: "")
    monkeypatch.setattr(finish, "cute", stub)
    args = {t.whole: t.whole for t in totals} | {t.parts: SimpleNamespace(iterator=0, layout=0) for t in totals}
    finish.finish(totals, SimpleNamespace(**args), None)
    assert sorted(launched) == [["mw"], ["nw"], ["r0w", "r2w"], ["r1w"]]


def test_sums_of_two_levels() -> None:
    """Of videos and of their frames; a proof sees two videos, how long they may be."""
    region = nested_sums(24, 16, 4)
    inputs = random_inputs(region, 24, "cpu")
    found = interpret(region, inputs)
    made = inputs[0].float() @ inputs[1].float().t()
    assert torch.allclose(found[1], made.view(6, 4, 24).sum(1).flatten(), atol=1e-5)
    assert torch.allclose(found[2], made.view(2, 12, 24).sum(1).flatten(), atol=1e-5)
    config = next(iter(SM_90A.large))
    assert proof.sizes(nested_sums(8192, 64, 32768), config, 132)[-1] == 2 * 3 * 32768


def test_what_a_bisection_draws_is_of_whole_samples() -> None:
    region = sample_sums(24, 16, 384)
    given = drawn(region, 512, torch.device("cpu"))
    assert given[0].shape[0] == 768 and len(interpret(region, given)) == 5


def test_a_search_compares_the_columns_of_all_samples(tmp_path: Path) -> None:
    region = sample_sums(24, 16, 4)
    inputs = random_inputs(region, 1000, "cpu")
    outs = interpret(region, inputs)
    assert worst_error(region, inputs, outs) < 1e-6
    outs[1][24 * 200 + 3] += 1e3
    assert worst_error(region, inputs, outs) > 0.1
