"""torch.autocast("cuda") in a traced graph, on a machine without CUDA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coda_inductor.core.settings import Settings
from coda_inductor.explain import explain
from coda_inductor.explain.autocast import WIDE, WIDE_RESULT
from coda_inductor.explain.capture import capture

LEFT_OUT = ("upsample", "_upsample", "dist", "pdist", "cdist", "renorm", "nuclear_norm", "linalg_matrix_norm")
LOSSES = (
    "poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
)  # fmt: skip


class Block(nn.Module):
    """A product, a norm, softmax and a product, float32 weights."""

    def __init__(self, dtype: torch.dtype | None = torch.bfloat16, inner: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(256, 512), nn.Linear(512, 256), nn.LayerNorm(512)
        self.dtype, self.inner = dtype, inner

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", self.dtype):
            y = self.up(x)
            z = self.norm(y)
            out = self.down(F.gelu(y) * z)
            soft = F.softmax(y, -1)
            with torch.autocast(device_type="cuda", enabled=self.inner):
                return y, z, soft, self.down(soft), out


def dtypes(model: nn.Module) -> list[torch.dtype]:
    """Of the outputs of its graph."""
    found: list[torch.dtype] = []

    def on_graph(graph: fx.Graph) -> None:
        found.extend(n.meta["val"].dtype for n in graph.output_node().all_input_nodes)

    capture(model, (torch.zeros(1024, 256),), {}, "infer", on_graph)
    return found


@pytest.mark.parametrize(("dtype", "low"), [(torch.bfloat16, torch.bfloat16), (None, torch.float16)])
def test_dtypes_are_those_of_cuda(dtype: torch.dtype | None, low: torch.dtype) -> None:
    """Products in the lower precision (CUDA's default is float16), norms and softmax in float32."""
    assert dtypes(Block(dtype)) == [low, torch.float32, torch.float32, low, low]


def test_it_can_be_switched_off_inside() -> None:
    assert dtypes(Block(inner=False))[3] == torch.float32


def test_nothing_stays_behind() -> None:
    dtypes(Block())
    with torch.autocast("cpu", torch.bfloat16):
        assert F.layer_norm(torch.zeros(2, 8, dtype=torch.bfloat16), [8]).dtype == torch.bfloat16  # the CPU's own list


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_an_autocast_model_is_explained(mode: str) -> None:
    report = explain(Block(), (torch.zeros(1024, 256),), {}, mode, Settings(target="sm_90a"))  # type: ignore[arg-type]
    assert report["totals"]["regions"] > 0


def test_the_lists_are_torchs() -> None:
    """Every operation that torch's header widens is widened, or of a kind that is left out."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lists = re.findall(r"#define AT_FORALL_FP32(?:_SET_OPT_DTYPE)?\(_\)((?:.*\\\n)+.*)", header.read_text())
    names = {name for text in lists for name in re.findall(r"_\((\w+)", text)}
    assert len(lists) == 2 and {"layer_norm", "softmax", "rsqrt"} <= names
    unknown = {n for n in names - {*WIDE, *WIDE_RESULT, *LOSSES} if not n.startswith(LEFT_OUT)}
    assert not unknown
