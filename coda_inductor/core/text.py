"""A Region as a short program that people read."""

from __future__ import annotations

from coda_inductor.core.region import Product, Region

INFIX = {"add": "+", "sub": "-", "mul": "*"}


def left(region: Region, name: str) -> str:
    """The left operand of a Region's products, of a tensor called `name`."""
    return name if region.products[0].a_layout == "mk" else f"{name}.T"


def right(region: Region, lane: int, name: str) -> str:
    """The right operand of a Region's product, of a weight called `name`."""
    turned = f"{name}.T" if region.products[lane].b_layout == "nk" else name
    if region.neighbours:
        return f"{turned}[:, {('even', 'odd')[lane]}]"
    return f"{turned}[:, {('first', 'second')[lane]} {region.half} of {2 * region.half}]" if region.half else turned


def contracted(product: Product) -> str:
    """K, of two products that are added up both if they differ."""
    return " + ".join(map(str, dict.fromkeys(k for _, _, k in product.terms)))


def _dtypes(region: Region) -> str:
    left, right = region.dtypes
    return f"{left}{f' @ {right}' if right != left else ''}{', fast' if region.fast else ''}"


def show(region: Region, m: str = "M") -> str:
    """One line per product, operand, statement, store and reduction."""
    lines = []
    for lane, p in enumerate(region.products):
        made = " + ".join(f"{left(region, f'in{a}')} @ {right(region, lane, f'in{b}')}" for a, b in p.pairs)
        lines.append(f"{p.name}[{m}, {region.n}] = {made}  (K={contracted(p)}, {_dtypes(region)})")
    for i, o in enumerate(region.operands, region.matrices):
        shapes = {"token": f"[{m}]", "feature": f"[{region.width}]", "table": f"[{m}, {2 * region.half}]"}
        shapes["sample"] = f"[{m} / {o.tokens}, {region.n}]"
        shape = shapes.get(o.extent, f"[{m}, {region.n}]")
        lines.append(f"load {o.name}{shape} = in{i}  ({o.dtype}, per {o.extent})")
    for let in region.lets:
        args = [a if isinstance(a, str) else f"{a:.6g}" for a in let.args]
        call = f" {INFIX[let.op]} ".join(args) if let.op in INFIX else f"{let.op}({', '.join(args)})"
        lines.append(f"{let.name} = {call}")
    for s in region.stores:
        value = f"({s.value}, {s.second})" if s.second else s.value
        lines.append(f"{'add' if region.adds else 'store'} {value}[{m}, {region.width}]  ({s.dtype})")
    for r in region.reductions:
        length = f"{m} / {r.tokens} * {region.n}" if r.tokens else m if r.over == "N" else region.n
        lines.append(f"{r.of} over {r.over} of {r.value} -> [{length}]")
    return "\n".join(lines)
