"""Configs and random weights of the tiny bases, one function per architecture, named as real checkpoints are.

What is block FP8 in the real ones is block FP8 here. Dimensions are small, yet unequal wherever confusing two
of them would be a bug, and multiples of 128 wherever block-FP8 GPU kernels read them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lanewise.kernels.fp8 import quantize_blocks

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS, TOP_K = 128, 4, 2, 64, 128, 16, 4
LATENT, ROPE_DIM, NOPE_DIM, VALUE_DIM, INDEX_HEADS, INDEX_DIM = 128, 64, 64, 96, 16, 128  # GLM's
KEY_HEADS, VALUE_HEADS, STATE_DIM, CONV = 2, 4, 64, 4  # Qwen3.5's delta-net

Config = dict[str, Any]


class Weights:
    """A checkpoint's tensors as they are made, from one stream of random numbers."""

    def __init__(self, seed: int, fp8: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._fp8 = fp8

    def normal(self, name: str, *shape: int, std: float) -> Tensor:
        self.tensors[name] = (torch.randn(shape, generator=self._random) * std).bfloat16()
        return self.tensors[name]

    def constant(self, name: str, size: int, value: float) -> None:
        self.tensors[name] = torch.full((size,), value, dtype=torch.bfloat16)

    def ones(self, name: str, size: int) -> None:
        self.constant(name, size, 1)

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Outputs have `gain` times the inputs' size."""
        if not self._fp8:
            self.normal(f"{name}.weight", rows, columns, std=gain / columns**0.5)
            return
        dense = torch.randn(rows, columns, generator=self._random) * (gain / columns**0.5)
        self.tensors[f"{name}.weight"], self.tensors[f"{name}.weight_scale_inv"] = quantize_blocks(dense)

    def mlp(self, name: str, inner: int) -> None:
        self.linear(f"{name}.gate_proj", inner, HIDDEN)
        self.linear(f"{name}.up_proj", inner, HIDDEN)
        self.linear(f"{name}.down_proj", HIDDEN, inner, gain=2.0)

    def experts(self, mlp: str) -> None:
        """A router and its experts."""
        self.normal(f"{mlp}.gate.weight", EXPERTS, HIDDEN, std=1 / HIDDEN**0.5)
        for expert in range(EXPERTS):
            self.mlp(f"{mlp}.experts.{expert}", INNER)

    def attention(self, name: str, query_rows: int = HEADS * HEAD_DIM, gain: float = 2.0) -> None:
        self.linear(f"{name}.q_proj", query_rows, HIDDEN)
        self.linear(f"{name}.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        self.linear(f"{name}.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        self.linear(f"{name}.o_proj", HIDDEN, HEADS * HEAD_DIM, gain)

    def norms(self, layer: str, value: float = 1) -> None:
        self.constant(f"{layer}.input_layernorm.weight", HIDDEN, value)
        self.constant(f"{layer}.post_attention_layernorm.weight", HIDDEN, value)


_COMMON: Config = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 2 * INNER,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_ROUTED: Config = {"moe_intermediate_size": INNER, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}

_HYBRID: Config = {
    **_COMMON,
    **_ROUTED,
    "num_hidden_layers": 4,
    "num_experts": EXPERTS,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 2 * INNER,
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": STATE_DIM,
    "linear_value_head_dim": STATE_DIM,
    "linear_conv_kernel_dim": CONV,
}
_AFTER_DENSE: Config = {
    **_COMMON,
    **_ROUTED,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_LATENT: Config = {
    **_AFTER_DENSE,
    "num_key_value_heads": HEADS,
    "q_lora_rank": LATENT,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": VALUE_DIM,
}


def llama(weights: Weights, layer: str, index: int) -> None:
    weights.norms(layer)
    weights.attention(f"{layer}.self_attn")
    weights.mlp(f"{layer}.mlp", 2 * INNER)


def qwen2(weights: Weights, layer: str, index: int) -> None:
    llama(weights, layer, index)
    _query_key_value_biases(weights, layer)


def qwen3(weights: Weights, layer: str, index: int) -> None:
    llama(weights, layer, index)
    _query_key_norms(weights, layer, 1)


def qwen3_moe(weights: Weights, layer: str, index: int) -> None:
    weights.norms(layer)
    weights.attention(f"{layer}.self_attn")
    _query_key_norms(weights, layer, 1)
    weights.experts(f"{layer}.mlp")


def mixtral(weights: Weights, layer: str, index: int) -> None:
    weights.norms(layer)
    weights.attention(f"{layer}.self_attn")
    moe = f"{layer}.block_sparse_moe"
    weights.normal(f"{moe}.gate.weight", EXPERTS, HIDDEN, std=1 / HIDDEN**0.5)
    for expert in range(EXPERTS):
        weights.linear(f"{moe}.experts.{expert}.w1", INNER, HIDDEN)
        weights.linear(f"{moe}.experts.{expert}.w2", HIDDEN, INNER, gain=2.0)
        weights.linear(f"{moe}.experts.{expert}.w3", INNER, HIDDEN)


def qwen3_5_moe(weights: Weights, layer: str, index: int) -> None:
    """Three layers of linear attention, one of full attention whose queries bring a gate. Norms are 1 + w."""
    keys, values, heads = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM, VALUE_HEADS
    if index % 4 != 3:
        delta_net = f"{layer}.linear_attn"
        weights.linear(f"{delta_net}.in_proj_qkv", 2 * keys + values, HIDDEN)
        weights.linear(f"{delta_net}.in_proj_z", values, HIDDEN)
        weights.normal(f"{delta_net}.in_proj_b.weight", heads, HIDDEN, std=1 / HIDDEN**0.5)
        weights.normal(f"{delta_net}.in_proj_a.weight", heads, HIDDEN, std=1 / HIDDEN**0.5)
    _hybrid(weights, layer, index)


def qwen3_next(weights: Weights, layer: str, index: int) -> None:
    """The same with merged projections."""
    keys, values, heads = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM, VALUE_HEADS
    if index % 4 != 3:
        weights.linear(f"{layer}.linear_attn.in_proj_qkvz", 2 * keys + 2 * values, HIDDEN)
        weights.normal(f"{layer}.linear_attn.in_proj_ba.weight", 2 * heads, HIDDEN, std=1 / HIDDEN**0.5)
    _hybrid(weights, layer, index)


def _hybrid(weights: Weights, layer: str, index: int) -> None:
    """All of the layer but what the delta-net reads from the hidden state."""
    weights.norms(layer, 0)
    if index % 4 == 3:
        weights.attention(f"{layer}.self_attn", query_rows=2 * HEADS * HEAD_DIM, gain=4.0)
        _query_key_norms(weights, layer, 0)
    else:
        _delta_net(weights, f"{layer}.linear_attn")
    weights.experts(f"{layer}.mlp")
    weights.mlp(f"{layer}.mlp.shared_expert", 2 * INNER)
    weights.normal(f"{layer}.mlp.shared_expert_gate.weight", 1, HIDDEN, std=1 / HIDDEN**0.5)


def glm4_moe(weights: Weights, layer: str, index: int) -> None:
    weights.norms(layer)
    weights.attention(f"{layer}.self_attn")
    _query_key_value_biases(weights, layer)
    _query_key_norms(weights, layer, 1)
    _dense_then_experts(weights, f"{layer}.mlp", index)


def deepseek_v3(weights: Weights, layer: str, index: int) -> None:
    weights.norms(layer)
    _latent_attention(weights, f"{layer}.self_attn")
    _dense_then_experts(weights, f"{layer}.mlp", index)


def glm_moe_dsa(weights: Weights, layer: str, index: int) -> None:
    """DeepSeek-V3's layers under an indexer, which every second layer has."""
    deepseek_v3(weights, layer, index)
    if index % 2:
        return
    indexer = f"{layer}.self_attn.indexer"
    weights.linear(f"{indexer}.wq_b", INDEX_HEADS * INDEX_DIM, LATENT)
    weights.linear(f"{indexer}.wk", INDEX_DIM, HIDDEN)
    weights.ones(f"{indexer}.k_norm.weight", INDEX_DIM)
    weights.constant(f"{indexer}.k_norm.bias", INDEX_DIM, 0)
    weights.normal(f"{indexer}.weights_proj.weight", INDEX_HEADS, HIDDEN, std=1 / HIDDEN**0.5)


def _latent_attention(weights: Weights, name: str) -> None:
    weights.linear(f"{name}.q_a_proj", LATENT, HIDDEN)
    weights.ones(f"{name}.q_a_layernorm.weight", LATENT)
    weights.linear(f"{name}.q_b_proj", HEADS * (NOPE_DIM + ROPE_DIM), LATENT)
    weights.linear(f"{name}.kv_a_proj_with_mqa", LATENT + ROPE_DIM, HIDDEN)
    weights.ones(f"{name}.kv_a_layernorm.weight", LATENT)
    weights.linear(f"{name}.kv_b_proj", HEADS * (NOPE_DIM + VALUE_DIM), LATENT)
    weights.linear(f"{name}.o_proj", HIDDEN, HEADS * VALUE_DIM, gain=2.0)


def _dense_then_experts(weights: Weights, name: str, index: int) -> None:
    """The first layer's MLP is dense; later ones have experts, one of them for every token."""
    if index == 0:
        weights.mlp(name, 2 * INNER)
        return
    weights.experts(name)
    bias = weights.normal(f"{name}.gate.e_score_correction_bias", EXPERTS, std=0.1)
    weights.tensors[f"{name}.gate.e_score_correction_bias"] = bias.float()
    weights.mlp(f"{name}.shared_experts", INNER)


def _query_key_value_biases(weights: Weights, layer: str) -> None:
    for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
        weights.normal(f"{layer}.self_attn.{name}.bias", heads * HEAD_DIM, std=0.2)


def _query_key_norms(weights: Weights, layer: str, value: float) -> None:
    for name in ("q_norm", "k_norm"):
        weights.constant(f"{layer}.self_attn.{name}.weight", HEAD_DIM, value)


def _delta_net(weights: Weights, name: str) -> None:
    keys, values = KEY_HEADS * STATE_DIM, VALUE_HEADS * STATE_DIM
    weights.normal(f"{name}.conv1d.weight", 2 * keys + values, 1, CONV, std=1 / CONV**0.5)
    weights.tensors[f"{name}.A_log"] = torch.linspace(-4, 0, VALUE_HEADS)  # from long memory to short
    weights.constant(f"{name}.dt_bias", VALUE_HEADS, 1)
    weights.ones(f"{name}.norm.weight", STATE_DIM)
    weights.linear(f"{name}.out_proj", HIDDEN, values, gain=2.0)


Layer = Callable[[Weights, str, int], None]

LAYERS: dict[str, Layer] = {
    layer.__name__: layer
    for layer in (
        *(llama, qwen2, qwen3, mixtral, qwen3_moe, glm4_moe, deepseek_v3, glm_moe_dsa),
        *(qwen3_next, qwen3_5_moe),
    )
}
"""By architecture, what adds one decoder layer's weights: (weights, the layer's name, its number)."""

CONFIGS: dict[str, Config] = {
    "llama": _COMMON | {"architectures": ["LlamaForCausalLM"]},
    "qwen2": _COMMON | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": _COMMON | {"architectures": ["Qwen3ForCausalLM"]},
    "mixtral": _COMMON
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "intermediate_size": INNER,
        "sliding_window": None,
    },
    "qwen3_moe": _COMMON
    | _ROUTED
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "qwen3_next": _HYBRID | {"architectures": ["Qwen3NextForCausalLM"], "partial_rotary_factor": 0.25},
    "qwen3_5_moe": _HYBRID
    | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "glm4_moe": _AFTER_DENSE
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": _LATENT | {"architectures": ["DeepseekV3ForCausalLM"]},
    "glm_moe_dsa": _LATENT
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 4,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 32,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    },
}
"""By architecture, the fields of config.json that say what its layers are."""
