"""What memory-bound bytes cost: milliseconds of a card, by the bandwidth that such kernels were measured to reach."""

from __future__ import annotations

from typing import Any

from coda_inductor.codegen import target

Facts = dict[str, Any]

CARDS: dict[str, dict[str, float]] = {
    target.SM_90A.name: {
        # Casts of bfloat16 to FP8, in rows and transposed, 16384 x 8192: 537 MB in 189 us are 2.84 TB/s, the best of
        # eight tiles (H100 80GB HBM3, bench/results/float8.jsonl, "kernel alone").
        "H100": 2.8e12,
        # All six memory-bound kernels of torch.compile in a step of layer-4096 take 1311 us for the 5436 MB that
        # explain counts, 4.15 TB/s; of layer-2048 649 us for 2718 MB, 4.19 (H200, bench/results/profile.jsonl).
        "H200": 4.1e12,
    },
}
"""By target and card, bytes per second. A store or a load of an epilogue costs about as much as one of a kernel of its
own (a tile of 67 MB 16 us on an H200): epilogues do not hide it."""


def estimates(bytes_before: int, bytes_after: int, target_name: str) -> list[Facts]:
    """For each card that was measured: the time that memory-bound bytes take before and after, in milliseconds. Nothing
    is said of products, attention, launches or the whole step."""
    return [
        {
            "card": card,
            "bytes_per_second": rate,
            "ms_before": bytes_before / rate * 1e3,
            "ms_after": bytes_after / rate * 1e3,
        }
        for card, rate in CARDS.get(target_name, {}).items()
    ]
