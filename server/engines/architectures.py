"""The architectures the torch engine serves: what their layers remember, and which of them must take steps.

An architecture is served once every module of its inventory has been shown to act as merged weights do, alone
and in mixed batches. Others are refused when the base is loaded.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from lanewise.loaders import UnsupportedBase

from .attention import ATTENTION, attention_memory
from .seats import LayerMemory

SERVED = (
    *("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"),
    *("glm_moe_dsa", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
)
_DEPEND_ON_THE_BATCH = ("dynamic", "longrope")  # rotary embeddings that change with the longest row


def check_served(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedBase for a config.json that the torch engine does not run."""
    if config["model_type"] not in SERVED:
        raise UnsupportedBase(
            f"config.json: model_type {config['model_type']!r} is not served by the torch engine; "
            f"expected one of {', '.join(SERVED)}"
        )


def prepare(model: PreTrainedModel) -> list[LayerMemory]:
    """Make a model take steps, in place, and say what each of its layers remembers of a choice.

    Raises UnsupportedBase for what a step cannot compute row by row.
    """
    config = model.config
    if getattr(config, "sliding_window", None) is not None:
        raise UnsupportedBase("config.json: sliding_window is set; the torch engine attends to everything")
    rope = config.rope_parameters["rope_type"]
    if rope in _DEPEND_ON_THE_BATCH:
        raise UnsupportedBase(f"config.json: rope type {rope!r} makes answers depend on others in the batch")
    model.set_attn_implementation(ATTENTION)
    match config.model_type:
        case "deepseek_v3":
            return [_latent_attention(config)] * config.num_hidden_layers
        case "glm_moe_dsa":
            return _prepare_sparse(model)
        case "qwen3_next" | "qwen3_5_moe_text":
            return _prepare_hybrid(model)
        case _:
            return [_attention(config)] * config.num_hidden_layers


def _attention(config: PreTrainedConfig) -> LayerMemory:
    heads: int = config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    return attention_memory(getattr(config, "num_key_value_heads", None) or heads, dim, dim)


def _latent_attention(config: PreTrainedConfig) -> LayerMemory:
    """Keys and values are kept per head, as attention takes them, not as the latent they come from."""
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return attention_memory(config.num_attention_heads, key_dim, config.v_head_dim)


def _prepare_sparse(model: PreTrainedModel) -> list[LayerMemory]:
    from .sparse_attention import index_by_span, indexer_memory

    index_by_span(model)
    attention = _latent_attention(model.config)
    indexed = {**attention, **indexer_memory(model.config.index_head_dim)}
    return [indexed if kind == "full" else attention for kind in model.config.indexer_types]


def _prepare_hybrid(model: PreTrainedModel) -> list[LayerMemory]:
    from .linear_attention import delta_net_memory, recur_by_choice

    recur_by_choice(model)
    linear, full = delta_net_memory(model.config), _attention(model.config)
    return [linear if kind == "linear_attention" else full for kind in model.config.layer_types]
