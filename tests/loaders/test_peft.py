"""Converted adapters in the installed PEFT, and the same logits from its model and from the active path."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lanewise.kernels.attach import attach
from lanewise.loaders import Inventory, convert, read_adapter, write_adapter

PREFIX = "base_model.model."
# PEFT looks for a pattern's matches among modules only, and says so of each one that is for a parameter.
PEFT_REMARKS = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",
    "ignore::FutureWarning:transformers",  # what PEFT calls there
)
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35]])


@pytest.fixture(scope="module")
def model_config() -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }


@pytest.fixture
def make_model(model_config: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(**model_config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    return make


@pytest.fixture
def source(tmp_path: Path, model_config: dict[str, Any]) -> Path:
    """A shared_outer adapter of every attention and expert module, large enough to change all logits."""
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, module in Inventory.from_config(model_config).modules.items():
        if name == "lm_head":
            continue
        lead_a = () if module.experts is None else (1 if module.outer("A") else 4,)
        lead_b = () if module.experts is None else (1 if module.outer("B") else 4,)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(*lead_a, 4, module.in_features) * 0.2
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(*lead_b, module.out_features, 4) * 0.2
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "experts"],
        "rank_pattern": {},
        "alpha_pattern": {"v_proj": 4},
    }
    write_adapter(tmp_path / "source", tensors, config)
    return tmp_path / "source"


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, model(TOKENS).logits)


def active_path(model: nn.Module, folder: Path, inventory: Inventory) -> Tensor:
    """Logits with the adapter beside the base."""
    pool = attach(model, slots=1, max_rank=8, expert_layout="stacked")
    pool.write(0, read_adapter(folder, inventory, max_rank=8).pairs())
    with pool.using(torch.zeros(TOKENS.numel(), dtype=torch.long)):
        return logits(model)


@pytest.mark.parametrize("to", ["per_expert_2d", "stacked", "shared_outer", "target_parameters"])
def test_every_layout_gives_the_same_logits(
    source: Path, make_model: Callable[[], nn.Module], model_config: dict[str, Any], tmp_path: Path, to: Any
) -> None:
    inventory = Inventory.from_config(model_config)
    expected = active_path(make_model(), source, inventory)
    assert (expected - logits(make_model())).abs().max() > 0.1
    convert(read_adapter(source, inventory, max_rank=8), tmp_path / "out", to)
    found = active_path(make_model(), tmp_path / "out", inventory)
    if to == "target_parameters":  # other sums: twice the rank, half of it zeros
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@PEFT_REMARKS
@pytest.mark.parametrize("to", ["per_expert_2d", "target_parameters"])
@pytest.mark.parametrize("fold_scale", [False, True])
def test_peft_loads_what_was_converted_and_computes_the_same(
    source: Path,
    make_model: Callable[[], nn.Module],
    model_config: dict[str, Any],
    tmp_path: Path,
    to: Any,
    fold_scale: bool,
) -> None:
    from peft import PeftModel

    inventory = Inventory.from_config(model_config)
    convert(read_adapter(source, inventory, max_rank=8), tmp_path / "out", to, fold_scale=fold_scale)
    base = make_model()
    model = PeftModel.from_pretrained(cast(Any, base), str(tmp_path / "out"))
    expected = active_path(make_model(), source, inventory)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


@PEFT_REMARKS
def test_what_peft_saves_is_read(
    make_model: Callable[[], nn.Module], model_config: dict[str, Any], tmp_path: Path
) -> None:
    """PEFT's own files, target_parameters and patterns included."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=r".*\.(q_proj|v_proj|lm_head)",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={r".*\.1\.self_attn\.q_proj": 6, r"experts\.down_proj": 2},
        alpha_pattern={"v_proj": 3},
        use_rslora=False,
        init_lora_weights=False,
    )
    torch.manual_seed(2)
    peft = get_peft_model(cast(Any, make_model()), config).eval()
    expected = logits(peft)
    peft.save_pretrained(str(tmp_path / "saved"))
    inventory = Inventory.from_config(model_config)
    adapter = read_adapter(tmp_path / "saved", inventory, max_rank=8)
    assert adapter.layout == "target_parameters"
    found = active_path(make_model(), tmp_path / "saved", inventory)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert saved["rank_pattern"]


FIXTURES = sorted(path.parent for path in Path(__file__).parent.glob("peft_fixtures/*/deltas.safetensors"))


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_files_of_five_peft_releases_are_read_as_each_meant_them(folder: Path) -> None:
    """`peft_fixtures/make.py` ran under each release; the deltas beside the files are its own."""
    from safetensors.torch import load_file

    sizes: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_size": 12,
        "moe_intermediate_size": 5,
        "num_experts": 3,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 20,
        "max_position_embeddings": 16,
    }
    adapter = read_adapter(folder, Inventory.from_config(sizes), max_rank=8)
    deltas = load_file(folder / "deltas.safetensors")
    experts = "model.layers.0.mlp.experts"
    gate, up = deltas.pop(f"{experts}.gate_up_proj").tensor_split(2, dim=1)
    expected = deltas | {f"{experts}.w1": gate, f"{experts}.w3": up}
    expected[f"{experts}.w2"] = expected.pop(f"{experts}.down_proj")
    found = {name: scale * b @ a for name, a, b, scale in adapter.pairs()}
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        torch.testing.assert_close(found[name], delta, rtol=1e-5, atol=1e-6)


def test_there_is_a_file_of_each_convention() -> None:
    assert [folder.name for folder in FIXTURES] == ["0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.21.2"]
