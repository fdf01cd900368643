"""The backend of torch.compile: Dynamo's graph goes to Inductor with one more pass over the joint graph.

Off means off: with CODA_INDUCTOR=0 the call is the one that backend="inductor" makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.compile_fx import compile_fx

from coda_inductor.core.settings import Settings
from coda_inductor.inductor.joint_pass import JointPass


class CodaBackend:
    """`torch.compile(model, backend="coda", mode=..., options=...)`.

    Options are those of coda_inductor.core.settings by name; `inductor.X` is passed on to Inductor. Raises SettingError for
    an unknown one.
    """

    __name__ = "coda"

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        settings, inductor_options = Settings.read(options=options)
        config = torch._TorchCompileInductorWrapper(mode, inductor_options, None).config
        if settings.enabled:
            chained = config.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
            config = {**config, "joint_custom_pre_pass": JointPass(settings, chained)}
        return compile_fx(gm, example_inputs, config_patches=config)

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        cudagraph_trees.reset_cudagraph_trees()


coda = CodaBackend()
