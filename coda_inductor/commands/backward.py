"""What a backward of a model's outputs is, for every verb that trains one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coda_inductor.commands.walk import leaves

SEED = 0


def differentiable(made: Any) -> dict[str, Tensor]:
    """The outputs that the backward begins at, by name: the scalars, which are losses; without one, all that have a
    gradient. Empty if none has."""
    outs = {name: x for name, x in leaves("output", made) if isinstance(x, Tensor) and x.requires_grad}
    outs = {name: x for name, x in outs.items() if x.is_floating_point()}
    scalars = {name: x for name, x in outs.items() if x.dim() == 0}
    return scalars or outs


def gradient(i: int, out: Tensor) -> Tensor:
    """That of the i-th of them: 1 of a loss, else normal numbers of bfloat16, the same in every dtype."""
    if out.dim() == 0:
        return torch.ones_like(out)
    generator = torch.Generator().manual_seed(SEED + i)
    with torch._C._DisableTorchDispatch():
        drawn = torch.randn(out.shape, generator=generator, dtype=torch.float32).bfloat16()
    return drawn.to(out.device, out.dtype)


def backward(made: Any) -> str:
    """Runs the backward, and says of what: of the sum of the losses, or of all outputs times fixed random weights.
    Empty if no output has a gradient."""
    outs = differentiable(made)
    if not outs:
        return ""
    torch.autograd.backward(list(outs.values()), [gradient(i, x) for i, x in enumerate(outs.values())])
    names = " + ".join(outs)
    return names if next(iter(outs.values())).dim() == 0 else f"the sum of {names}, times fixed random weights"
