"""The backend of torch.compile: Dynamo's graph goes to Inductor with one more pass over the joint graph.

Off means off: with CODA_INDUCTOR=0 the call is the one that backend="inductor" makes, and nothing of ours is imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from coda_inductor.core.settings import Settings


class CodaBackend:
    """`torch.compile(model, backend="coda", mode=..., options=...)`.

    Options are those of coda_inductor.core.settings by name; `inductor.X` is passed on to Inductor. Raises SettingError for
    an unknown one.
    """

    __name__ = "coda"

    def __call__(
        self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        from torch._inductor.compile_fx import compile_fx

        settings, inductor_options = Settings.read(os.environ, options)
        config = torch._TorchCompileInductorWrapper(mode, inductor_options, None).config
        if settings.enabled:
            from coda_inductor.inductor.joint_pass import JointPass

            chained = config.get("joint_custom_pre_pass", torch._inductor.config.joint_custom_pre_pass)
            config = {**config, "joint_custom_pre_pass": JointPass(settings, chained)}
        return compile_fx(gm, example_inputs, config_patches=config)

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        from torch._inductor import cudagraph_trees

        cudagraph_trees.reset_cudagraph_trees()


coda = CodaBackend()
