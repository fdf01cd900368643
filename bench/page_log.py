"""The tables of docs/log.md, each of the commits of its section."""

from __future__ import annotations

from functools import partial

import page_names as names
from page_dated import Dated, Line, cells
from page_log_timed import TIMED
from page_tables import DEFAULT

training, profiled = partial(cells, "training.jsonl"), partial(cells, "profile.jsonl")

GAIN = "speedup; sustained/speedup"
COMPILES = "compile_s/coda; compile_s/inductor"
BY_COMMIT = ("commit", "by turns", "sustained")


def gains(label: str, case: str, mode: str, commit: str = "") -> Line:
    """A label, which is the commit if none is given, and the gains by turns and sustained."""
    return (label, *training(commit or label, GAIN, "gain", case=case, mode=mode))


def of_commits(case: str, mode: str, *commits: str) -> tuple[Line, ...]:
    return tuple(gains(commit, case, mode) for commit in commits)


def compiled(label: str, commit: str) -> Line:
    """Of Llama's 16 layers in inference: ours and torch.compile's seconds, cold and then warm."""
    found = tuple(
        cells("compile_time.jsonl", commit, "compile_s", "s", backend=backend, cache=cache)
        for cache in ("cold", "warm")
        for backend in ("coda", "inductor")
    )
    return (label, *(cell for line in found for cell in line))


def trained(commit: str, *, searched: bool = True) -> Line:
    """Of a step of training of Llama-1B: torch.compile's cold seconds, ours that search and ours from shipped tunings;
    then those of a second process."""

    def of(backend: str, cache: str) -> Line:
        facts = {"case": names.LLAMA_1B, "machine": "NVIDIA H100 80GB HBM3", "backend": backend, "cache": cache}
        return cells("compile_time.jsonl", commit, "compile_s", "s", **facts)

    hinted = "coda, hinted"
    cold = (*of("inductor", "cold"), *(of("coda", "cold") if searched else ("",)), *of(hinted, "cold"))
    return (commit, *cold, *of("inductor", "warm"), *of("coda" if searched else hinted, "warm"))


def eight_bits(commit: str, what: str, n: int, tile: str) -> Line:
    """The us of a kernel of 8-bit matrices."""
    return cells("float8.jsonl", commit, "us", "whole", case=what, n=n, tile=tile)


def largest(what: str, n: int, tile: str) -> Line:
    """Of one that takes largest values, with each value rounded and masked, and without."""
    before = eight_bits("dd4aad4", f"{what}, each value rounded and masked", n, tile)
    return (f"{what}, {n} wide, {tile}", *before, *eight_bits("e59cd7f", what, n, tile))


WITHOUT_MAXIMA, SLOW = "SwiGLU backwards in FP8 without maxima", "a product in FP8, scales, slow accumulation"
BACKWARDS, FORWARDS = "SwiGLU backwards in FP8 with four maxima", "SwiGLU in FP8 with three stores and two maxima"
UNTUNED = "llama-1b step with AdamW, every Region (tune=off), 4 x 2048 tokens"
RETURNED = {called: case for case, called in names.STEPS.items()}
VIT = {"case": "autocast-vit-l, 24 layers"}
VIT4 = {"case": "autocast-vit-l, 4 layers"}
ROTARY = "q, 16384 tokens, K {0}, N {0}, heads of 128"
ROTATED = "product, token scale, rotary embedding"
CLOCK = "clock of a program"


def rotated(width: int, ours: str, alone: str) -> Line:
    """Of q's product: the fastest tile with its embedding, the fastest without, and the pass, in us."""
    case = ROTARY.format(width)
    kinds = ((ROTATED, ours), ("product, token scale", alone), ("rotary embedding alone, torch.compile", None))
    lines = [cells("rotary.jsonl", "on the way", "us", "us", case=case, what=w, config=c) for w, c in kinds]
    return (str(width), *(cell for line in lines for cell in line))


def product(label: str, case: str, tiles: tuple[str, ...]) -> Line:
    """Of a product: cuBLAS and tiles, by turns; no cell where a tile was not tried."""
    tried = [
        cells("tiles.jsonl", "e8f4aed", "turns_ms", "ms", case=case, tile=tile) if tile else ("",) for tile in tiles
    ]
    return (label, *(cell for line in tried for cell in line))


DATED: dict[str, Dated] = TIMED | {
    "shipped tunings": Dated(
        ("commit", "`torch.compile`, s", "coda, searched, s", "from shipped tunings, s",
         "second process: `torch.compile`, s", "coda, s"),
        (trained("dd4aad4"), trained("066689f"), trained("9d11757", searched=False),
         trained("e59b6bd", searched=False), trained("5227892", searched=False), trained("5eb59d2", searched=False),
         trained("8a4ce74", searched=False)),
    ),
    "maxima": Dated(
        ("16384 rows", "rounded and masked one by one, us", "once, us"),
        (largest(BACKWARDS, 8192, "128x96pp2x1"), largest(BACKWARDS, 14336, "128x96pp2x1"),
         largest(FORWARDS, 8192, "128x160pp2x1"), largest(FORWARDS, 14336, "128x160pp2x1")),
    ),
    "slow accumulation": Dated(
        ("16384 x 8192 x 2048", "us"),
        tuple(
            (f"{what}, {tile}", *eight_bits("e59cd7f", what, 8192, tile))
            for what, tile in ((BACKWARDS, "128x96pp2x1"), (WITHOUT_MAXIMA, "128x96pp2x1"), (SLOW, "128x96pp2x1"),
                               (SLOW, "128x192co1x1"))
        ),
    ),
    "blocks": Dated(
        ("vocabulary 128256", "ms", "GiB"),
        tuple(
            (label, *cells("heads.jsonl", "9ad2d54", f"ms/{key}", "ms", case="128256"),
             *cells("heads.jsonl", "9ad2d54", f"gib/{key}", "gib", case="128256"))
            for label, key in (("blocks of 3072 rows", "coda-3072"), ("blocks of 4096 rows", "coda-4096"),
                               ("whole", "whole"), ("`torch.compile`", "inductor"))
        ),
    ),
    "returned scores": Dated(
        ("gradient of the scores", "ms", "peak, GiB"),
        tuple(
            (label, *cells("steps.jsonl", commit, "ms", "ms", case=RETURNED[called]),
             *cells("steps.jsonl", commit, "gib/coda", "gib", case=RETURNED[called]))
            for label, commit, called in (
                ("blocks of 2048 rows", "61be18d", "the same, their gradient in blocks of 512 MiB"),
                ("blocks of 1024 rows", "61be18d", "the same, their gradient in blocks of 256 MiB"),
                ("whole", "9ad2d54", "Llama-1B, AdamW, `tune=off`, scores whole"),
            )
        ),
    ),
    "where operations stand": Dated(
        ("", "ms", "peak, GiB"),
        (
            *((label, *cells("effects.jsonl", commit, "ms", "ms", case=UNTUNED),
               *cells("effects.jsonl", commit, "gib/coda", "gib", case=UNTUNED))
              for label, commit in (("c1a6f94, before", "c1a6f94"), ("91c0a24", "91c0a24"))),
            ("`torch.compile`", *cells("effects.jsonl", "91c0a24", "baseline_ms", "ms", case=UNTUNED),
             *cells("effects.jsonl", "91c0a24", "gib/inductor", "gib", case=UNTUNED)),
        ),
    ),
    "gradients from outside": Dated(
        ("width", "`torch.compile`, its default, ms", "with the same expectation, ms", "coda, ms"),
        tuple(
            (width, *training("31a82ed", "baseline_ms; as_outputs_ms; ms", "ms", case=f"rotary-{width}"))
            for width in ("2048", "4096", "8192")
        ),
    ),
    "prototype": Dated(
        ("sums of", "the prototype, us", "`torch.compile`, us"),
        tuple(
            (case, *cells("sweeps.jsonl", "before d69c81d", "ms; baseline_ms", "us of ms", case=case))
            for case in ("ViT-L, three weights", "GPT-2 medium, one weight", "GPT-2 XL, one weight",
                         "Llama-3-8B, statistics alone")
        ),
    ),
    "sweeps": Dated(
        ("a step of 24 layers, 8b2db46", "with Sweeps, ms", "without, ms", "with, a second time, ms"),
        (
            ("ViT-L, two runs",
             *cells("sweeps.jsonl", "8b2db46", "ms/with; ms/without; ms/again", "ms", case="vit-l-x24, step")),
            ("BERT-large", *cells("sweeps.jsonl", "8b2db46", "ms/with; ms/without", "ms", case="bert-large, step"), ""),
        ),
    ),
    "token sums": Dated(
        ("of", "tokens", "width", "in blocks, us", "as it is otherwise, us", "without mixing, us"),
        tuple(
            (f"{model}, {called}", tokens, width,
             *cells("token_sums.jsonl", "f088840", "ms/in blocks; ms/inductor; ms/alone", "us of ms",
                    case=f"{model}, {how}"))
            for how, called in (("separate", "three weights"), ("packed", "one weight"))
            for model, tokens, width in (("BERT-large", "8192", "1024"), ("ViT-L", "12608", "1024"),
                                         ("GPT-2", "8192", "768"), ("GPT-2 XL", "8192", "1600"))
        ),
    ),
    "width 8192": Dated(
        BY_COMMIT,
        (
            gains("df72e3a", "layer-8192", "forward"),
            gains("on the way to ce9ce30", "layer-8192", "forward", "before ce9ce30"),
            gains("be26929", "layer-8192", "forward"),
            gains("5ebe41e, with rotary embeddings", "rotary-8192", "forward", "5ebe41e"),
        ),
    ),
    "compile in inference": Dated(
        ("commit", "coda, s", "`torch.compile`, s", "second process: coda, s", "`torch.compile`, s"),
        (compiled("754421a", "754421a"), compiled("df72e3a, when less was derived", "df72e3a")),
    ),
    "compile in training": Dated(
        ("commit", "coda, s", "`torch.compile`, s"),
        tuple(
            (commit, *training(commit, COMPILES, "s", case="llama-1b-x16"))
            for commit in ("754421a", "45b6ee8", "f6ac4b6", "957659d", "fde220c", "762b5ac", "60d1ae4", "92634f0",
                           "7d46b92", "f7926eb", "e0ab5bf", "9009b3b", "31a82ed")
        ),
    ),
    "compile of a layer": Dated(
        ("coda, s", "before, 5553443", "since, 40129be"),
        tuple(
            (called, *(cell for commit in ("5553443", "40129be")
                       for cell in training(commit, "compile_s/coda", "s", case="rotary-2048", mode=mode)))
            for called, mode in (("forward", "forward"), ("both", "train"))
        ),
    ),
    "peaks of width 8192": Dated(
        ("commit", "coda, GiB", "`torch.compile`, GiB"),
        tuple(
            (commit, *training(commit, "gib/coda; gib/inductor", "gib", case="rotary-8192", mode="train"))
            for commit in ("43c6b12", "9009b3b", "70f5cd3", "31a82ed")
        ),
    ),
    "lines of launches": Dated(
        ("q, k and v, ms", "by turns: in a line", "one by one", "cuBLAS", "sustained: in a line", "one by one",
         "cuBLAS"),
        tuple(
            (label, *cells("overlap.jsonl", "625636e", "ms/overlapping; ms/in turn; ms/products", "ms", case=case),
             *(cells("overlap.jsonl", "625636e",
                     "sustained_ms/overlapping; sustained_ms/in turn; sustained_ms/products", "ms", case=case)
               if alone else ("",) * 3))
            for label, case, alone in (
                ("width 2048, 16384 tokens", "q, k, v, 2048", True),
                ("width 4096, 16384 tokens", "q, k, v, 4096", True),
                ("Llama 1B (keys of 512), 8192 tokens", "q, k, v, Llama 1B", True),
                ("Llama 8B (keys of 1024), 8192 tokens", "q, k, v, Llama 8B", True),
                ("Llama 8B, 256 tokens", "q, k, v, Llama 8B, 256 tokens", False),
                ("Llama 8B, 16 tokens", "q, k, v, Llama 8B, 16 tokens", False),
            )
        ),
    ),
    "ViT-L in a row": Dated(
        ("07741af", "host, ms", "GPU alone, ms", "three times ten steps in a row, ms a step"),
        tuple(
            (f"`{backend}`" if "." in backend else backend,
             *profiled("07741af", "host; gpu_ms; in_a_row", "ms", backend=backend, **VIT))
            for backend in ("torch.compile", "coda")
        ),
    ),
    "ViT-L kernels": Dated(
        ("four layers", "all kernels, ms", "Triton's, ms"),
        tuple(
            (f"{commit}, {backend}",
             *profiled(commit, "us_a_step; triton_us", "ms of us", backend=backend, **VIT4))
            for commit in ("07741af", "60d1ae4")
            for backend in ("torch.compile", "coda")
        ),
    ),
    "ViT-L steps": Dated(
        ("commit", "`torch.compile` by turns, ms", "coda by turns, ms", "by turns", "sustained"),
        tuple(
            (commit, *training(commit, "baseline_ms; ms", "ms", case="autocast-vit-l-x24"),
             *training(commit, GAIN, "gain", case="autocast-vit-l-x24"))
            for commit in ("d36edb8", "7d46b92")
        ),
    ),
    "ViT-L errors": Dated(
        ("gradients at 7d46b92, against float32", "eager under autocast", "coda"),
        (
            ("error of all together",
             *profiled("7d46b92", "error_of_gradients/eager; error_of_gradients/coda", "error")),
            ("the worst tensor, over eager's", "", *profiled("7d46b92", "worst_ratio", "ratio")),
            ("the median tensor, over eager's", "", *profiled("7d46b92", "median_ratio", "ratio")),
        ),
    ),
    "Llama of 16 layers": Dated(BY_COMMIT, of_commits("llama-1b-x16", "train", "92634f0", "60d1ae4", "7d46b92")),
    "host": Dated(
        ("ms", "host: `torch.compile`, twice", "coda, twice", "GPU: `torch.compile`", "coda"),
        (
            ("193e1dd", *profiled("193e1dd", "host/0/0; host/0/1", "ms"),
             *profiled("193e1dd", "baseline_ms; ms", "ms")),
            ("193e1dd, again", *profiled("193e1dd", "host/1/0; host/1/1", "ms"), "", ""),
            ("895859a", "", "", *profiled("895859a", "baseline_ms; ms", "ms")),
        ),
    ),
    "finish": Dated(
        ("sums", "rows, features, depth", "GPU: by a kernel, us", "by torch, us", "host: by a kernel, us",
         "by torch, us"),
        tuple(
            (label, f"{m}, {n}, {k}",
             *cells("finish.jsonl", "f7926eb", "ms/finished; ms/by torch", "us of ms", case=case, m=m, n=n, k=k),
             *cells("finish.jsonl", "f7926eb", "host_us/finished; host_us/by torch", "us", case=case, m=m, n=n, k=k))
            for label, case, m, n, k in (
                ("one", "norm_producer", 16384, 2048, 2048),
                ("one", "norm_producer", 8192, 1024, 1024),
                ("over features and over tokens", "norm_gradients", 8192, 2048, 2048),
                ("over features and over tokens", "norm_gradients", 8192, 1024, 4096),
                ("a logsumexp", "scores", 8192, 128256, 2048),
            )
        ),
    ),
    "GPT-2 XL and the host": Dated(BY_COMMIT, of_commits("gpt2-xl", "train", "bf53b8f", "d36edb8", "f7926eb")),
    "forward of width 2048": Dated(
        BY_COMMIT,
        of_commits("rotary-2048", "forward", "193e1dd", "3769824", "92634f0", "d36edb8", "7d46b92", "5553443",
                   "40129be", "625636e", "e351a75"),
    ),
    "training of width 2048": Dated(
        BY_COMMIT, of_commits("rotary-2048", "train", "92634f0", "d36edb8", "7d46b92", "5553443", "40129be", "625636e")
    ),
    "laws compared": Dated(
        ("layers of", "by turns: c519690", "639ed73", "sustained: c519690", "639ed73"),
        tuple(
            (label, *(cell for path in GAIN.split("; ") for commit in ("c519690", "639ed73")
                      for cell in cells("layers.jsonl", commit, path, "gain", case=case, baseline=DEFAULT)))
            for label, case in (("GPT-2 XL", "gpt2-xl"), ("BERT-large", "bert-large"), ("ViT-L", "vit-l"))
        ),
    ),
    "bare products": Dated(
        ("16384 tokens, by turns, ms", "cuBLAS", "256x192co2x1", "256x192co1x2", "128x192pp2x1"),
        tuple(
            product(label, case, (first, *(f"{kind} {tile}" if tile else "" for tile in tiles)))
            for label, case, first, kind, tiles in (
                ("gradient of an input [16384, 8192] over 22016", "bare product kn 8192<22016", "mm", "q",
                 ("256x192co2x1", "256x192co1x2", "")),
                ("the same size in the other layout", "bare product nk 8192<22016", "mm", "q",
                 ("256x192co2x1", "256x192co1x2", "")),
                ("gradient of an input [16384, 8192] over 8192", "bare product kn 8192", "mm", "q",
                 ("256x192co2x1", "256x192co1x2", "128x192pp2x1")),
                ("gradient of a weight [8192, 8192]", "wgrad 8192x8192", "mm", "q16",
                 ("256x192co2x1", "256x192co1x2", "128x192pp2x1")),
                ("gradient of a weight [8192, 22016]", "wgrad 8192x22016", "mm", "q16",
                 ("256x192co2x1", "256x192co1x2", "")),
                ("gradient of a weight [4096, 4096]", "wgrad 4096x4096", "mm", "q16",
                 ("256x192co2x1", "256x192co1x2", "128x192pp2x1")),
            )
        ),
    ),
    "gradients in float32": Dated(
        ("cuBLAS, 16384 tokens, by turns, ms", "bfloat16", "float32", "bfloat16 and a cast"),
        tuple(
            product(f"gradient of a weight [{size.replace('x', ', ')}]", f"wgrad {size}", ("mm", "mm32", "mm+cast"))
            for size in ("2048x2048", "5504x2048", "4096x4096", "11008x4096", "8192x8192", "8192x22016", "22016x8192")
        ),
    ),
    "bare products in a step": Dated(
        ("commit", "by turns", "sustained", "compile, s"),
        tuple(
            (*gains(commit, "rotary-8192", "train"),
             *training(commit, "compile_s/coda", "s", case="rotary-8192", mode="train"))
            for commit in ("5dc38b3", "1eb4200")
        ),
    ),
    "GPT-2 XL and its sums": Dated(BY_COMMIT, of_commits("gpt2-xl", "train", "9a6577f", "55ec219", "bf53b8f")),
    "one accumulator": Dated(
        ("gradient of what they read", "by turns: one kernel, ms", "two, ms", "busy: one kernel, ms", "two, ms"),
        tuple(
            (label, *cells("summed.jsonl", "9f7db77",
                           "together/turns_ms; apart/turns_ms; together/busy_ms; apart/busy_ms", "ms", case=case))
            for label, case in (
                ("keys and values, width 2048", "k|v 2048"), ("keys and values, Llama-1B", "k|v llama-1b"),
                ("gate and up, width 2048", "gate|up 2048"), ("gate and up, width 4096", "gate|up 4096"),
                ("gate and up, Llama-1B", "gate|up llama-1b"),
            )
        ),
    ),
    "one accumulator in a step": Dated(
        ("width, commit", "by turns", "sustained"),
        tuple(
            gains(f"{width}, {commit}", f"rotary-{width}", "train", commit)
            for width, commits in (("2048", ("bf53b8f", "762b5ac")), ("4096", ("45b6ee8", "9f7db77")),
                                   ("8192", ("5ebe41e", "9f7db77", "5dc38b3")))
            for commit in commits
        ),
    ),
    "kept twice": Dated(
        ("peak of a step", "coda, GiB", "`torch.compile`, GiB"),
        tuple(
            (f"{label}, {commit}", *training(commit, "gib/coda; gib/inductor", "gib", case=case))
            for label, case, commits in (("Llama, 16 layers", "llama-1b-x16", ("8f71d3c", "fde220c")),
                                         ("GPT-2 XL", "gpt2-xl", ("1f50f82", "fde220c")))
            for commit in commits
        ),
    ),
    "rotary": Dated(
        ("width", "the product with its embedding, us", "the product, us", "the pass, us"),
        (
            rotated(2048, "128x128pp1x2", "128x128pp1x2"),
            rotated(4096, "192x128pp2x1", "128x128pp2x1"),
            rotated(8192, "128x128pp1x2", "128x192pp2x1n"),
        ),
    ),
    "clocks of a step": Dated(
        ("be26929, width 2048", "three readings, MHz", "W"),
        tuple(
            (label, *cells("clocks.jsonl", "be26929", "mhz; watt", "whole", what=CLOCK, program=program))
            for label, program in (("`torch.compile`", "inductor"), ("coda", "coda"))
        ),
    ),
    "gain of a step": Dated(
        ("the step of width 2048 at be26929", "`torch.compile`, ms", "coda, ms"),
        (
            ("by turns", *training("be26929", "baseline_ms; ms", "ms", case="layer-2048", mode="train")),
            ("sustained", *training("be26929", "sustained/baseline_ms; sustained/ms", "ms",
                                 case="layer-2048", mode="train")),
        ),
    ),
}  # fmt: skip
"""The log's tables, by the names that its markers give them."""
