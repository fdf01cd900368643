"""A model on the meta device is explained as one in memory: torch's own kernels there have no gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coda_inductor.explain.capture import capture

Head = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.up, self.out, self.head = nn.Linear(64, 128), nn.Linear(128, 96), head

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.out(self.up(x)), y)


HEADS: dict[str, Head] = {
    "cross_entropy": F.cross_entropy,
    "label_smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "relu6": lambda z, y: F.relu6(z),
    "selu": lambda z, y: F.selu(z),
    "std": lambda z, y: z / z.std(-1, keepdim=True),
    "where": lambda z, y: torch.where(y[:, None] > 0, z, 0.5),
    "prelu": lambda z, y: F.prelu(z, torch.ones(1, dtype=z.dtype, device=z.device)),
}


@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_the_same(name: str) -> None:
    def operations(device: str) -> list[str]:
        found = list[str]()

        def seen(graph: fx.Graph) -> None:
            found.extend(str(n.target) for n in graph.nodes if n.op == "call_function")

        with torch.device(device):
            inputs = torch.zeros(32, 64), torch.zeros(32, dtype=torch.long)
            capture(Model(HEADS[name]), inputs, {}, "train", seen)
        return found

    in_memory = operations("cpu")
    assert in_memory.count("aten.mm.default") + in_memory.count("aten.addmm.default") == 5
    assert operations("meta") == in_memory
