"""What is not worth its bytes: norms deferred to weights that are larger than what they spare, and wide copies."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain

WIDTH = 1024


class Head(nn.Module):
    """The end of a decoder: norm, product, residual; norm, and a product with many features."""

    def __init__(self, features: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(WIDTH) for _ in "ab")
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        out: Tensor = self.head(second(x + self.down(F.gelu(self.up(first(x))))))
        return out


def explained(model: nn.Module, *args: Tensor, mode: Literal["infer", "train"] = "infer") -> dict[str, Any]:
    return explain(model, args, {}, mode, Settings(target="sm_90a"))


def derived(tokens: int, features: int, norm: type[nn.Module] = nn.LayerNorm) -> tuple[set[str], int]:
    """The laws that fired, and the bytes that are left."""
    with torch.device("meta"):
        model, x = Head(features, norm).bfloat16(), torch.empty(tokens, WIDTH, dtype=torch.bfloat16)
    facts = explained(model, x)
    laws = {law for graph in facts["graphs"] for r in graph["regions"] for law in r["laws"]}
    return laws, facts["totals"]["bytes_after"]


@pytest.mark.parametrize(
    ("tokens", "features", "deferred"),
    [(2048, 65536, False), (32768, 65536, True), (2048, 6144, True), (1024, 16384, False), (512, 12288, True)],
)
def test_a_norm_is_deferred_to_a_head_only_if_its_weight_is_small(tokens: int, features: int, deferred: bool) -> None:
    """By the mean, and by the bias, the deferred norm sums over the weight. (12288 x 1024 numbers are read in the time
    of a launch.)"""
    laws, _ = derived(tokens, features)
    assert ("bilinearity" in laws) is deferred


class Readers(Head):
    """Several products of one normalised tensor."""

    def __init__(self, features: int, readers: int) -> None:
        super().__init__(features)
        self.readers = nn.ModuleList(nn.Linear(WIDTH, features, bias=False) for _ in range(readers))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        n = second(x + self.down(F.gelu(self.up(first(x)))))
        return torch.cat([torch.tanh(f(n)) for f in self.readers])


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize(("tokens", "readers", "deferred"), [(4096, 2, True), (4096, 3, False), (8192, 3, True)])
def test_all_readers_weights_are_counted(
    tokens: int, readers: int, deferred: bool, mode: Literal["infer", "train"]
) -> None:
    """One pass over the operand would serve them all. The triangle's vectors, too, are sums over all of them."""
    with torch.device("meta"):
        model, x = Readers(6144, readers).bfloat16(), torch.empty(tokens, WIDTH, dtype=torch.bfloat16)
    regions = [r for graph in explained(model, x, mode=mode)["graphs"] for r in graph["regions"]]
    laws = {law for r in regions for law in r["laws"]}
    assert ("bilinearity" in laws) is deferred and ("triangle" in laws) is (deferred and mode == "train")


def test_rms_norm_sums_over_no_weight() -> None:
    laws, _ = derived(2048, 65536, nn.RMSNorm)
    assert "bilinearity" in laws


def test_as_written_it_moves_less() -> None:
    _, left = derived(2048, 65536)
    stream, weight = 2048 * WIDTH * 2, 65536 * WIDTH * 2
    assert left < 6 * stream < weight


class Patches(nn.Module):
    """Patches by a convolution, whose features lie before their places in memory, as then does the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(3))
        self.up, self.down = (nn.ModuleList(nn.Linear(128, 128) for _ in range(3)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


def test_the_backward_reads_the_stream_in_its_own_dtype() -> None:
    """Its norms are computed of float32 copies of the stream, in rows: what an epilogue stored is the same in half the
    bytes. So is a copy of the first norm's input, which is no product's: it is widened behind the copy."""
    x = torch.empty(2, 3, 256, 256, dtype=torch.bfloat16)
    (graph,) = explained(Patches().bfloat16(), x, mode="train")["graphs"]
    loads = {r["id"]: r["loads"] for r in graph["regions"]}
    assert len(loads) == 12 and not any("f32[8192, 128]" in read for read in loads.values())
    assert all("bf16[8192, 128]" in loads[region] for region in ("r1", "r11"))
