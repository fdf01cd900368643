"""The pipeline: what happens to a joint graph, stage by stage; after an error the graph is as it was.

Dynamo's graph arrives here after AOTAutograd and Inductor's decompositions, before partitioning and Inductor's own
patterns; the no_grad graph, too. STAGES is the order. After each stage one verifier looks at effects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch import fx

from coda_inductor.attention.copies import read_in_place
from coda_inductor.attention.features import write_positions
from coda_inductor.attention.fused import fuse_attention
from coda_inductor.attention.grouped import group_heads
from coda_inductor.attention.masks import skip_masks
from coda_inductor.codegen.target import TARGETS
from coda_inductor.core.errors import BrokenInvariant
from coda_inductor.core.settings import DIGEST, Settings
from coda_inductor.inductor.kept import dearest, kept, kept_alone, most_kept
from coda_inductor.inductor.records import Refusal, Report, RewriteAgain, Site
from coda_inductor.inductor.settle import settled
from coda_inductor.inductor.sites import absorbed, fired, reason, site
from coda_inductor.inductor.undefined import add_where_read
from coda_inductor.inductor.work import Work
from coda_inductor.loss.rows_read import read_rows
from coda_inductor.loss.written import write_losses
from coda_inductor.parts.heads import compute_all_parts
from coda_inductor.parts.lanes import loop_by_parts
from coda_inductor.parts.prefix import write_prefixes
from coda_inductor.parts.written import join_written
from coda_inductor.passes.blocks import write_blocks
from coda_inductor.passes.casts import may_widen, round_first, widen_last, write_wide
from coda_inductor.passes.complex import as_real, pack_pairs
from coda_inductor.passes.dropped import read_dropped
from coda_inductor.passes.elementwise import write_passes
from coda_inductor.passes.embedding import write_rows
from coda_inductor.passes.factors import move_factors
from coda_inductor.passes.joined import in_vain, split_joined
from coda_inductor.passes.parts import split_products
from coda_inductor.passes.plain import PLAIN, plain_products, write_plain
from coda_inductor.passes.reductions import write_gradients, write_maxima, write_softmax_sums
from coda_inductor.passes.scaled import add_up_fast, in_rows, largest_of_rows, share, store_scales
from coda_inductor.passes.switches import (
    ATTENTION,
    BLOCKS,
    CASTS,
    COMPLEX,
    ELEMENTWISE,
    EMBEDDING,
    FACTORS,
    GROUPED,
    HEADS,
    JOINED,
    LAYOUTS,
    LOSS,
    MASKS,
    PARTS,
    POSITIONS,
    PREFIX,
    REGION_KINDS,
    WINDOWS,
    allowed,
    laws_of,
)
from coda_inductor.passes.tables import put_into_memory
from coda_inductor.patterns import graph as g
from coda_inductor.patterns.sizes import guards_of
from coda_inductor.rewrite.laws import RELU, SOFTMAX
from coda_inductor.rewrite.limits import Limits
from coda_inductor.tuning.verdicts import ACCEPT_ALL, Decisions, without_regions
from coda_inductor.write.emit import emit
from coda_inductor.write.features_last import put_features_last
from coda_inductor.write.kept import keep, lent, lying_in, memory_of, store
from coda_inductor.write.remade import make_again
from coda_inductor.write.verifying import Before, verify, verify_kept
from coda_inductor.write.writing import REPLACES

log = logging.getLogger("coda_inductor")


# ---- the stages, in order


def undefined_gradients(work: Work) -> None:
    """What a large output's gradient is added to takes it in its memory, if there is one."""
    add_where_read(work.graph)


def partial_writes(work: Work) -> None:
    """A tensor that is written part by part is a cat of the parts, and is read as these."""
    if work.may(CASTS):
        work.casts += join_written(work.graph)


def written_attention(work: Work) -> None:
    """Attention that is written out, as products and a softmax, is one operation."""
    if work.may(ATTENTION) and work.target != "reference" and work.settings.numerics != "strict":
        work.grouped += fuse_attention(work.graph, work.may(POSITIONS))


def constant_masks(work: Work) -> None:
    """Attention reads no mask that hides the later tokens or nothing, or shows a window."""
    if work.may(MASKS):
        work.masks = skip_masks(work.graph, work.may(WINDOWS) and work.target != "reference")


def grouped_heads(work: Work) -> None:
    """Attention reads keys and values that several heads share once, and nothing that is copied for it alone."""
    if work.may(GROUPED):
        work.grouped += group_heads(work.graph) + read_in_place(work.graph)


def added_positions(work: Work) -> None:
    """What attention adds to scores by the place of a key is features of queries and keys, not a mask."""
    if work.may(POSITIONS) and work.settings.numerics != "strict":
        work.grouped += write_positions(work.graph)


def parts_of_heads(work: Work) -> None:
    """What is computed of a part of each head is computed of all parts, and chosen."""
    if work.may(HEADS):
        compute_all_parts(work.graph, TARGETS[work.target].halves if work.target in TARGETS else ())


def prefixes(work: Work) -> None:
    """Rows that are put back beside what is made of the others are made as these are."""
    if work.may(PREFIX):
        write_prefixes(work.graph, work.before.effects.memory)


def casts_first(work: Work) -> None:
    """What is copied and then rounded is rounded first, and what is widened and then copied is copied first."""
    if work.may(CASTS):
        work.casts += round_first(work.graph)
        widen_last(work.graph)


def dropped_signs(work: Work) -> None:
    """A gradient that asks for a sign of what is dropped out asks for that of what is left."""
    if RELU.name in laws_of(work.settings):
        read_dropped(work.graph)


def features_last(work: Work) -> None:
    """What convolutions hand on to norms lies as these read it."""
    if work.may(LAYOUTS):
        put_features_last(work.graph)


def complex_products(work: Work) -> None:
    """Products of complex numbers are products of their two parts."""
    if work.may(COMPLEX):
        as_real(work.graph)


def embedding_gradients(work: Work) -> None:
    """The gradient of a large embedding is written in the rows that occur."""
    if work.may(EMBEDDING):
        write_rows(work.graph)


def small_factors(work: Work) -> None:
    """A number that multiplies a product multiplies the smallest of its three tensors."""
    if work.may(FACTORS) and work.settings.numerics != "strict":
        work.casts += move_factors(work.graph)


def column_parts(work: Work) -> None:
    """A product that is read in parts is a product of each part of its weight."""
    if work.may(PARTS) and work.settings.numerics != "strict":
        work.packed = split_products(work.graph, work.whole)


def joined_operands(work: Work) -> None:
    """A product of two tensors beside each other is the sum of a product of each."""
    if work.may(JOINED) and work.settings.numerics != "strict":
        work.joined = split_joined(work.graph, work.whole, work.before.effects.memory)


def loss_gradients(work: Work) -> None:
    """The gradient of a cross-entropy's scores leaves the epilogue that makes the scores, but for numbers of rows."""
    if work.may(LOSS) and SOFTMAX.name in laws_of(work.settings) and g.is_joint(work.graph):
        read_rows(work.graph, work.target)
        work.losses, left = write_losses(work.graph, work.target, work.whole, work.before.effects)
        work.casts += work.losses
        work.refused += tuple(Refusal(n.name, why, g.source_line(n)) for n, why in left.items())


def eight_bit_products(work: Work) -> None:
    """Of 8-bit products: what is computed twice is computed once, also what both sides of the graph compute of few
    values; right matrices are transposed views of [N, K]; scales are in memory; if allowed, they add up fast."""
    if any(node.target in g.SCALED for node in work.graph.nodes):
        if work.settings.numerics == "fast":
            work.casts += add_up_fast(work.graph)
        share(work.graph)
        in_rows(work.graph)
        largest_of_rows(work.graph)
        store_scales(work.graph)


def eight_bit_casts(work: Work) -> None:
    """Casts of one tensor to 8 bits, in rows and transposed, are one pass over memory."""
    if work.may(ELEMENTWISE):
        work.elementwise, left = write_passes(work.graph, work.target, work.before)
        work.refused = tuple(Refusal(n.name, why, g.source_line(n)) for n, why in left.items())


def regions(work: Work) -> None:
    """Derives Regions from the graph's terms by the laws, has them accepted, and writes them: one operation for each
    Region, where the last of its products stood. Leaves the sites and the refusals, with the user's lines."""
    graph = work.graph
    unread = work.unread | lying_in(graph, memory_of(graph, work.lent))
    found = settled(graph, work.settings, work.decisions, Limits(unread=unread))
    taken = {found.plan.program.product(acc).node for b in found.plan.builts for acc in b.products}
    whole = frozenset(p.name for p in work.packed if not taken.issuperset(p.made))
    whole |= frozenset(x.node for x in work.losses) - frozenset(n.name for n in taken)
    if whole := whole | in_vain(found.plan, work.joined):
        raise RewriteAgain(whole)
    made, lifted = found.plan, found.plan.program.lifted
    lines = {n.name: g.source_line(n) for n in graph.nodes}
    replaced = {n.name: n.meta.get(REPLACES, ()) for n in graph.nodes}
    terms = {n.name: lifted.deps[n] for n in graph.nodes if n.op == "call_function" and not g.is_view(n)}
    nodes = {bit: product.node for bit, product in lifted.products.items()}
    made.firings += [normaliser.firing(made.program) for normaliser in found.normalisers]
    laws = fired(made)
    work.refused += tuple(Refusal(x.node.name, reason(made, x), lines[x.node.name]) for x in made.refused)
    reasons = {n.name: why for n, why in lifted.reading.opaque.items() if n.op == "call_function"}
    work.opaque = tuple(Refusal(name, why, lines[name]) for name, why in reasons.items())
    sites = [site(i, b, nodes, laws, lines) for i, b in enumerate(made.builts)]
    work.alone = {name: pays for name, pays in kept_alone(made).items() if name not in work.unread}
    emit(made, work.target, work.before)
    left = {n.name for n in graph.nodes}
    here = {name for n in graph.nodes for name in n.meta.get(REPLACES, ())}
    vanished = ((name, stood) for name, stood in replaced.items() if name in terms and name not in left)
    gone = {name: [old for old in stood if old not in here] for name, stood in vanished}
    work.sites = absorbed(sites, made.builts, gone, terms)


def row_blocks(work: Work) -> None:
    """Scores of a head and its loss, or their gradient, are made of some rows at a time."""
    if work.may(BLOCKS) and work.settings.numerics != "strict" and g.is_joint(work.graph):
        work.blocks, left = write_blocks(work.graph, work.settings.chunk, work.before)
        work.refused += tuple(Refusal(n.name, why, g.source_line(n)) for n, why in left.items())


def reductions(work: Work) -> None:
    """What no Region takes over rows and columns is one pass over memory, for both or for a softmax; so are gradients
    of scores."""
    for write in (write_maxima, write_gradients, write_softmax_sums) if work.may(ELEMENTWISE) else ():
        work.elementwise += write(work.graph, work.target, work.before.effects)


def parts_of_loops(work: Work) -> None:
    """Loops over heads that are read in parts take their sums, and write gradients, in these parts."""
    if work.may(HEADS):
        work.casts += loop_by_parts(work.graph, exact=work.settings.numerics == "strict")


def packed_pairs(work: Work) -> None:
    """Pairs of neighbours that no Region takes are read and written as one number of 32 bits."""
    if work.may(COMPLEX):
        work.casts += pack_pairs(work.graph, work.target)


def tables(work: Work) -> None:
    """Sines and scales that many elements read, and tensors that several products or passes read, are stored once."""
    work.tables = put_into_memory(work.graph, work.settings)


def wide_products(work: Work) -> None:
    """What is left of the products leaves in float32 where that is read."""
    if work.device is not None and work.may(CASTS) and may_widen(work.settings, work.target):
        work.casts += write_wide(work.graph, work.device)


def plain(work: Work) -> None:
    """Products with nothing beside them that cuBLAS is slower at become Regions of their own."""
    if work.device is None:
        return
    on = allowed(PLAIN, REGION_KINDS, work.settings)
    found, losers = plain_products(work.graph, work.decisions.legal, work.device) if on else ({}, {})
    losers |= work.decisions.slower_plain(found)
    work.refused += tuple(Refusal(n.name, why, g.source_line(n)) for n, why in losers.items())
    kept = {n: made for n, made in found.items() if n not in losers}
    places = [(str(n.meta["val"].shape[0]), n.name, g.source_line(n)) for n in kept]
    outputs, count = write_plain(work.graph, work.target, kept), len(work.sites)
    work.sites += [
        Site(f"r{i}", region, m, (), (name,), (out.name,), line)
        for i, ((region, _), (m, name, line), out) in enumerate(zip(kept.values(), places, outputs, strict=True), count)
    ]


def copies(work: Work) -> None:
    """The backward, and what Inductor computes late, read copies of what is, or may be, overwritten before."""
    keep(work.graph, work.lent)
    store(work.graph)


def made_again(work: Work) -> None:
    """The forward keeps what Regions store, rather than what loops make of that."""
    make_again(work.graph)


def little_kept(work: Work) -> None:
    """If the backward keeps too much, and nodes for sums alone, it takes such sums no more: raises RewriteAgain."""
    if work.alone and kept(work.graph) > most_kept(work.original, work.module):
        raise RewriteAgain(unread=dearest(work.alone))


Stage = Callable[[Work], None]
STAGES: tuple[Stage, ...] = (
    undefined_gradients,
    partial_writes,
    written_attention,
    constant_masks,
    grouped_heads,
    added_positions,
    features_last,
    complex_products,
    parts_of_heads,
    prefixes,
    casts_first,
    dropped_signs,
    embedding_gradients,
    small_factors,
    column_parts,
    joined_operands,
    loss_gradients,
    eight_bit_products,
    eight_bit_casts,
    regions,
    row_blocks,
    reductions,
    parts_of_loops,
    packed_pairs,
    tables,
    wide_products,
    plain,
    copies,
    made_again,
    little_kept,
)
"""The order, which is meant: a plain product is what no Region took, copies are made of the finished graph, and what is
kept is what that keeps."""
WITHOUT_PRODUCTS: tuple[Stage, ...] = (reductions, copies)
"""Those of a graph that has no matrix product, as a loss that is compiled by itself."""


def rewrite(
    graph: fx.Graph,
    settings: Settings,
    target: str = "reference",
    decisions: Decisions = ACCEPT_ALL,
    stages: tuple[Stage, ...] = STAGES,
) -> Report:
    """Rewrites the graph of the owning module, which may have another then, as far as it is accepted. Raises
    BrokenInvariant for a bug; the module then has its graph back as it was."""
    start, module = time.perf_counter(), graph.owning_module
    assert module is not None
    backup, guards, operations = g.copied(graph), guards_of(graph), _operations(graph)
    device = next((n.meta["val"].device for n in graph.nodes if n.target in g.MATRIX_PRODUCTS), None)
    decisions = without_regions(decisions, settings.disable, met := set[str]())
    results = frozenset[int]() if device is None else lent(graph)
    work = Work(module, settings, target, decisions, Before.of(graph), backup, device, lent=results)
    try:
        while (again := _run(stages, work)) is not None:
            module.graph = g.copied(backup)
            before, whole, unread = Before.of(module.graph), work.whole | again.whole, work.unread | again.unread
            work = Work(module, settings, target, decisions, before, backup, device, whole, unread, results)
        verify_kept(work.graph)
        if guards_of(work.graph) != guards:
            raise BrokenInvariant("the rewrite added a guard")
    except BaseException:
        module.graph = backup
        raise
    for digest in sorted(name for name in settings.disable - met if DIGEST.fullmatch(name)):
        log.info("disable: there is no Region %s in this graph; it may be in another", digest)
    rewrote, seconds = operations != _operations(work.graph), time.perf_counter() - start
    passes = work.tables, work.casts, work.elementwise, work.blocks, work.masks, work.grouped
    return Report(tuple(work.sites), work.refused, work.opaque, *passes, rewrote, seconds)


def _run(stages: tuple[Stage, ...], work: Work) -> RewriteAgain | None:
    """The stages, each verified; what asks for another run, None if nothing does."""
    try:
        for stage in stages:
            stage(work)
            verify(work.graph, work.before, stage.__name__)
    except RewriteAgain as again:
        return again
    return None


def _operations(graph: fx.Graph) -> list[tuple[str, object, str]]:
    return [(n.name, n.target, str(n.kwargs)) for n in graph.nodes]
