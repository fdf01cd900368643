"""The backend of torch.compile: Dynamo's graph goes to Inductor with one more pass over the joint graph.

Off means off: with CODA_INDUCTOR=0 the call is the one that backend="inductor" makes. So it is, after one warning, on a
machine for which no kernels are generated, and with a torch that was not tested or lacks one of the private names that
we need: those are imported behind this module, which itself needs none.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch._inductor

from coda_inductor.core.errors import QUIETLY, STRICTLY, CodaError, Unsupported, forget_frames, warn
from coda_inductor.core.settings import Settings
from coda_inductor.core.versions import behind, check_torch, missing

log = logging.getLogger("coda_inductor")

Inductor = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]


def load() -> ModuleType | Unsupported:
    """What compiles a graph our way, or why nothing does. Raises SettingError: torch.compile imports this, and a wrong
    variable is said there, and not when the model first runs."""
    settings = Settings.read()[0]
    try:
        check_torch()
        found = behind("coda_inductor.inductor.compile")
    except Unsupported as why:
        forget_frames(why)
        return why
    settings.check_kinds(found.NAMES)
    return found


LOADED = load()


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
        if isinstance(LOADED, ModuleType):
            LOADED.check_options(theirs)
        inductor = stock(mode, theirs)
        ours = prepared(gm, example_inputs, settings, inductor) if settings.enabled else None
        return ours() if ours else inductor(gm, example_inputs)

    def reset(self) -> None:
        """Called by torch._dynamo.reset()."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        getattr(trees, "reset_cudagraph_trees", bool)()


def stock(mode: str | None, options: dict[str, Any]) -> Inductor:
    """What backend="inductor" compiles a graph with."""
    try:
        return torch._TorchCompileInductorWrapper(mode, options, None)
    except (AttributeError, TypeError):  # it has no such name any more, or other arguments
        patches = {**torch._inductor.list_mode_options(mode or "default"), **options}
        return lambda gm, example_inputs: torch._inductor.compile(gm, list(example_inputs), patches)


def prepared(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, inductor: Inductor
) -> Callable[[], Any] | None:
    """How the graph is compiled our way; None, after one warning, if no graph is. Raises that under
    CODA_INDUCTOR_STRICT."""
    try:
        if isinstance(LOADED, Unsupported):
            raise Unsupported(LOADED.what, hint=LOADED.hint)
        return LOADED.prepared(gm, example_inputs, settings, inductor)  # type: ignore[no-any-return]
    except Unsupported as error:
        why: CodaError = error
    except (ImportError, AttributeError) as error:
        why = missing(error)
    hint = STRICTLY if settings.strict else QUIETLY
    failure = type(why)(why.what, where=why.where, hint=why.hint or hint)
    if settings.strict:
        raise failure from why
    log.info("every graph is left to Inductor: %s", failure, exc_info=why if log.isEnabledFor(logging.DEBUG) else None)
    warn(f"every graph is left to Inductor: {failure}")
    forget_frames(why)
    return None


coda = CodaBackend()
