"""The backend of torch.compile: Dynamo's graph goes to Inductor with one more pass over the joint graph.

Off means off: with CODA_INDUCTOR=0 the call is the one that backend="inductor" makes. So it is on a machine for which
no kernels are generated, after one warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_trees
from torch._inductor.compile_fx import compile_fx

from coda_inductor.core.errors import Unsupported
from coda_inductor.core.settings import Settings, unknown
from coda_inductor.inductor.contest import warm_up_early
from coda_inductor.inductor.joint_pass import JointPass, machine
from coda_inductor.inductor.switches import NAMES
from coda_inductor.inductor.tracing import functorch_options

# torch.compile imports this: a wrong variable is said there, and not when the model first runs
Settings.read()[0].check_kinds(NAMES)


class CodaBackend:
    """`torch.compile(model, backend="coda", mode=..., options=...)`.

    Options are those of coda_inductor.core.settings by name; `inductor.X` is passed on to Inductor. Raises SettingError
    for an unknown one.
    """

    __name__ = "coda"

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Any:
        settings, theirs = Settings.read(options=options)
        known = inductor_config.get_config_copy() if theirs else {}
        for name in theirs:
            if name.replace("-", "_") not in known:
                unknown("option of Inductor", name, known)
        inductor = torch._TorchCompileInductorWrapper(mode, theirs, None)
        if not settings.enabled:
            return inductor(gm, example_inputs)
        chained = inductor.config.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
        ours = JointPass(settings, chained)
        try:
            machine(settings, example_inputs)
        except Unsupported as error:
            ours.failed(error, gm.graph, "every graph")
            return inductor(gm, example_inputs)
        warm_up_early(settings, example_inputs)
        told = functorch_options(gm, settings)
        try:
            with functorch_config.patch(**told):
                return compile_fx(gm, example_inputs, config_patches={**inductor.config, "joint_custom_pre_pass": ours})
        except Exception as error:  # after the pass, in what Inductor makes of our operations
            if settings.strict or not ours.rewrote:
                raise
            compiled = inductor(gm, example_inputs)  # if this fails as well, it was not us
            ours.failed(error, gm.graph, "a graph")
            return compiled

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        cudagraph_trees.reset_cudagraph_trees()


coda = CodaBackend()
