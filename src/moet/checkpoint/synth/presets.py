"""config.json of the models that people ask about, by name. Data only.

Numbers come from the models' own config files (weights are not at hand; geometry is). A preset
whose experts are published in another format than MXFP4 is written with MXFP4 experts: the sizes
are the model's, the format is the one that is computed here.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# compressed-tensors: routed experts MXFP4, activations untouched, all else plain.
PACKED_MXFP4: Config = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
            "format": "mxfp4-pack-quantized",
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.gate$", "re:.*shared_expert.*"],
}

_YARN_16 = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}

_DEEPSEEK_V4: Config = {
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": _YARN_16,
    "sliding_window": 128,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "dtype": "bfloat16",
}

_FP8_E8M0: Config = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
}

DEEPSEEK_V4_FLASH: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    **_DEEPSEEK_V4,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_hidden_layers": 43,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, *([4, 128] * 21)][:43],
    "quantization_config": {**_FP8_E8M0, "weight_block_size": [128, 128]},
}

DEEPSEEK_V41_FLASH: Config = {
    "architectures": ["DeepseekV41ForConditionalGeneration"],
    "model_type": "deepseek_v41",
    "text_config": {
        **_DEEPSEEK_V4,
        "model_type": "deepseek_v41_text",
        "hidden_size": 5120,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_hidden_layers": 40,
    },
    "quantization_config": {**_FP8_E8M0, "weight_block_size": [32, 32], "expert_dtype": "fp4"},
}

GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 199998,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}

QWEN3_30B_A3B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
    "quantization_config": PACKED_MXFP4,
}

# Geometry only: what follows is written as routers and experts (see `bare`).

GLM_5_2: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_act": "silu",
    "hidden_size": 6144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "vocab_size": 154880,
    "quantization_config": PACKED_MXFP4,
}

KIMI_K2_7: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "hidden_act": "silu",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "vocab_size": 163840,
    },
    "quantization_config": PACKED_MXFP4,
}

GLM_4_5_AIR: Config = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "vocab_size": 151552,
    "quantization_config": PACKED_MXFP4,
}

OLMOE_1B_7B: Config = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "vocab_size": 50304,
    "quantization_config": PACKED_MXFP4,
}

PRESETS: dict[str, Config] = {
    "deepseek-v4.1-flash": DEEPSEEK_V41_FLASH,
    "deepseek-v4-flash": DEEPSEEK_V4_FLASH,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": {
        **GPT_OSS_20B,
        "num_local_experts": 128,
        "num_hidden_layers": 36,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "glm-5.2": GLM_5_2,
    "glm-4.5-air": GLM_4_5_AIR,
    "kimi-k2.7": KIMI_K2_7,
    "olmoe-1b-7b": OLMOE_1B_7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}

PUBLISHED: dict[str, str] = {
    "glm-5.2": "NVFP4",
    "glm-4.5-air": "BF16",
    "kimi-k2.7": "INT4",
    "olmoe-1b-7b": "BF16",
    "qwen3-30b-a3b": "BF16",
}
"""How the experts of a preset are published, where that is not MXFP4."""
