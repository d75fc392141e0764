"""Tiny models with random weights for every module of mlx-lm whose cache is advanced.

`FAMILIES` maps a module name under `mlx_lm.models` to a config that its `ModelArgs.from_dict`
accepts, in every mlx-lm version that has the module (0.31.3 and 0.32.2 were tried). Each config has
at least three layers backed by an `ArraysCache` and, where the family has attention, at least one
attention layer. `build` returns the model; a second call returns a fresh, equal one. The weights
are the same in both of those versions, the outputs need not be.

Modules come and go between versions: `build` raises ModuleNotFoundError for one that the installed
mlx-lm does not have.
"""

import copy
import importlib

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

# Every family starts from these: `from_dict` drops the keys that its ModelArgs does not have. State
# and head sizes of the recurrent layers are 32, the least that the Metal kernels of mlx-lm take.
_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 2048,
    "model_max_length": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    # Mixture of experts.
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 2,
    "topk_group": 1,
    # Multi-head latent attention.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Gated delta nets.
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    # State space layers and short convolutions.
    "mamba_n_heads": 2,
    "mamba_num_heads": 2,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_state": 32,
    "ssm_state_size": 32,
    "mamba_d_conv": 4,
    "conv_kernel": 4,
    "conv_L_cache": 3,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
    "use_conv_bias": True,
}

_KIMI = {
    **_BASE,
    "num_key_value_heads": 2,
    "linear_attn_config": {
        # Counted from 1. The 3rd layer is attention.
        "kda_layers": [1, 2, 4],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}

_LFM2 = {
    **_BASE,
    "conv_bias": False,
    "block_dim": 32,
    "block_ff_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": [2],
}

_QWEN3_5_MOE = {
    **_BASE,
    # The 4th layer is attention.
    "full_attention_interval": 4,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}

_QWEN3_5 = {**_QWEN3_5_MOE, "num_experts": 0}

FAMILIES: dict[str, dict] = {
    "bailing_hybrid": {
        **_BASE,
        # The 4th layer is attention.
        "layer_group_size": 4,
        "group_norm_size": 2,
    },
    "bailing_moe_v3": {**_BASE, "layer_group_size": 4, "head_dim": 32},
    # Each layer has both an SSM and an attention.
    "falcon_h1": {
        **_BASE,
        "mamba_d_ssm": 64,
    },
    "gear": {
        **_BASE,
        "num_hidden_layers": 5,
        "layer_types": [
            "conv_mixer",
            "sliding_attention",
            "conv_mixer",
            "full_attention",
            "conv_mixer",
        ],
        "sliding_window": 16,
    },
    "granitemoehybrid": {
        **_BASE,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
    },
    "kimi_k3": {"text_config": {**_KIMI, "mla_use_output_gate": True, "attn_res_block_size": 2}},
    "kimi_linear": _KIMI,
    "lfm2": _LFM2,
    "lfm2-vl": {"text_config": {**_LFM2, "model_type": "lfm2"}},
    "lfm2_moe": {**_LFM2, "use_expert_bias": True, "num_dense_layers": 1},
    # It has no attention.
    "mamba2": {
        **_BASE,
        "num_heads": 2,
        "head_dim": 32,
        "state_size": 32,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    # The "-" (MLP) and "E" (MoE) blocks have no cache.
    "nemotron_h": {
        **_BASE,
        "num_hidden_layers": 6,
        "hybrid_override_pattern": ["M", "-", "M", "*", "E", "M"],
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    "olmo_hybrid": {**_BASE, "linear_allow_neg_eigval": True},
    "plamo2": {
        **_BASE,
        # The 3rd layer is attention.
        "mamba_step": 4,
        "hidden_size_per_head": 32,
    },
    # One packed layer, 128 wide because the packs need that.
    "prism_hadamard_qwen35": {
        "text_config": {**_QWEN3_5, "intermediate_size": 128},
        "schema_version": 2,
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
        ],
    },
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": _QWEN3_5_MOE},
    "qwen3_next": {
        **_BASE,
        # The 4th layer is attention.
        "full_attention_interval": 4,
        "mlp_only_layers": [0],
    },
}

# Most ModelArgs require the name.
for _name, _config in FAMILIES.items():
    FAMILIES[_name] = {"model_type": _name, **_config}

IMPOSSIBLE: dict[str, str] = {}


def build(name: str) -> nn.Module:
    """The tiny model of one family, with the same weights at every call."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    # A copy, because some ModelArgs edit the config they are given.
    config = copy.deepcopy(FAMILIES[name])
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Two changes, so that logits vary with the input. Matrices that start as zeros (MoE gates,
    # packed weights) get small random values. Depthwise convolutions get values near 1: some mlx
    # versions make them so small that the recurrent layers add next to nothing.
    changed = []
    for path, value in tree_flatten(model.parameters()):
        if value.ndim == 3 and value.shape[-1] == 1:
            noise = mx.random.normal(value.shape)
        elif value.ndim < 2 or mx.any(value != 0).item():
            continue
        # Packed 2-bit codes.
        elif value.dtype == mx.uint32:
            noise = mx.random.randint(0, 2**31 - 1, value.shape)
        else:
            noise = 0.1 * mx.random.normal(value.shape)
        changed.append((path, noise.astype(value.dtype)))
    model.update(tree_unflatten(changed))
    model.eval()
    mx.eval(model.parameters())
    return model
