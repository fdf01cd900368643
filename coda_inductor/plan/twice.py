"""Products that would be computed twice: by a Region, and once more for loops that read them as they are.

A loop reads what a chain of pointwise operations starts from. What else it takes of that it makes itself, also a sum
over the row of other products: a norm's gradient sums what several products add up to. These would stay in the graph,
beside their Regions. They become no Regions, and the loop reads them in 16 bits. What epilogues would store for it, the
products as they add them up and as the loop sums them, are tensors of 32 bits. (Counted, three layers of a GPT as
nanochat trains it, with its head, move 14.4 GB so, and 17.0 GB with what epilogues would store.)
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch import fx

from coda_inductor.patterns import graph as g
from coda_inductor.plan.plan import Plan
from coda_inductor.rewrite.limits import Limits

WHY = "what is no part of its epilogue reads it as well"


def twice(plan: Plan, used: AbstractSet[object]) -> Limits:
    """What keeps products from being computed twice, if some are: they become no Regions. `used`: what somebody reads,
    before products are added to others."""
    made = {node for built in plan.builts for node in built.draft.nodes}
    products = {plan.program.product(acc).node: acc.bit for built in plan.builts for acc in built.products}
    return Limits({products[node]: WHY for node in products.keys() - made if _is_read(node, used - made)})


def _is_read(product: fx.Node, used: AbstractSet[object]) -> bool:
    """Does a used operation read the product, perhaps through views? (An accumulator that takes it in does not.)"""
    through = g.reached([product], lambda node: node.users if node is product or g.is_view(node) else ())
    return any(node in used for node in through if node is not product and not g.is_view(node))
