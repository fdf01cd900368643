"""What the pages call the cases of bench/results, in the order in which they are shown."""

from __future__ import annotations

LAYERS = {
    "half 2048": "Llama half layer, width 2048",
    "half 4096": "Llama half layer, width 4096",
    "half 8192": "Llama half layer, width 8192",
    "layer 2048": "Llama layer, width 2048",
    "layer 4096": "Llama layer, width 4096",
    "layer 8192": "Llama layer, width 8192",
    "gpt2-xl": "GPT-2 XL, 4 layers",
    "bert-large": "BERT-large, 4 layers",
    "vit-l": "ViT-L, 4 layers",
}
MODELS = {
    "llama-1b x2": "Llama, width 2048",
    "qwen2-7b x2": "Qwen2-7B",
    "qwen3-8b x2": "Qwen3-8B",
    "phi3-mini x2": "Phi-3 mini",
    "gemma2-9b x2": "Gemma-2 9B",
    "olmo2-7b x2": "OLMo-2 7B",
    "neox-6.9b x2": "GPT-NeoX 6.9B",
    "gpt2-xl x2": "GPT-2 XL",
    "nanogpt-xl x2": "nanoGPT, GPT-2 XL's widths",
    "bert-large x2": "BERT-large",
    "vit-l x2": "ViT-L",
    "clip-l x2": "CLIP-L (vision)",
    "dit-xl x2": "DiT-XL",
}
TRAINING = {
    "layer-2048": "layer, width 2048",
    "layer-4096": "layer, width 4096",
    "layer-8192": "layer, width 8192",
    "rotary-2048": "layer with rotary embeddings, width 2048",
    "rotary-4096": "layer with rotary embeddings, width 4096",
    "rotary-8192": "layer with rotary embeddings, width 8192",
    "llama-1b": "Llama, width 2048, 2 layers",
    "autocast-llama-1b": "Llama, width 2048, 2 layers, autocast",
    "llama-1b-x16": "Llama, width 2048, 16 layers",
    "llama-8b": "Llama, width 4096, 2 layers",
    "gpt2-xl": "GPT-2 XL, 2 layers",
    "autocast-gpt2-xl": "GPT-2 XL, 2 layers, autocast",
    "vit-l": "ViT-L, 2 layers",
    "autocast-vit-l": "ViT-L, 2 layers, autocast",
    "autocast-vit-l-x24": "ViT-L, 24 layers, autocast",
    "bert-large": "BERT-large with its head, 2 layers",
}
HEADS = {
    "32000": "32000",
    "128256": "128256",
    "32000:cap": "32000, capped",
    "128256:cap": "128256, capped",
    "128256:returned": "128256, scores returned",
    "32000:z": "32000, with a z-loss",
    "32000:smooth": "32000, labels smoothed by 0.1",
}
NANO = (
    "nanochat-like, 20 layers of width 1280, 16 x 2048 tokens, vocabulary 65536, float32 weights under autocast, AdamW"
)
TITAN = "TorchTitan's Llama-1B, each block compiled by itself, whole steps with AdamW, 4 x 2048 tokens"
PHI4 = "two layers of Phi-4-14B (packed gate and up), forward and backward, 4 x 2048 tokens"
LLAMA = "Llama-1B of transformers, 16 layers, tied head, whole steps with AdamW, 4 x 2048 tokens"
FP8_STEP = "Llama-1B of transformers, 16 layers, head in bf16, whole steps with AdamW, 4 x 2048 tokens"
WITHOUT_TUNING = "llama-1b step with AdamW, every Region (tune=off), 4 x 2048 tokens, three processes of each commit"
ATTENTION_ONCE = "causal, 8 heads of keys and values, read once"
MASKED, WINDOW = "cuDNN, by the mask", "flash attention, a window"
_OF_A_WINDOW = (
    (16, 512, 16, 64, 64, 64), (4, 2048, 16, 64, 64, 64), (1, 8192, 16, 64, 64, 64), (4, 2048, 32, 128, 255, 0),
    (4, 2048, 32, 128, 1023, 0), (1, 8192, 32, 128, 4095, 0), (4, 2048, 16, 256, 1023, 0), (1, 8192, 16, 256, 1023, 0),
)  # fmt: skip
_FACTS = "batch", "tokens", "heads", "head", "left", "right"
WINDOWS = [dict(zip(_FACTS, sizes, strict=True)) for sizes in _OF_A_WINDOW]
"""`head`: numbers in each head; `left` and `right`: how many tokens are seen before and behind."""

STEPS = {
    NANO: "nanochat-like, 20 layers of width 1280, 32768 tokens, autocast, AdamW",
    "the same, scores whole": 'the same, `disable="blocks"`',
    LLAMA: "Llama-1B of transformers, AdamW",
    TITAN: "TorchTitan's Llama-1B, blocks compiled by themselves, AdamW",
    PHI4: "Phi-4-14B, 2 layers, before packed products were read in parts",
    FP8_STEP: "Llama-1B, FP8 rowwise, head in bf16, AdamW",
    WITHOUT_TUNING: "Llama-1B, AdamW, `tune=off`, three processes",
    "llama-1b of transformers, 16 layers, tied head, 4 x 2048 tokens, AdamW, every Region (tune=off)":
        "Llama-1B, AdamW, `tune=off`, scores whole",
    "the same, the scores' gradient in blocks of 512 MiB": "the same, their gradient in blocks of 512 MiB",
    "the same, the scores' gradient in blocks of 256 MiB": "the same, their gradient in blocks of 256 MiB",
}  # fmt: skip
FSDP2 = "FSDP2, blocks by themselves, 8 layers, 2 ranks"
PARTS = (
    ("products", "gemm"), ("coda's kernels", "ours"), ("attention", "attention"), ("memory-bound", "triton"),
    ("AdamW", "adam"), ("FSDP2's copies", "fsdp copies"), ("collectives", "nccl"), ("other", "other"),
)  # fmt: skip
"""Of a profiled step: what the page calls its parts, and the rows' keys."""
RELU = {
    f"2 x (RMSNorm, up, {name}, down, residual), forward and backward": f"2 MLPs of width 2048 with {called}"
    for name, called in (("relu", "ReLU"), ("relu squared", "squared ReLU"), ("leaky relu", "leaky ReLU"))
}
DISTRIBUTED = {
    "ddp-llama-1b": "DistributedDataParallel, buckets of 25 MB, 2 layers",
    "tp-llama-1b": "tensor parallel, 2 layers",
    "fsdp2-llama-1b": "FSDP2, each layer compiled by itself, 2 layers",
}
TURNED = "neighbours of [4, 4096, 16, 128] turned by a complex table, "
ROUNDED = ("rounded behind the cat", "rounded before the cat", "written once and read once")
ROUNDED_IN_A_STEP = ("rotary parts rounded behind the cat", "rotary parts rounded first")
TAKEN_AGAIN = "coda, the norm's sum not handed on"
HANDED_ON = ("the norm's sum taken again, loss by Inductor", "the norm's sum handed on")
NORMS = "gradients of an RMSNorm, its weight and a residual"
PACKED = ("coda, neither", "coda, both")
ALL_OF_IT = "handed on, loss along rows, gradient without its sum"
HELD = {"rms": "RMSNorm", "layer": "LayerNorm", "rms_to_fp8": "RMSNorm to FP8",
        "rms_gradient": "gradient of an RMSNorm", "layer_gradient": "of a LayerNorm"}  # fmt: skip
HELD_SIZES = (*(f"16384 x {n}" for n in (1536, 2048, 2560, 4096)), "8192 x 5120", "8192 x 8192")
HELD_STEP, HELD_AT = "2 layers of Llama, rowwise, width 2048, before and after", "e82152a and rows held"
CAST_BLOCKS = "kernel alone: casts transposed, or in both layouts, or the largest of rows and columns"
SWIGLU_FP8 = "kernel alone: SwiGLU's gradient in FP8, 16384 x 8192 x 2048, e4m3, slow accumulation, bf16 beside it"
LOSS = "cross_entropy of scores in bf16 by itself, "
LOSSES = ("8192 x 128256", "8192 x 151936", "16384 x 50257", "32768 x 16384", "65536 x 8192")
FLOAT8_PROFILED = "two Llama layers of width 2048, FP8 rowwise, 4 x 4096 tokens, forward and backward"
TITAN_FSDP2 = "Llama as TorchTitan compiles it, FSDP2, width 2048, 8 layers, 16384 tokens"
TITAN_ALONE = TITAN_FSDP2.replace("16384", "8192")
FSDP2_NAMES = {
    TITAN_FSDP2: "FSDP2, each layer compiled by itself, 8 layers, AdamW",
    FSDP2: "the same step, as the profile below has it",
}
FLOAT8 = {
    "2 layers of Llama, rowwise": "rowwise",
    "2 layers of Llama, tensorwise": "tensorwise",
    "2 layers of Llama, rowwise_with_gw_hp": "rowwise_with_gw_hp",
    "2 layers of Llama, per_row": "PerRow",
    "2 layers of Llama, per_tensor": "PerTensor",
}
FLOAT8_FAST = {f"{case}, numerics=fast": name for case, name in [*FLOAT8.items()][:3]}
LLAMA_1B = "llama 16 x 2048, 8192 tokens, vocabulary 128256"
COMPILED = {
    "llama 16 x 2048, 2048 tokens, vocabulary 128256": "Llama-1B, 16 layers and head, 2048 tokens",
    LLAMA_1B: "Llama-1B, 16 layers and head, 8192 tokens",
    "llama 2 x 2048, 8192 tokens, vocabulary 128256": "Llama-1B, 2 layers and head, 8192 tokens",
}
BENCH = {
    f"{case}, {part}": f"{name}, {part}"
    for case, name in (
        ("qwen3_8b", "Qwen3-8B"), ("phi4_14b", "Phi-4-14B"), ("gemma3_12b", "Gemma-3-12B"), ("glm4_9b", "GLM-4-9B"),
        ("modernbert_large", "ModernBERT-large"), ("dit_xl", "DiT-XL"),
        ("siglip_so400m", "SigLIP-SO400M, 16 images"),
        ("nemotron_8b", "Nemotron-8B"), ("granite_8b", "Granite-8B"), ("bert_large_dropout", "BERT-large, dropout"),
        ("dinov3_vitl", "DINOv3 ViT-L, 8 images"), ("eva02_l", "EVA-02 L, 16 images of 448 pixels"),
    )
    for part in (
        "2 layers", "2 layers, disable=parts", "2 blocks", "3 blocks", "2 layers and head",
        "2 layers and head, disable=heads",
    )
} | {"whisper_large_v3, 4 layers and head": "Whisper large v3, 4 layers and head"}  # fmt: skip
DIFFUSION = {
    "flux_1_dev, 4 layers and head": "FLUX.1-dev, two blocks of each kind",
    "sd35_large, 3 layers and head": "SD3.5-large, three blocks",
    "wan_1b3, 2 layers and head": "Wan-1.3B, two blocks",
    "pixart_1024, 2 layers and head": "PixArt-1024, two blocks",
}
BENCH |= DIFFUSION

EXAMPLES = {
    "Llama of transformers, width 2048, 4 layers, 8192 tokens, AdamW": "train_llama.py: width 2048, 4 layers",
    "LoRA of rank 16 on a Llama, width 2048, 4 layers, 8192 tokens": "lora.py: width 2048, 4 layers",
    "Trainer, Qwen2 of width 1536, 4 layers, bf16=True": "trainer.py: Qwen2, width 1536, 4 layers",
    "Llama in rowwise, width 2048, 2 layers, 16384 tokens, autocast, AdamW":
        "float8_llama.py: rowwise, width 2048, 2 layers",
    "DiT, width 1152, 28 blocks, 10 steps with guidance": "diffusion.py: a DiT, width 1152, 28 blocks",
    "DiT, width 1152, 28 blocks, 10 steps with guidance, from the wheel": "the same by the wheel",
    TITAN_FSDP2: "titan_fsdp2.py: width 2048, 8 layers",
    TITAN_ALONE: "titan_fsdp2.py on one GPU: width 2048, 8 layers",
    "GPT, width 1600, 4 layers, 8192 tokens, autocast, AdamW": "nanogpt.py: width 1600, 4 layers",
}  # fmt: skip
LEARNING = "examples/float8_llama.py --width 512 --layers 4 --inner 2048 --train-steps 300, rowwise"
LEARNT = {f"{LEARNING}, seed {seed}": f"seed {seed}" for seed in (1, 2, 3)}
PEERS = {
    "llama-1b": "Llama-1B of transformers, 4 x 2048 tokens, with AdamW",
    "llama-8b": "two layers of Llama-8B's widths, 2 x 4096 tokens",
    "dit": "two blocks of DiT-XL",
    "dit-infer": "two blocks of DiT-XL",
    "nano": "nanochat-like, 20 layers of width 1280, 32768 tokens, with AdamW",
}
DIT_EXAMPLE = "DiT, width 1152, 28 blocks, 10 steps with guidance"
POSITIONS, SAM_BLOCKS = "positions added to scores", "eight blocks of SAM ViT-H"
WRITTEN, WRITTEN_LAYER = "attention written out", "a layer with attention written out"
EAGER = "transformers' eager attention"
WRITTEN_LAYERS = (
    ("MinGPT, 16 x 2048 tokens, width 2048, 32 heads", "03dee05"),
    ("SAM's first code, 4 images of 64 x 64, width 1280, 16 heads", "03dee05"),
    ("BLOOM, 4 x 2048 tokens, width 1024, 16 heads", "on the way to 79051fc"),
    ("transformers' eager attention, 4 x 2048 tokens, width 1024, 16 heads", "on the way to 79051fc"),
    ("einsum, 16 x 577 tokens, width 768, 12 heads", "on the way to 79051fc"),
    ("a vision transformer, 64 x 197 tokens, width 1024, 16 heads", "on the way to 79051fc"),
)
EAGER_MODELS = (
    ("two layers of Llama-8B's widths, 2 x 4096 tokens", "train", "forward and backward"),
    ("eight blocks of SAM ViT-H, four images", "infer", "inference"),
)
BY_MODE = (
    "`torch.compile`, inference, ms", "coda, ms", "`torch.compile`, forward and backward, ms", "coda, both, ms"
)  # fmt: skip
WHEEL = (
    "the wheel, installed with --no-index and --no-deps beside packed dependencies; as printed; three other GPUs of the"
    " host compiled and tested meanwhile, on cores of their own"
)
QUIET = (
    "three drawings in a row, three times by turns, medians; gpu_ms: the sum of its kernels' times; nothing else on the"
    " host"
)
FLUX_BLOCK = "a block of Flux of one stream, 4608 tokens of width 3072, inference"
FAST = "rowwise, two layers of width 2048, by accumulation of the backward"
EVEN = (
    "4608 x 3072 x 15360, bias, gate, residual, sums", "4608 x 12288 x 3072, bias, GELU",
    "8100 x 1536 x 8960, bias, gate, residual, sums", "8192 x 2432 x 9728, bias, gate, residual, sums",
    "8192 x 9728 x 2432, bias, GELU", "8192 x 1152 x 1152, bias, gate, residual, sums",
    "8192 x 2048 x 8192, norm producer", "8192 x 4096 x 4096, norm producer",
)  # fmt: skip
HEADS_IN_BLOCKS = {case: f"head of vocabulary {name}, in blocks" for case, name in HEADS.items()}


def scripts(*names: str) -> tuple[str, ...]:
    """The cases of these examples."""
    return tuple(case for case, called in EXAMPLES.items() if called.startswith(names))


CLASSES: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    "inference": {
        ("layers.jsonl", "inference"): tuple(LAYERS),
        ("models.jsonl", "inference"): tuple(case for case in MODELS if case != "dit-xl x2"),
        ("bench.jsonl", "inference"): (
            "qwen3_8b, 2 layers", "qwen3_8b, 2 layers and head", "phi4_14b, 2 layers", "phi4_14b, 2 layers and head",
            "gemma3_12b, 2 layers", "glm4_9b, 2 layers", "modernbert_large, 2 layers",
            "dinov3_vitl, 2 layers and head", "eva02_l, 3 blocks", "siglip_so400m, 2 layers and head",
            "granite_8b, 2 layers and head", "whisper_large_v3, 4 layers and head", "nemotron_8b, 2 layers and head",
            "glm4_9b, 2 layers and head",
        ),
    },
    "training of width up to 2560": {
        ("training.jsonl", "training"): (
            "layer-2048", "rotary-2048", "llama-1b", "autocast-llama-1b", "llama-1b-x16", "gpt2-xl",
            "autocast-gpt2-xl", "vit-l", "autocast-vit-l", "autocast-vit-l-x24", "bert-large",
        ),
        ("steps.jsonl", "training"): (NANO,),
        ("models.jsonl", "training"): (LLAMA, TITAN),
        ("bench.jsonl", "training"): (
            "modernbert_large, 2 layers", "bert_large_dropout, 2 layers and head", "dinov3_vitl, 2 layers and head",
            "siglip_so400m, 2 layers and head",
        ),
        ("examples.jsonl", "training"): scripts(
            "train_llama.py", "lora.py", "trainer.py", "nanogpt.py", "titan_fsdp2.py on one"
        ),
    },
    "training of width 3584 and more": {
        ("training.jsonl", "training"): ("layer-4096", "layer-8192", "rotary-4096", "rotary-8192", "llama-8b"),
        ("models.jsonl", "training"): (PHI4,),
        ("bench.jsonl", "training"): (
            "qwen3_8b, 2 layers", "phi4_14b, 2 layers", "phi4_14b, 2 layers and head", "gemma3_12b, 2 layers",
            "glm4_9b, 2 layers", "granite_8b, 2 layers and head",
        ),
    },
    "FSDP2 on two GPUs": {
        ("distributed.jsonl", "training"): ("fsdp2-llama-1b",),
        ("examples.jsonl", "training"): (TITAN_FSDP2,),
    },
    "DDP or TP on two GPUs": {("distributed.jsonl", "training"): ("ddp-llama-1b", "tp-llama-1b")},
    "Flux, SD3.5, Wan, PixArt": {("bench.jsonl", "inference"): DIFFUSION},
    "DiT, inference": {
        ("models.jsonl", "inference"): ("dit-xl x2",),
        ("bench.jsonl", "inference"): ("dit_xl, 2 blocks",),
        ("examples.jsonl", "inference"): scripts("diffusion.py"),
    },
    "DiT, training": {
        ("bench.jsonl", "training"): ("dit_xl, 2 blocks",), ("peers.jsonl", "training"): ("dit",),
    },
    "FP8 training": {
        ("float8.jsonl", "training"): (*tuple(FLOAT8)[:3], FP8_STEP),
        ("examples.jsonl", "training"): scripts("float8_llama.py"),
    },
    "FP8 inference": {("float8.jsonl", "inference"): tuple(FLOAT8)[3:]},
    "pieces by themselves": {
        ("training.jsonl", "forward"): (
            "layer-2048", "layer-4096", "layer-8192", "rotary-2048", "rotary-4096", "rotary-8192", "llama-1b",
            "llama-1b-x16", "gpt2-xl",
        ),
        ("layers.jsonl", "training"): tuple(RELU),
        ("heads.jsonl", "training"): tuple(HEADS),
    },
}  # fmt: skip
"""For each class of gains the cases that it has, by their file and kind."""
SWITCHED: dict[tuple[str, str], tuple[str, ...]] = {
    ("bench.jsonl", "training"): ("phi4_14b, 2 layers, disable=parts",),
    ("bench.jsonl", "inference"): (
        "nemotron_8b, 2 layers and head, disable=heads",
        "glm4_9b, 2 layers and head, disable=heads",
    ),
    ("effects.jsonl", "training"): (WITHOUT_TUNING,),
    ("examples.jsonl", "inference"): scripts("the same by the wheel"),
    ("peers.jsonl", "training"): ("llama-1b", "llama-8b", "nano"),
    ("peers.jsonl", "inference"): ("dit-infer",),
}
"""Cases of no class: a switch of ours is not at its default in them, or they are another case again."""
