"""What `explain` and `graph` both say of a kernel over memory and of a Region: the facts that they share."""

from __future__ import annotations

from typing import Any

from torch import fx

from coda_inductor.inductor.records import Site
from coda_inductor.patterns.graph import MATRIX_PRODUCTS, name_of, source_line
from coda_inductor.schedule.kinds import kind_of
from coda_inductor.schedule.model import Kernel

Facts = dict[str, Any]
PRODUCTS = {op._schema.name.split("::")[1] for op in MATRIX_PRODUCTS}  # type: ignore[attr-defined]


def operation(node: fx.Node) -> str:
    """The name of a node's operation, as people write it."""
    return name_of(node) or str(node.target)


def kernel_facts(kernel: Kernel) -> Facts:
    """A kernel over memory: its operations in order, its bytes, and the user's line of the last that has one."""
    work = [n for n in kernel.nodes if kind_of(n) != "view"]
    return {
        "nodes": [n.name for n in work],
        "operations": " ".join(dict.fromkeys(map(operation, work))),
        "bytes": kernel.bytes,
        "source": next(filter(None, map(source_line, reversed(work))), ""),
    }


def site_facts(site: Site) -> Facts:
    """A Region: by what laws, from which line of the user's, and under which digest its kernels are kept."""
    return {"laws": list(site.laws), "source": site.source, "digest": site.region.digest}
