"""A tiny base made from a seed, in Hugging Face's layout, to try things on. By default an FP8 MoE.

It speaks noise: random printable bytes, chosen decisively and depending on the whole prompt. What an adapter
has learnt therefore shows at once.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lanewise.kernels.fp8 import BLOCK

from .tiny_layers import CONFIGS, HIDDEN, LAYERS, Weights

END_OF_TEXT, PAD, IM_START, IM_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

VOCABULARY = 320  # 256 bytes, four special tokens, and unused ids up to a multiple of 64

PRINTABLE = "".join(chr(c) for c in range(0x20, 0x7F))

Architecture = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "glm_moe_dsa",
    "qwen3_next",
    "qwen3_5_moe",
]
_PLAIN = ("llama", "qwen2", "mixtral", "glm4_moe")  # whose makers publish no block FP8
_COMPOSITE = ("qwen3_5_moe",)  # config.json and tensor names of a text model inside a larger one
_NORMS_ADD_ONE = ("qwen3_next", "qwen3_5_moe")  # their norms scale by 1 + w


def write_tiny_base(folder: Path, architecture: Architecture = "qwen3_moe", seed: int = 0) -> Path:
    """Write config, tokenizer and weights (a few MB) into `folder` and return it. Same seed, same bytes.

    Weights are as real checkpoints have them: linears and experts in block FP8 with `weight_scale_inv`, the
    rest bf16; or all bf16. Qwen3.5's are named as beside a vision tower, which is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    weights = _weights(architecture, tokenizer, seed)
    config = _config(architecture, tokenizer, weights)
    _write_json(folder / "config.json", config)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    _write_json(folder / "generation_config.json", ends | {"do_sample": False})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
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


def _weights(architecture: Architecture, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Tensor]:
    weights = Weights(seed, fp8=architecture not in _PLAIN)
    model = "model.language_model" if architecture in _COMPOSITE else "model"
    weights.normal(f"{model}.embed_tokens.weight", VOCABULARY, HIDDEN, std=1.0)
    for index in range(CONFIGS[architecture]["num_hidden_layers"]):
        LAYERS[architecture](weights, f"{model}.layers.{index}", index)
    weights.constant(
        f"{model}.norm.weight", HIDDEN, 0 if architecture in ("qwen3_next", "qwen3_5_moe") else 1
    )
    # The answer is mostly printable: other tokens' rows are short, unused ids' rows are zero.
    head = weights.normal("lm_head.weight", VOCABULARY, HIDDEN, std=0.5)
    spoken = set(tokenizer.encode(PRINTABLE + IM_END))
    for token in range(VOCABULARY):
        if token >= len(tokenizer):
            head[token] = 0
        elif token not in spoken:
            head[token] /= 4
    return weights.tensors


def _config(
    architecture: Architecture, tokenizer: PreTrainedTokenizerFast, weights: dict[str, Tensor]
) -> dict[str, Any]:
    config = {
        "model_type": architecture,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "bfloat16",
        **CONFIGS[architecture],
    }
    if architecture in _COMPOSITE:
        outside = {key: config.pop(key) for key in ("architectures", "model_type", "tie_word_embeddings")}
        config = {**outside, "text_config": {"model_type": f"{architecture}_text", **config}}
    if architecture not in _PLAIN:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [
                name.removesuffix(".weight")
                for name, tensor in weights.items()
                if name.endswith(".weight") and tensor.dtype != torch.float8_e4m3fn
            ],
        }
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
