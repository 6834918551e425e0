"""A tiny FP8 mixture-of-experts base made from a seed, in Hugging Face's layout, to try things on.

It speaks noise: random printable bytes, chosen decisively and depending on the whole prompt. What an adapter
has learnt therefore shows at once. Dimensions are multiples of 128 so that block-FP8 GPU kernels take it too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lanewise.kernels.fp8 import BLOCK, quantize_blocks

END_OF_TEXT, PAD, IM_START, IM_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

VOCABULARY = 320  # 256 bytes, four special tokens, and unused ids up to a multiple of 64
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 128, 4, 2, 64, 128

PRINTABLE = "".join(chr(c) for c in range(0x20, 0x7F))


def write_tiny_base(folder: Path, seed: int = 0, layers: int = 3, experts: int = 16, top_k: int = 4) -> Path:
    """Write config, tokenizer and weights (a few MB) into `folder` and return it. Same seed, same bytes.

    Weights are Qwen3-MoE's: block-FP8 linears and experts with `weight_scale_inv`, the rest bf16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = _config(tokenizer, layers, experts, top_k)
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation | {"do_sample": False})
    save_file(_weights(config, tokenizer, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, no merges, ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token=IM_END,
        pad_token=PAD,
        additional_special_tokens=[END_OF_TEXT, IM_START],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _config(tokenizer: PreTrainedTokenizerFast, layers: int, experts: int, top_k: int) -> dict[str, Any]:
    unquantized = ["lm_head", "model.embed_tokens", "model.norm"]
    for layer in range(layers):
        unquantized += [
            f"model.layers.{layer}.{name}"
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
                "mlp.gate",
            )
        ]
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "intermediate_size": 2 * INNER,
        "moe_intermediate_size": INNER,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(IM_END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": unquantized,
        },
    }


def _weights(config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}

    def normal(name: str, rows: int, columns: int, std: float) -> Tensor:
        weights[name] = (torch.randn(rows, columns, generator=random) * std).bfloat16()
        return weights[name]

    def fp8(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Outputs have `gain` times the inputs' size."""
        dense = torch.randn(rows, columns, generator=random) * (gain / columns**0.5)
        weights[f"{name}.weight"], weights[f"{name}.weight_scale_inv"] = quantize_blocks(dense)

    def ones(name: str, size: int) -> None:
        weights[name] = torch.ones(size, dtype=torch.bfloat16)

    normal("model.embed_tokens.weight", VOCABULARY, HIDDEN, std=1.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        ones(f"{at}.input_layernorm.weight", HIDDEN)
        fp8(f"{at}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN)
        fp8(f"{at}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        fp8(f"{at}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        fp8(f"{at}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, gain=2.0)
        ones(f"{at}.self_attn.q_norm.weight", HEAD_DIM)
        ones(f"{at}.self_attn.k_norm.weight", HEAD_DIM)
        ones(f"{at}.post_attention_layernorm.weight", HIDDEN)
        normal(f"{at}.mlp.gate.weight", config["num_experts"], HIDDEN, std=1 / HIDDEN**0.5)
        for expert in range(config["num_experts"]):
            fp8(f"{at}.mlp.experts.{expert}.gate_proj", INNER, HIDDEN)
            fp8(f"{at}.mlp.experts.{expert}.up_proj", INNER, HIDDEN)
            fp8(f"{at}.mlp.experts.{expert}.down_proj", HIDDEN, INNER, gain=2.0)
    ones("model.norm.weight", HIDDEN)
    # The answer is mostly printable: other tokens' rows are short, unused ids' rows are zero.
    head = normal("lm_head.weight", VOCABULARY, HIDDEN, std=0.5)
    spoken = set(tokenizer.encode(PRINTABLE + IM_END))
    for token in range(VOCABULARY):
        if token >= len(tokenizer):
            head[token] = 0
        elif token not in spoken:
            head[token] /= 4
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
