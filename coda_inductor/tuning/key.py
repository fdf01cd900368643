"""What the outcome of a measurement depends on, as the name of its record."""

from __future__ import annotations

import hashlib

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from coda_inductor.codegen import legality, target
from coda_inductor.core.settings import Settings
from coda_inductor.kernels import record
from coda_inductor.passes.switches import COMPLEX, ELEMENTWISE, NAMES, ROWS, TABLES, allowed
from coda_inductor.plan.plan import Plan
from coda_inductor.tuning import around
from coda_inductor.tuning.extract import described, laid_out, put_off, small, subgraph
from coda_inductor.tuning.group import Group


def key_of(group: Group, plan: Plan, settings: Settings) -> str:
    """What the outcome depends on: both programs and what is done to them, what they run on, and the versions that
    compile them."""
    parts = [
        *(name for name in (COMPLEX, ELEMENTWISE, ROWS, TABLES) if not allowed(name, NAMES, settings)),
        *sorted({str(legality.size_class(b.region, group.tokens)) for b in group.builts}),
        record.device_name(),
        record.sources_digest(),
        str(target.versions()),
    ]
    with torch.no_grad(), unset_fake_temporarily():
        for b in group.builts:
            parts += [b.region.text, *map(laid_out, b.inputs)]
            parts.append(described(*small(plan, group, b, group.computed(b))[0].nodes))
    programs = subgraph(group, plan), around.before(plan, group)[1], around.after(plan, group)[1]
    parts += [described(*made[0].nodes) for made in programs if made]
    parts += map(laid_out, put_off(group, plan))
    return "contest-" + hashlib.sha256("|".join(parts).encode()).hexdigest()[:24]
