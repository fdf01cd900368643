"""Tables of docs/log.md, as page_log.py has them: diffusion models, attention, and FP8 by accumulation."""

from __future__ import annotations

import page_names as names
from page_dated import Dated, Line, cells


def sampled(label: str, *paths: str, **facts: str) -> Line:
    """Of a sampling of images: torch.compile's and our ms."""
    found = (cells("examples.jsonl", "5eb59d2", path, "ms", case=names.DIT_EXAMPLE, **facts) for path in paths)
    return (label, *(cell for line in found for cell in line))


EVEN_TILES = ("128x256co2x1", "128x192pp2x1", "128x192pp2x1n", "192x192co2x1n", "128x224co2x1n")

TIMED: dict[str, Dated] = {
    "Flux": Dated(
        ("a block", "`torch.compile` by turns, ms", "coda, ms", "coda without joined operands, ms"),
        tuple(
            (label, *(cell for side in ("inductor", "coda", "apart")
                      for cell in cells("layers.jsonl", commit, f"rows/{side}/turns_ms", "ms", case=names.FLUX_BLOCK)))
            for label, commit in (("first run", "789b330"), ("second run", "f1a9249"))
        ),
    ),
    "even tiles": Dated(
        ("rows x columns x depth", "`torch.mm` alone, us", *EVEN_TILES),
        tuple(
            (case, *(cell for tile in ("mm", *EVEN_TILES)
                     for cell in cells("tiles.jsonl", "4642e6e", "mean_ms", "whole us of ms", case=case, tile=tile)))
            for case in names.EVEN
        ),
    ),
    "a sampling": Dated(
        ("28 blocks of a DiT, 16 images, ten steps", "`torch.compile`, ms", "coda, ms"),
        (sampled("beside three GPUs that compiled", "baseline_ms", "ms", beside=names.WHEEL),
         sampled("alone on the host", "baseline_ms", "ms", beside=names.QUIET),
         sampled("the sum of the kernels' times", "gpu_ms/inductor", "gpu_ms/coda")),
    ),
    "attention": Dated(
        ("32 heads, 4 x 2048 tokens, forward and backward", "64 numbers a head, ms", "128 numbers a head, ms"),
        tuple(
            (what, *(cell for head in (64, 128)
                     for cell in cells("attention.jsonl", "026ea43", "ms", "ms", case=what, head=head)))
            for what in ("by the mask", "causal", names.ATTENTION_ONCE, "flash attention, causal")
        ),
    ),
    "positions": Dated(
        ("images or windows, heads and numbers in each; keys", *names.BY_MODE),
        tuple(
            (f"{batch}, {heads} x {head}; {side} x {side}", *(
                cell for mode in ("infer", "train") for path in ("ms/inductor", "ms/features")
                for cell in cells("attention.jsonl", commit, path, "ms", case=names.POSITIONS, mode=mode, batch=batch,
                                  heads=heads, side=side, head=head)))
            for commit, batch, heads, side, head in (
                ("on the way to a2f46a9", 1, 16, 64, 80),
                ("on the way to a2f46a9", 4, 16, 64, 80),
                ("on the way to a2f46a9", 2, 16, 48, 80),
                ("on the way to a2f46a9", 8, 16, 32, 80),
                ("on the way to a2f46a9", 8, 12, 32, 64),
                ("on the way to a2f46a9", 8, 16, 24, 80),
                ("074e8ae", 100, 16, 16, 80),
                ("on the way to a2f46a9", 25, 16, 16, 80),
            )
        ),
    ),
    "written out": Dated(
        ("keys; 131072 tokens, 16 heads of 64", "mask", *names.BY_MODE),
        tuple(
            (str(keys), mask, *(
                cell for mode in ("infer", "train") for side in ("inductor", "coda")
                for cell in cells("attention.jsonl", "on the way to 5651418", f"ms/{side}", "ms",
                                  case=names.WRITTEN, mask=mask, mode=mode, keys=keys)))
            for keys in (49, 64, 96, 128, 192, 256) for mask in ("no mask", "hidden by a buffer")
        ),
    ),
    "layers written out": Dated(
        ("a layer", *names.BY_MODE, "`torch.compile`, GiB", "coda, GiB"),
        tuple(
            (layer, *(
                cell for mode, path, spelling in (("infer", "ms", "ms"), ("train", "ms", "ms"), ("train", "gib", "gib"))
                for side in ("inductor", "coda")
                for cell in cells("attention.jsonl", commit, f"{path}/{side}", spelling,
                                  case=names.WRITTEN_LAYER, layer=layer, mode=mode)))
            for layer, commit in names.WRITTEN_LAYERS
        ),
    ),
    "eager": Dated(
        ("transformers' eager attention", "`torch.compile`, ms", "coda, ms", "`torch.compile`, GiB", "coda, GiB"),
        tuple(
            (f"{model}, {label}", *(
                cell for path, spelling in (("ms", "ms"), ("gib", "gib")) for side in ("inductor", "coda")
                for cell in cells("attention.jsonl", "03dee05", f"{path}/{side}", spelling,
                                  case=names.EAGER, model=model, mode=mode)))
            for model, mode, label in names.EAGER_MODELS
        ),
    ),
    "SAM": Dated(
        (f"{names.SAM_BLOCKS}, four images", "`torch.compile`, ms", "coda, ms", "`torch.compile`, GiB", "coda, GiB"),
        tuple(
            (label, *(cell for how, spelling in (("ms", "ms"), ("gib", "gib")) for side in ("inductor", "coda")
                      for cell in cells("attention.jsonl", "cbab9ed", f"{how}/{side}", spelling,
                                        case=names.SAM_BLOCKS, mode=mode)))
            for label, mode in (("inference", "infer"), ("forward and backward", "train"))
        ),
    ),
    "windows": Dated(
        ("tokens, heads and numbers in each; seen on each side", "of all pairs", "by mask, ms", "window, ms"),
        tuple(
            ("{batch} x {tokens}, {heads} x {head}; {left} and {right}".format(**facts),
             *cells("attention.jsonl", "c55ff79", "share", "share", case=names.MASKED, **facts),
             *cells("attention.jsonl", "c55ff79", "ms", "ms", case=names.MASKED, **facts),
             *cells("attention.jsonl", "c55ff79", "ms", "ms", case=names.WINDOW, **facts))
            for facts in names.WINDOWS
        ),
    ),
    "norms of heads": Dated(
        ("two layers, inference", "`torch.compile` alone, ms", "coda, ms", "gain"),
        tuple(
            (label, *(cell for path, how in
                      (("sustained/baseline_ms", "ms"), ("sustained/ms", "ms"), ("sustained/speedup", "gain"))
                      for cell in cells("bench.jsonl", commit, path, how, case=case, mode="infer")))
            for label, case, commit in (
                ("Qwen3-8B, before", "qwen3_8b, 2 layers", "8b597b3"),
                ("Qwen3-8B", "qwen3_8b, 2 layers", "60cb3a1"),
                ("GLM-4-9B", "glm4_9b, 2 layers", "8b597b3"),
                ("GLM-4-9B, its `cat` by token", "glm4_9b, 2 layers", "60cb3a1"),
            )
        ),
    ),
    "parts of heads": Dated(
        ("two layers and head, inference, H200", "alone, ms", "interleaved, ms"),
        tuple(
            (label, *cells("bench.jsonl", "6f297ea", "sustained/ms", "ms", case=case, mode="infer"),
             *cells("bench.jsonl", "6f297ea", "ms", "ms", case=case, mode="infer"))
            for name, model in (("Nemotron-8B", "nemotron_8b"), ("GLM-4-9B", "glm4_9b"))
            for label, case in (
                (f"{name}, `disable=\"heads\"`", f"{model}, 2 layers and head, disable=heads"),
                (name, f"{model}, 2 layers and head"),
            )
        ),
    ),
    "blocks of 2816 rows": Dated(
        ("head and loss, forward and backward, H200", "`torch.compile`, ms", "blocks of 4096, ms", "of 2816, ms",
         "`torch.compile`, GiB", "blocks of 4096, GiB", "of 2816, GiB"),
        tuple(
            (f"vocabulary {case}", *(cell for key, how in (("ms", "ms"), ("gib", "gib"))
                                     for way in ("inductor", "coda-4096", "coda-2816")
                                     for cell in cells("heads.jsonl", "59dbf85", f"{key}/{way}", how, case=case)))
            for case in ("32000", "128256")
        ),
    ),
    "SwiGLU in FP8": Dated(
        ("tile", "all four, us", "of rows, us", "of columns, us", "none, us", "the product alone, us"),
        tuple(
            (tile, *(cell for what in ("all", "rows", "columns", "none", "product")
                     for cell in cells("float8.jsonl", "59dbf85", f"turns_us/{tile}/{what}", "whole",
                                       case=names.SWIGLU_FP8)))
            for tile in ("128x96pp2x1", "64x128pp2x1", "128x128co2x1")
        ),
    ),
    "SwiGLU in FP8 and power": Dated(
        ("calls in a row", *(f"{what}, {numbers}, us" for what in ("gradient", "product")
                             for numbers in ("random numbers", "zeros"))),
        tuple(
            (calls, *(cell for key in ("repeated_us", "repeated_product_us") for numbers in ("random", "zeros")
                      for cell in cells("float8.jsonl", "59dbf85", f"{key}/{numbers}/{calls}", "whole",
                                        case=names.SWIGLU_FP8)))
            for calls in ("3", "30", "1500")
        ),
    ),
    "added in place": Dated(
        ("head and loss, forward and backward, H200", "`torch.compile`, ms", "again, ms", "blocks of 2048, ms",
         "added in place, ms", "blocks of 4096, ms", "added in place, ms"),
        tuple(
            (f"vocabulary {case}", *(cell for way in ("inductor", "null", "coda-2048", "in-place-2048", "coda-4096",
             "in-place-4096") for cell in cells("heads.jsonl", "22f89b9", f"ms/{way}", "ms", case=case)))
            for case in ("32000", "128256")
        ),
    ),
    "gradients added": Dated(
        ("gradient of a weight, added in float32, H200", "cuBLAS, ms", "128x192pp2x1t, ms", "128x160pp2x1t, ms",
         "128x192pp2x1, ms", "256x192co2x1, ms"),
        tuple(
            (f"[{v}, {d}] of {rows} rows",
             *(cell for tile in ("addmm", "128x192pp2x1t", "128x160pp2x1t", "128x192pp2x1", "256x192co2x1")
               for cell in cells("tiles.jsonl", "8e7b99f", f"sustained_ms/{tile}", "ms",
                                 case=f"gradient of a weight [{v}, {d}] of {rows} rows, added in float32")))
            for v, rows, d in ((32000, 2048, 2048), (32000, 4096, 2048), (65536, 4096, 1280), (128256, 4096, 2048))
        ),
    ),
    "blocks added in place": Dated(
        ("head and loss, forward and backward, H200", "`torch.compile`, ms", "again, ms", "blocks of 4096, ms",
         "blocks of 2048, ms", "whole, ms", "`torch.compile`, GiB", "blocks of 4096, GiB", "blocks of 2048, GiB"),
        tuple(
            (f"vocabulary {case.replace(':cap', ', capped')}",
             *(cell for way in ("inductor", "null", "coda-4096", "coda-2048", "whole")
               for cell in cells("heads.jsonl", "8e7b99f", f"ms/{way}", "ms", case=case)),
             *(cell for way in ("inductor", "coda-4096", "coda-2048")
               for cell in cells("heads.jsonl", "8e7b99f", f"gib/{way}", "gib", case=case)))
            for case in ("32000", "128256", "32000:cap", "128256:cap")
        ),
    ),
    "beside attention": Dated(
        ("two layers, forward and backward, H200", "with the sums, ms", "without, ms", "again, by turns", "with, kept",
         "without, kept"),
        tuple(
            (said, *(cell for key, how in (("sustained/ms", "ms"), ("null", "gain"), ("kept", "whole"))
                     for way in (("with", "without") if key != "null" else ("without",))
                     for cell in cells("sweeps.jsonl", "753e277", key, how,
                                       case=f"{name}, 2 layers, {way} sums beside attention")))
            for name, said in (("llama_1b", "Llama, width 2048"), ("llama3_8b", "Llama-3-8B"), ("opt_6b7", "OPT-6.7B"),
                               ("dinov2_giant", "DINOv2-giant"))
        ),
    ),
    "partial writes": Dated(
        ("four blocks as Wan's, H200", "`torch.compile`, ms", "coda, part by part, ms", "coda, as a whole, ms",
         "gain, part by part", "gain, as a whole"),
        tuple(
            (said, *(cell for way, key, how in (("as a whole", "baseline_ms", "ms"), ("part by part", "ms", "ms"),
                                                ("as a whole", "ms", "ms"), ("part by part", "speedup", "gain"),
                                                ("as a whole", "speedup", "gain"))
                     for cell in cells("sweeps.jsonl", "e88780c", key, how,
                                       case=f"four blocks as Wan's, made {way}", mode=mode)))
            for mode, said in (("infer", "inference"), ("train", "training"))
        ),
    ),
    "halves by slices": Dated(
        ("four blocks, forward and backward, H200", "`torch.compile`, ms", "coda, ms", "gain"),
        tuple(
            (said, *(cell for key, how in (("baseline_ms", "ms"), ("ms", "ms"), ("speedup", "gain"))
                     for cell in cells("sweeps.jsonl", "2a8e54c", key, how,
                                       case=f"norms of heads behind a rotary embedding, {case}")))
            for said, case in (("as they were", "whole"), ("by parts", "by parts"))
        ),
    ),
    "sums over heads": Dated(
        ("a step, nanochat-like, H200", "beside it, ms", "coda, ms", "gain"),
        tuple(
            (said, *(cell for key, how in (("baseline_ms", "ms"), ("ms", "ms"), ("speedup", "gain"))
                     for cell in cells("sweeps.jsonl", commit, key, how, case=f"nanochat-like, a step, {case}")))
            for said, case, commit in (
                ("`torch.compile`, and coda before", "before", "7b4e5ef"),
                ("`torch.compile`, and coda with both changes", "sums over heads by parts", "e6e24b8"),
                ("coda before, and with sums by parts alone", "sums over heads by parts alone", "7b4e5ef"))
        ),
    ),
    "losses": Dated(
        ("head and loss, forward and backward, H200", "`torch.compile`, ms", "again, ms", "scores stored, ms",
         "gradient stored, ms", "blocks of 2048, ms", "whole, ms"),
        tuple(
            (f"vocabulary {case.replace(':cap', ', capped')}",
             *(cell for way in ("inductor", "null", "scores-4096", "coda-4096", "coda-2048", "whole")
               for cell in cells("heads.jsonl", "2e8599e", f"ms/{way}", "ms", case=case)))
            for case in ("32000", "128256", "32000:cap", "128256:cap")
        ),
    ),
    "memory of losses": Dated(
        ("head and loss, H200", "`torch.compile`, GiB", "gradient stored, GiB", "blocks of 2048, GiB", "whole, GiB"),
        tuple(
            (f"vocabulary {case.replace(':cap', ', capped')}",
             *(cell for way in ("inductor", "coda-4096", "coda-2048", "whole")
               for cell in cells("heads.jsonl", "2e8599e", f"gib/{way}", "gib", case=case)))
            for case in ("32000", "128256", "32000:cap", "128256:cap")
        ),
    ),
    "scores written over": Dated(
        ("head and loss, forward and backward, H200", "`torch.compile`, ms", "coda, Inductor's loops, ms",
         "coda, passes, ms", "`torch.compile`, GiB", "coda, GiB"),
        tuple(
            (f"vocabulary {case.replace(':cap', ', capped')}",
             *(cell for way in ("inductor", "loops-4096", "coda-4096")
               for cell in cells("heads.jsonl", "11c1814", f"ms/{way}", "ms", case=case)),
             *(cell for way in ("inductor", "coda-4096")
               for cell in cells("heads.jsonl", "11c1814", f"gib/{way}", "gib", case=case)))
            for case in ("32000", "128256", "128256:cap")
        ),
    ),
    "kinds of kernels": Dated(
        ("a step on an H200", "all, ms", "products", "attention", "loops", "optimizer", "rest"),
        tuple(
            (f"{label}, {side}",
             *(cell for kind in ("step", "products", "attention", "loops", "optimizer", "rest")
               for cell in cells("profile.jsonl", "45230e9", f"{kind}_us", "ms of us", case=case, backend=backend)))
            for label, case in (("FP8 rowwise, width 2048", names.FLOAT8_PROFILED),
                                ("TorchTitan's Llama-1B", names.TITAN), ("nanochat-like", names.NANO))
            for side, backend in (("`torch.compile`", "inductor"), ("coda", "coda"))
        ),
    ),
    "pairs": Dated(
        ("pairs of neighbours [4, 4096, 16, 128], turned by a complex table", "rounded behind the `cat`, us",
         "before, us", "read and written once, us"),
        tuple(
            (lies, *(cell for what in names.ROUNDED
                     for cell in cells("rotary.jsonl", "on the way", "us", "us", case=names.TURNED + lies, what=what)))
            for lies in ("as it lies", "transposed")
        ),
    ),
    "a loss by itself": Dated(
        ("cross entropy of scores in bf16, H200", "forward, `torch.compile`, us", "again, us", "coda, us",
         "with backward, `torch.compile`, us", "again, us", "coda, us"),
        tuple(
            (case, *(cell for mode in ("inference", "training") for key in ("baseline_us", "again_us", "us")
                     for cell in cells("loss.jsonl", "8e93c78", key, "whole", case=names.LOSS + case, mode=mode)))
            for case in names.LOSSES
        ),
    ),
    "handed on": Dated(
        ("TorchTitan's Llama-1B, a step on an H200", "alone, ms"),
        tuple(
            (label, *cells("profile.jsonl", "c712b41", "alone_us", "ms of us", case=names.TITAN, what=what))
            for label, what in (("`torch.compile`", "torch.compile"), ("coda", "coda"),
                                ("coda, the norm's sum taken again", names.TAKEN_AGAIN))
        ),
    ),
    "in a step": Dated(
        ("TorchTitan's Llama-1B, kernels of a step on an H200", "before, us", "after, us"),
        tuple(
            (label, *(cell for what in pair for cell in cells("profile.jsonl", commit, key, "whole",
                                                              case=names.TITAN, what=what)))
            for label, commit, key, pair in (
                ("rotary parts, rounded first", "efaf75d", "rotary_us", names.ROUNDED_IN_A_STEP),
                ("norms' backward, the sum handed on", "8e93c78", "norms_us", names.HANDED_ON),
                ("the loss, along rows", "8e93c78", "loss_forward_us", (names.HANDED_ON[0], names.ALL_OF_IT)),
                ("its gradient, without its sum", "8e93c78", "loss_backward_us",
                 (names.HANDED_ON[0], names.ALL_OF_IT)),
            )
        ),
    ),
    "pairs and gradients": Dated(
        ("TorchTitan's Llama-1B, a step on an H200", "alone, ms"),
        tuple(
            (label, *cells("profile.jsonl", "011b9ef", "alone_us", "ms of us", case=names.TITAN, what=what))
            for label, what in (("`torch.compile`", "torch.compile"), ("coda, neither", names.PACKED[0]),
                                ("coda, pairs as integers", "coda, pairs alone"), ("coda, both", names.PACKED[1]))
        ),
    ),
    "kernels of pairs and gradients": Dated(
        ("TorchTitan's Llama-1B, kernels of a step on an H200", "before, us", "after, us"),
        tuple(
            (label, *(cell for what in names.PACKED for cell in cells("profile.jsonl", "011b9ef", key, "whole",
                                                                      case=names.TITAN, what=what)))
            for label, key in (("rotary embeddings", "rotary_us"), ("gradient of the scores", "loss_backward_us"))
        ),
    ),
    "whole rows": Dated(
        ("gradients of an RMSNorm, its weight and a residual, in bf16, H200", "`torch.compile`, us", "by hand, us"),
        tuple(
            (size, *(cell for what in ("torch.compile", "a Triton kernel by hand")
                     for cell in cells("profile.jsonl", "on the way to 011b9ef", "us", "us",
                                       case=f"{names.NORMS}, {size}, bf16", what=what)))
            for size in ("8192 x 2048", "16384 x 2048", "16384 x 4096")
        ),
    ),
    "fast accumulation": Dated(
        ("rowwise, two layers of width 2048", "ms", "difference of gradients"),
        tuple(
            (label, *(cell for key, how in (("ms", "ms"), ("difference", "error"))
                      for cell in cells("float8.jsonl", "5eb59d2", f"rows/{side}/{key}", how, case=names.FAST)))
            for label, side in (("`torch.compile`", "inductor"), ("`torch.compile`, fast", "inductor fast"),
                                ("coda, fast", "coda fast"))
        ),
    ),
    "rows held": Dated(
        ("rows of bf16, H200", *(f"{f}, {side}, us" for f in names.HELD.values() for side in ("looped", "held"))),
        tuple(
            (size, *(cell for f in names.HELD for side in ("looped_us", "held_us")
                     for cell in cells("held.jsonl", "4f38885", side, "us", case=f"{f}, {size}")))
            for size in names.HELD_SIZES
        ),
    ),
    "blocks of casts": Dated(
        ("casts to FP8, H200", "128 x 128, 8 warps, us", "64 x 128, 4 warps, us", "64 x 64, 4 warps, us"),
        tuple(
            (case, *(cell for block in ("128x128, 8", "64x128, 4", "64x64, 4")
                     for cell in cells("float8.jsonl", "4f38885", f"us/{case}/{block}", "us", case=names.CAST_BLOCKS)))
            for case in (f"{kind}, 16384 x {n}" for kind in ("transposed", "both") for n in (2048, 8192))
        ),
    ),
    "FP8 rows held": Dated(
        ("FP8 rowwise, 2 layers of width 2048, H200", "before", "after"),
        tuple(
            (label, *(cell for side in ("before", "after")
                      for cell in cells("float8.jsonl", names.HELD_AT, f"{key}/{side}", how, case=names.HELD_STEP)))
            for label, key, how in (("alone, ms", "alone_ms", "ms"), ("Inductor's loops, us", "loops_us", "whole"),
                                    ("passes over memory, us", "passes_us", "whole"),
                                    ("a key's gradient, us", "key_gradient_us", "whole"))
        ),
    ),
}  # fmt: skip
