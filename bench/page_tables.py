"""What the tables of the pages show: one row of TABLES each."""

from __future__ import annotations

from collections.abc import Callable

import page_names as names
from page_rows import Column, Row, Source, Table

PER_TENSOR_OR_ROW = ("2 layers of Llama, per_row", "2 layers of Llama, per_tensor")
BY_WIDTH = ("case", "d", "ffn", "tokens", "machine")
BY_BACKEND = ("case", "mode", "machine", "backend", "cache")
DEFAULT = "torch.compile default"
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def is_step(row: Row) -> bool:
    """A step of training in models.jsonl, against torch.compile."""
    return row["mode"] == "train" and str(row["baseline"]).startswith("torch.compile")


INFERENCE = Source("layers.jsonl", lambda r: r.get("mode") == "infer", names=names.LAYERS, spread=("baseline",))
MODELS = Source("models.jsonl", lambda r: r["mode"] == "infer", names=names.MODELS, spread=("baseline",))
TRAINING = Source("training.jsonl", names=names.TRAINING)
RELU = Source("layers.jsonl", lambda r: r["case"] in names.RELU, names=names.RELU, alone=True, kind="training")
NANO = Source("steps.jsonl", names=names.STEPS, alone=True)
STEPS = Source("models.jsonl", is_step, names=names.STEPS, alone=True)
UNTUNED = Source("effects.jsonl", lambda r: r["case"] == names.WITHOUT_TUNING, names=names.STEPS, alone=True)
FLOAT8_STEP = Source(
    "float8.jsonl", lambda r: "inductor, rowwise" in r.get("rows", {}), names=names.STEPS, alone=True, numbers="FP8",
    kind="training", ms="rows/coda, rowwise/ms", baseline_ms="rows/inductor, rowwise/ms",
    gib="rows/coda, rowwise/gib", baseline_gib="rows/inductor, rowwise/gib",
)  # fmt: skip
FLOAT8_TRAINING = Source(
    "float8.jsonl", lambda r: "d" in r and r["case"] not in {*PER_TENSOR_OR_ROW, *names.FLOAT8_FAST}, BY_WIDTH,
    names.FLOAT8, alone=True, numbers="FP8", kind="training",
)  # fmt: skip
FLOAT8_FAST = Source(
    "float8.jsonl", lambda r: r["case"] in names.FLOAT8_FAST, BY_WIDTH, names.FLOAT8_FAST, alone=True, numbers="FP8",
    kind="training",
)  # fmt: skip
FLOAT8_INFERENCE = Source(
    "float8.jsonl", lambda r: r["case"] in PER_TENSOR_OR_ROW, BY_WIDTH, names.FLOAT8, alone=True, numbers="FP8",
    kind="inference",
)  # fmt: skip
EXAMPLES = Source("examples.jsonl", names=names.EXAMPLES, alone=True)
HEADS = Source(
    "heads.jsonl", key=("case", "gpu"), names=names.HEADS_IN_BLOCKS, alone=True, kind="training",
    ms="ms/coda-2048|ms/coda-4096", baseline_ms="ms/inductor", gib="gib/coda-2048|gib/coda-4096",
)  # fmt: skip
DISTRIBUTED = Source("distributed.jsonl", names=names.DISTRIBUTED)
FSDP2 = Source("profile.jsonl", lambda r: r["case"] == names.FSDP2, ("case", "backend"))
PROFILED = Source(
    "profile.jsonl", FSDP2.where, FSDP2.key, names.FSDP2_NAMES, spread=("backend",), how="under the profiler",
    ms="coda/wall_ms", baseline_ms="inductor/wall_ms",
)  # fmt: skip
BENCH = Source("bench.jsonl", names=names.BENCH)


def pick(source: Source, case: str, name: str, **more: object) -> Source:
    """The one case of a source, under a name of its own; `more` are further values that its row has."""

    def where(row: Row) -> bool:
        return source.where(row) and row["case"] == case and all(row.get(k) == v for k, v in more.items())

    return Source(**(vars(source) | {"where": where, "names": {case: name}, "spread": ()}))


GAINS = (
    pick(TRAINING, "llama-1b-x16", "Llama, width 2048, 16 layers", mode="train"),
    pick(STEPS, names.LLAMA, "Llama-1B of transformers, AdamW", machine=H100),
    pick(NANO, names.NANO, "nanochat-like, autocast, AdamW", machine=H100),
    pick(BENCH, "gemma3_12b, 2 layers", "Gemma-3-12B, 2 layers", mode="train", machine=H100),
    pick(FLOAT8_STEP, names.FP8_STEP, "Llama-1B, FP8 rowwise, AdamW"),
    pick(FLOAT8_TRAINING, "2 layers of Llama, tensorwise", "Llama, width 4096, FP8 tensorwise, 2 layers", d=4096),
    pick(FLOAT8_INFERENCE, "2 layers of Llama, per_row", "Llama, width 4096, FP8 PerRow, 2 layers", d=4096),
    pick(INFERENCE, "gpt2-xl", "GPT-2 XL, 4 layers", baseline=DEFAULT),
    pick(MODELS, "qwen2-7b x2", "Qwen2-7B, 2 layers", baseline=DEFAULT),
    pick(TRAINING, "autocast-vit-l", "ViT-L, autocast, 2 layers", mode="train"),
)
"""The rows of the README's table: both cards, both kinds of numbers, training and inference, and one that loses."""

FP8_STEP = (
    Column("`torch.compile` bf16, ms", "rows/inductor, bf16/ms", "ms"),
    Column("`torch.compile` FP8, ms", "alone/baseline_ms", "ms"),
    Column("coda FP8, ms", "alone/ms", "ms"),
    Column("gain over FP8", "alone/gain", "gain"),
    Column("gain over bf16", "against_bf16", "gain"),
    Column("bf16, GiB", "rows/inductor, bf16/gib", "gib"),
    Column("FP8 peak, GiB", "memory", "memory"),
)
CASE, KIND, MEMORY = Column("case", "what"), Column("", "kind"), Column("peak, GiB", "memory", "memory")
TIMES = (
    Column("`torch.compile` alone, ms", "alone/baseline_ms", "ms"),
    Column("coda alone, ms", "alone/ms", "ms"),
)
ALONE = (*TIMES, Column("gain alone", "alone/gain", "gain"))
BY_TURNS = (
    Column("`torch.compile` by turns, ms", "turns/baseline_ms", "ms"),
    Column("coda by turns, ms", "turns/ms", "ms"),
    Column("floor, ms", "floor_ms", "ms"),
    Column("gain by turns", "turns/gain", "gain"),
    Column("gain alone", "alone/gain", "gain"),
)
GRAPHS = (
    Column("CUDA graphs, gain by turns", "torch.compile reduce-overhead/turns/gain", "gain"),
    Column("gain alone", "torch.compile reduce-overhead/alone/gain", "gain"),
)
WAYS = (
    ("`torch.compile`", "inductor"), ("again", "null"), ("whole", "whole"), ("blocks", "coda-2048|coda-4096"),
    ("Liger", "liger"),
)  # fmt: skip
"""The ways to make a head, by the names of the rows' keys: of several the first that a row has."""


def of_way(what: str, key: str, *rest: str) -> str:
    """Where a row has something of a way."""
    return "|".join("/".join((what, name, *rest)) for name in key.split("|"))


TUNED = "max-autotune"
PEERS = (
    ("`torch.compile`", "inductor"), ("again", "again"), ("`max-autotune`", TUNED), ("coda", "coda"),
    ("Liger", "liger"), ("torchao FP8", "float8"), ("FP8 and coda", "float8-coda"),
)  # fmt: skip
HEAVY = [(head, key) for head, key in PEERS if key not in ("again", TUNED)]
"""Whose peaks and losses stand beside one another."""
TUNERS = (
    ("`torch.compile`", "inductor"), ("`max-autotune`", TUNED), ("coda", "coda"), ("`torch.compile` again", "again"),
)  # fmt: skip
LOSSES = ("inductor", "coda", "liger")


def beside(where: Callable[[Row], bool]) -> Source:
    """Rows of peers.jsonl, each side alone."""
    return Source(
        "peers.jsonl", where, ("case", "mode", "machine", "run"), names.PEERS, alone=True,
        baseline_ms="sides/inductor/ms", ms="sides/coda/ms",
    )  # fmt: skip


BESIDE = beside(lambda r: "caches" in r or TUNED not in r["sides"])


COMPILES = Source("compile_time.jsonl", lambda r: "compile_s" in r, BY_BACKEND, names.COMPILED, spread=BY_BACKEND[3:])

BY_HAND = "what the rows' `command` says: no script of bench does"

TABLES = (
    Table(
        "gains",
        "the commands that docs/benchmarks.md has below its tables",
        GAINS,
        (CASE, KIND, Column("card", "card"), *ALONE, MEMORY),
        brief=True,
    ),
    Table(
        "inference",
        "`python bench/layers.py half layer gpt2-xl bert-large vit-l [--mode reduce-overhead]`",
        (INFERENCE,),
        (CASE, *BY_TURNS, *GRAPHS),
    ),
    Table("models", "`python bench/models.py`", (MODELS,), (CASE, *BY_TURNS, *GRAPHS)),
    Table("training", "`python bench/training.py`", (TRAINING,), (CASE, KIND, *BY_TURNS, MEMORY)),
    Table(
        "repeated",
        "`python bench/training.py`, run again on other days and hosts",
        (TRAINING,),
        (
            CASE, KIND, Column("runs", "runs/count"), Column("least", "runs/least", "gain"),
            Column("greatest", "runs/greatest", "gain"), Column("shown above", "alone/gain", "gain"),
        ),
        least_runs=3,
    ),
    Table(
        "tangents",
        "`python bench/training.py rotary-2048 rotary-4096 rotary-8192 --kinds train`",
        (Source("training.jsonl", lambda r: r.get("as_outputs_ms"), names=names.TRAINING),),
        (CASE, BY_TURNS[0], Column("its 2.13 default by turns, ms", "as_outputs_ms", "ms"), BY_TURNS[1], BY_TURNS[3]),
    ),
    Table("relu", BY_HAND, (RELU,), (CASE, *ALONE, Column("null", "null", "ratio"), MEMORY)),
    Table("steps", BY_HAND, (NANO, STEPS, FLOAT8_STEP, UNTUNED), (CASE, *ALONE, MEMORY)),
    Table(
        "heads",
        "`python bench/heads.py 32000 128256 32000:cap 128256:cap 128256:returned`",
        (Source(**(vars(HEADS) | {"names": names.HEADS})),),
        (
            Column("vocabulary", "what"),
            *(Column(f"{head}, ms", of_way("ms", key), "ms") for head, key in WAYS),
            Column("gain, whole", "ratio/whole", "gain"),
            Column("gain, blocks", of_way("ratio", WAYS[3][1]), "gain"),
            *(Column(f"{head}, GiB", of_way("gib", key), "gib") for head, key in WAYS if key != "null"),
        ),
    ),
    Table(
        "head-errors",
        "`python bench/heads.py 32000 128256 32000:cap 128256:cap 128256:returned`",
        (Source("heads.jsonl", lambda r: "error" in r, ("case", "gpu"), names.HEADS),),
        (Column("vocabulary", "what"), *(Column(head, of_way("error", key, "1"), "error") for head, key in WAYS)),
    ),
    Table(
        "float8",
        "`python bench/float8.py WIDTH FEED-FORWARD RECIPE`",
        (FLOAT8_TRAINING, FLOAT8_INFERENCE),
        (
            Column("recipe", "what"), KIND, Column("width", "d"), Column("feed-forward", "ffn"),
            Column("tokens", "tokens"), *ALONE, Column("null", "null", "ratio"), MEMORY,
        ),
    ),
    Table(
        "float8-fast",
        "`python bench/float8.py WIDTH FEED-FORWARD RECIPE --numerics fast`",
        (FLOAT8_FAST,),
        (
            Column("recipe", "what"), Column("width", "d"), Column("feed-forward", "ffn"), Column("tokens", "tokens"),
            *ALONE, Column("null", "null", "ratio"), MEMORY, Column("difference", "difference", "error"),
        ),
    ),
    Table(
        "float8-step", "`python bench/peers.py llama-1b inductor float8 float8-coda`",
        (FLOAT8_STEP,), (CASE, *FP8_STEP),
    ),
    Table(
        "distributed",
        "`python bench/distributed.py ddp fsdp2 tp` and examples/titan_fsdp2.py",
        (DISTRIBUTED, pick(EXAMPLES, names.TITAN_FSDP2, names.FSDP2_NAMES[names.TITAN_FSDP2]), PROFILED),
        (
            CASE, Column("timed", "how"),
            Column("`torch.compile`, ms", "alone/baseline_ms|turns/baseline_ms", "ms"),
            Column("coda, ms", "alone/ms|turns/ms", "ms"), Column("gain", "alone/gain|turns/gain", "gain"),
        ),
    ),
    Table(
        "compile-time",
        "`python bench/compile_time.py` and `python bench/training.py llama-1b-x16 --kinds train`",
        (COMPILES, pick(TRAINING, "llama-1b-x16", "Llama, width 2048, 16 layers, 8192 tokens", mode="train")),
        (
            CASE, KIND,
            Column("cold: `torch.compile`, s", "inductor/cold/compile_s|compile_s/inductor", "s"),
            Column("coda, s", "coda/cold/compile_s|compile_s/coda", "s"),
            Column("with shipped tunings, s", "coda, hinted/cold/compile_s", "s"),
            Column("warm: `torch.compile`, s", "inductor/warm/compile_s", "s"),
            Column("coda, s", "coda, hinted/warm/compile_s|coda/warm/compile_s", "s"),
        ),
    ),
    Table(
        "fsdp2-profile",
        "torch.profiler over three steps",
        (FSDP2,),
        (
            Column("backend", "backend"), Column("a step, ms", "wall_ms", "ms"),
            *(Column(f"{part}, ms", f"by_kind/{key}", "ms") for part, key in names.PARTS),
            Column("all but collectives, ms", "compute_ms", "ms"),
        ),
    ),
    Table(
        "float8-learning",
        "`python examples/float8_llama.py --width 512 --layers 4 --inner 2048 --train-steps 300 --seed SEED`",
        (Source("float8.jsonl", lambda r: r["case"] in names.LEARNT, ("case",), names.LEARNT),),
        (
            CASE,
            *(Column(f"{head}, {when}", f"rows/{key}/{value}", "loss") for when, value in (("first", "first"),
              ("mean of the last 50", "last")) for head, key in PEERS if key in ("inductor", "coda")),
        ),
    ),
    Table(
        "peers",
        "`python bench/peers.py CASE`, a second time where `max-autotune` is among the sides",
        (BESIDE,),
        (
            CASE, KIND, Column("coda's gain", "alone/gain", "gain"),
            *(Column(f"{head}, ms", f"sides/{key}/ms", "ms") for head, key in PEERS),
            *(Column(f"{head}, GiB", f"sides/{key}/gib", "gib") for head, key in HEAVY),
            *(Column(f"{head}, loss", f"sides/{key}/result", "loss") for head, key in PEERS if key in LOSSES),
        ),
    ),
    Table(
        "peers-ms",
        "`python bench/peers.py CASE`",
        (BESIDE,),
        (CASE, KIND, *(Column(f"{head}, ms", f"sides/{key}/ms", "ms") for head, key in PEERS if key != "again")),
    ),
    Table(
        "max-autotune",
        "`python bench/peers.py CASE inductor max-autotune coda again`",
        (beside(lambda r: "caches" not in r and TUNED in r["sides"]),),
        (
            CASE, KIND, Column("coda's gain alone", "alone/gain", "gain"),
            *(Column(f"{head} alone, ms", f"sides/{key}/ms", "ms") for head, key in TUNERS),
            *(Column(f"{head} by turns, ms", f"sides/{key}/turns_ms", "ms") for head, key in TUNERS),
            *(Column(f"{head}, first two calls, s", f"sides/{key}/compile_s", "s") for head, key in TUNERS[:-1]),
        ),
    ),
    Table("examples", "the scripts of examples/", (EXAMPLES,), (CASE, KIND, *ALONE, MEMORY)),
    Table(
        "bench",
        "`coda-inductor bench MODULE:FUNCTION`, or `python bench/zoo.py [--body] NAME`",
        (BENCH,),
        (CASE, KIND, *BY_TURNS[:2], *BY_TURNS[3:], Column("null", "null", "ratio"), MEMORY),
    ),
)  # fmt: skip
"""The tables, by the names that the pages' markers give them."""
