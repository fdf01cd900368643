"""A Region as a short program that people read."""

from __future__ import annotations

from coda_inductor.core.region import Region

INFIX = {"add": "+", "sub": "-", "mul": "*"}


def show(region: Region, m: str = "M") -> str:
    """One line per product, operand, statement, store and reduction."""
    lines = []
    for p in region.products:
        b = f"in{p.b}.T" if p.b_layout == "nk" else f"in{p.b}"
        lines.append(f"{p.name}[{m}, {region.n}] = in{p.a} @ {b}  (K={p.k}, {region.dtype})")
    for i, o in enumerate(region.operands, region.matrices):
        shape = {"token": f"[{m}]", "feature": f"[{region.n}]", "tile": f"[{m}, {region.n}]"}[o.extent]
        lines.append(f"load {o.name}{shape} = in{i}  ({o.dtype}, per {o.extent})")
    for let in region.lets:
        args = [a if isinstance(a, str) else f"{a:.6g}" for a in let.args]
        call = f" {INFIX[let.op]} ".join(args) if let.op in INFIX else f"{let.op}({', '.join(args)})"
        lines.append(f"{let.name} = {call}")
    lines += [f"store {s.value}[{m}, {region.n}]  ({s.dtype})" for s in region.stores]
    lines += [f"{r.of} over {r.over} of {r.value} -> [{m if r.over == 'N' else region.n}]" for r in region.reductions]
    return "\n".join(lines)
