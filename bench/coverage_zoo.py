"""The models that `coverage.py` counts: the widths of published models, two layers of each kind, and their inputs."""

from __future__ import annotations

from coverage_cases import (
    Case,
    checkpointing,
    decoder,
    diffusion,
    encoder,
    experts,
    ids,
    lora,
    of_timm,
    real,
    sizes,
    t5,
    vision,
)

LLAMA = sizes(4096, 14336, 32, 8, 128256)
BERT = sizes(1024, 4096, 16, 16, 30522)
ALTERNATE = ["sliding_attention", "full_attention"]

MODELS: dict[str, Case] = {
    "llama3_8b": decoder("Llama", LLAMA),
    "llama3_8b_autocast": decoder("Llama", LLAMA, autocast=True),
    "llama3_8b_checkpointing": decoder("Llama", LLAMA, change=checkpointing),
    "llama3_8b_lora": decoder("Llama", LLAMA, change=lora),
    "qwen3_8b": decoder("Qwen3", sizes(4096, 12288, 32, 8, 151936, head_dim=128)),
    "gemma3_4b": decoder(
        "Gemma3", sizes(2560, 10240, 8, 4, 262144, head_dim=256, sliding_window=1024, layer_types=ALTERNATE),
        config="Gemma3TextConfig",
    ),
    "phi4_mini": decoder("Phi3", sizes(3072, 8192, 24, 8, 200064, partial_rotary_factor=0.75)),
    "phi4_14b": decoder("Phi3", sizes(5120, 17920, 40, 10, 100352)),
    "olmo3_7b": decoder("Olmo3", sizes(4096, 11008, 32, 32, 100278, sliding_window=4096, layer_types=ALTERNATE)),
    "cohere2_7b": decoder("Cohere2", sizes(4096, 14336, 32, 8, 256000)),
    "nemotron_8b": decoder("Nemotron", sizes(4096, 16384, 32, 8, 256000)),
    "starcoder2_7b": decoder("Starcoder2", sizes(4608, 18432, 36, 4, 49152)),
    "falcon_7b": decoder(
        "Falcon", {
            "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 2, "vocab_size": 65024, "bias": False,
            "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "use_cache": False,
        },
    ),
    "bloom_7b": decoder(
        "Bloom", {"hidden_size": 4096, "n_layer": 2, "n_head": 32, "vocab_size": 250880, "use_cache": False}, 4, 2048,
        dense=False,
    ),
    "opt_6b7": decoder(
        "OPT", {
            "hidden_size": 4096, "word_embed_proj_dim": 4096, "ffn_dim": 16384, "num_attention_heads": 32,
            "num_hidden_layers": 2, "vocab_size": 50272, "use_cache": False,
        }, 4, 2048,
    ),
    "glm4_9b": decoder("Glm4", sizes(4096, 13696, 32, 2, 151552, head_dim=128)),
    "granite_8b": decoder(
        "Granite", sizes(
            4096, 12800, 32, 8, 49155, embedding_multiplier=12.0, attention_multiplier=1 / 128,
            residual_multiplier=0.22, logits_scaling=16.0,
        ),
    ),
    "mamba2_2b7": decoder(
        "Mamba2", {
            "hidden_size": 2560, "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1,
            "num_hidden_layers": 2, "vocab_size": 50288, "use_cache": False,
        }, 2, 1024, family="state space", dense=False,
    ),
    "mixtral_8x7b": experts("Mixtral", sizes(4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3_moe_30b": experts(
        "Qwen3Moe", sizes(
            2048, 6144, 32, 4, 151936, head_dim=128, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
    ),
    "deepseek_v3": experts(
        "DeepseekV3", sizes(
            4096, 11008, 32, 32, 129280, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4,
            n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1, q_lora_rank=1536,
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        ),
    ),
    "gpt_oss_20b": experts(
        "GptOss", sizes(
            2880, 2880, 64, 8, 201088, head_dim=64, num_local_experts=8, num_experts_per_tok=4, layer_types=ALTERNATE,
        ),
    ),
    "qwen3_next": experts(
        "Qwen3Next", sizes(
            2048, 5120, 16, 2, 151936, head_dim=256, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512,
            shared_expert_intermediate_size=512, layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "modernbert_large": encoder("ModernBert", sizes(1024, 2624, 16, 16, 50368, global_attn_every_n_layers=2), 8, 1024),
    "deberta_v3_large": encoder(
        "DebertaV2", sizes(
            1024, 4096, 16, 16, 128100, max_position_embeddings=512, relative_attention=True, position_buckets=256,
            pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True,
        ), dense=False,
    ),
    "bert_large_dropout": encoder("Bert", BERT, dropout=True),
    "bert_large_autocast": encoder("Bert", BERT, autocast=True),
    "t5_large": t5(),
    "t5_large_dropout": t5(dropout=True),
    "t5_v11_large": t5(d_ff=2816, feed_forward_proj="gated-gelu"),
    "whisper_large_v3": Case(
        "encoder and decoder", "WhisperForConditionalGeneration", "WhisperConfig", {
            "d_model": 1280, "encoder_layers": 2, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
            "decoder_layers": 2, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "vocab_size": 51866,
            "num_mel_bins": 128, "use_cache": False,
        }, {"input_features": real(8, 128, 3000), "decoder_input_ids": ids(8, 448)}, layers=4, loss=True,
    ),
    "wav2vec2_large": Case(
        "speech", "Wav2Vec2Model", "Wav2Vec2Config", {
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 2,
            "do_stable_layer_norm": True, "feat_extract_norm": "layer", "apply_spec_augment": False,
        }, {"input_values": real(8, 160000)}, dense=False,
    ),
    "siglip_so400m": vision(
        "SiglipVision", {
            "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 2,
            "image_size": 384, "patch_size": 14,
        }, 16, 384,
    ),
    "dinov2_giant": vision(
        "Dinov2", {
            "hidden_size": 1536, "mlp_ratio": 4, "use_swiglu_ffn": True, "num_attention_heads": 24,
            "num_hidden_layers": 2, "image_size": 518, "patch_size": 14,
        }, 8, 518,
    ),
    "dinov3_vitl": vision(
        "DINOv3ViT", {
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 2,
            "image_size": 512, "patch_size": 16, "num_register_tokens": 4, "pos_embed_rescale": None,
        }, 8, 512,
    ),
    "swin_large": vision(
        "Swin", {
            "embed_dim": 192, "depths": [2, 2, 2, 2], "num_heads": [6, 12, 24, 48], "window_size": 12,
            "image_size": 384,
        }, 32, 384, dense=False, layers=8,
    ),
    "sam_vit_h": vision(
        "SamVision", {
            "hidden_size": 1280, "mlp_dim": 5120, "num_attention_heads": 16, "num_hidden_layers": 2,
            "global_attn_indexes": [1],
        }, 2, 1024,
    ),
    "deit3_large": of_timm("deit3_large_patch16_224", {"depth": 2}, 64, 224),
    "eva02_large": of_timm("eva02_large_patch14_448", {"depth": 2}, 16, 448),
    "mixer_l16": Case(
        "vision", "MlpMixer", "", {"num_blocks": 2, "embed_dim": 1024, "patch_size": 16, "img_size": 224},
        {"x": real(64, 3, 224, 224)}, dense=False, package="timm.models.mlp_mixer",
    ),
    "convnext_large": of_timm("convnext_large", {"depths": (1, 1, 2, 1)}, 64, 224, dense=False, layers=5),
    "flux_1_dev": diffusion(
        "FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True}, {
            "hidden_states": real(1, 4096, 64), "encoder_hidden_states": real(1, 512, 4096),
            "pooled_projections": real(1, 768), "timestep": real(1), "img_ids": real(4096, 3),
            "txt_ids": real(512, 3), "guidance": real(1),
        }, layers=4,
    ),
    "sd35_large": diffusion(
        "SD3Transformer2DModel", {
            "num_layers": 3, "num_attention_heads": 38, "attention_head_dim": 64, "joint_attention_dim": 4096,
            "caption_projection_dim": 2432, "pooled_projection_dim": 2048, "in_channels": 16, "out_channels": 16,
            "sample_size": 128, "patch_size": 2, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
        }, {
            "hidden_states": real(2, 16, 128, 128), "encoder_hidden_states": real(2, 333, 4096),
            "pooled_projections": real(2, 2048), "timestep": real(2),
        }, layers=3,
    ),
    "pixart_1024": diffusion(
        "PixArtTransformer2DModel", {
            "num_layers": 2, "sample_size": 128, "caption_channels": 4096, "use_additional_conditions": False,
        }, {
            "hidden_states": real(2, 4, 128, 128), "encoder_hidden_states": real(2, 300, 4096), "timestep": ids(2),
        }, given={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "wan_1b3": diffusion(
        "WanTransformer3DModel", {
            "num_layers": 2, "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "text_dim": 4096,
            "freq_dim": 256, "in_channels": 16, "out_channels": 16, "cross_attn_norm": True,
        }, {
            "hidden_states": real(1, 16, 9, 60, 60), "encoder_hidden_states": real(1, 512, 4096), "timestep": ids(1),
        },
    ),
    "dit_xl": diffusion(
        "DiTTransformer2DModel", {
            "num_layers": 2, "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8,
            "sample_size": 32,
        }, {"hidden_states": real(32, 4, 32, 32), "timestep": ids(32), "class_labels": ids(32)},
    ),
}  # fmt: skip
