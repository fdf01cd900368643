"""Leaves out what torch.compile does and no test looks at."""

from __future__ import annotations

import logging

import torch
import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.config
import torch._inductor.cpu_vec_isa


def quick() -> None:
    # Inductor writes and compiles scalar loops instead of scalar and vector ones: 109 s for 135 (44 tests of training).
    # Its list asks a C++ compiler about five kinds of vectors, 10 s wherever Inductor's cache is new.
    torch._inductor.config.cpp.simdlen = 1
    torch._inductor.cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]
    # After every compile: 47 s of the suite collected garbage, and 20 s flushed the cache to time a guard.
    torch._dynamo.config.run_gc_after_compile = False
    assert hasattr(torch._dynamo.guards, "profile_guard_manager")
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # pytest gives its handlers to loggers that pass nothing on, too: torch would write every graph out for them.
    trace = logging.getLogger("torch.__trace")
    add = trace.addHandler
    trace.addHandler = lambda hdlr: None if type(hdlr).__module__.startswith("_pytest") else add(hdlr)  # type: ignore[method-assign]
