"""One graph of Dynamo's through Inductor, with one more pass over its joint graph. The entry point imports this, and
with it all that needs private names of torch, where it can handle that one of them is missing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import _TorchCompileInductorWrapper, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from coda_inductor.core.settings import Settings, unknown
from coda_inductor.inductor.joint_pass import JointPass, machine
from coda_inductor.inductor.partition import Partition
from coda_inductor.inductor.post_pass import PostPass
from coda_inductor.inductor.tracing import functorch_options
from coda_inductor.inductor.undefined import detach_large
from coda_inductor.passes.switches import NAMES, longest_held
from coda_inductor.schedule.held import rows_held
from coda_inductor.tuning.tuner import warm_up_early

__all__ = ["NAMES", "check_options", "prepared"]


def check_options(names: Collection[str]) -> None:
    """Raises SettingError if one is no option of Inductor's."""
    known = inductor_config.get_config_copy() if names else {}
    for name in names:
        if name.replace("-", "_") not in known:
            unknown("option of Inductor", name, known)


def prepared(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, inductor: _TorchCompileInductorWrapper
) -> Callable[[], Any]:
    """How to compile the graph with our pass; `inductor` is what compiles it without. Raises Unsupported if no kernels
    are for this machine, ImportError or AttributeError if torch lacks a name; then nothing has been done yet."""
    chained = inductor.config.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass)
    ours = JointPass(settings, chained)
    behind = inductor.config.get("joint_custom_post_pass", inductor_config.joint_custom_post_pass)
    split = inductor.config.get("custom_partitioner_fn", inductor_config.custom_partitioner_fn)
    patches = {
        "joint_custom_pre_pass": ours,
        "joint_custom_post_pass": PostPass(ours, behind),
        "custom_partitioner_fn": Partition(ours, split),
    }
    longest = longest_held(machine(settings, example_inputs), settings)
    warm_up_early(settings, example_inputs)
    told = functorch_options(gm, settings)

    def compiled() -> Any:
        detached = None
        try:
            detached = detach_large(gm, settings, inductor.config)
            with functorch_config.patch(**told):
                inner = rows_held(compile_fx_inner, longest)
                found = compile_fx(gm, example_inputs, inner, config_patches={**inductor.config, **patches})
            return detached.tied(found) if detached else found
        except Exception as error:  # after the pass, in what Inductor makes of our operations, or of rows held
            if settings.strict or not (ours.rewrote or detached or longest):
                raise
            if detached:
                detached.restore()
            stock = inductor(gm, example_inputs)  # if this fails as well, it was not us
            ours.failed(error, gm.graph, "a graph")
            return stock

    return compiled
