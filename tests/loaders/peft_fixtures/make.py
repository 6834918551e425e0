"""Makes one fixture: a tiny adapter as the PEFT that runs this saves it, and the deltas that it computes.

    pip install --no-deps --target old peft==0.18.1
    PYTHONPATH=old python tests/loaders/peft_fixtures/make.py

writes a folder named after the release beside this file.
"""

from pathlib import Path
from typing import Any, cast

import peft
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 12,
    "intermediate_size": 16,
    "moe_intermediate_size": 5,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 20,
    "max_position_embeddings": 16,
}


def main() -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES), dtype=torch.float32)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={r"experts\.down_proj": 2},
        alpha_pattern={"v_proj": 3},
        init_lora_weights=False,
    )
    model = get_peft_model(cast(Any, base), config)
    folder = Path(__file__).parent / peft.__version__
    model.save_pretrained(str(folder))
    (folder / "README.md").unlink(missing_ok=True)
    deltas: dict[str, torch.Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            path = name.removeprefix("base_model.model.").replace(".base_layer", "")
            parameter = getattr(layer, "parameter_name", None)
            delta = cast(Any, layer).get_delta_weight("default").detach()
            deltas[path if parameter is None else f"{path}.{parameter}"] = delta
    save_file(deltas, folder / "deltas.safetensors")


if __name__ == "__main__":
    main()
