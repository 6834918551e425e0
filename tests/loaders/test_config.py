from pathlib import Path
from typing import Any

import pytest

from lanewise.loaders import AdapterConfig, AdapterDigest, InvalidAdapter, Inventory, read_adapter


def test_a_plain_config_keeps_what_serving_needs(config: dict[str, Any]) -> None:
    parsed = AdapterConfig.parse(
        config | {"base_model_name_or_path": "tiny", "lora_dropout": 0.1, "bias": "none"}
    )
    assert (parsed.rank, parsed.alpha, parsed.scale, parsed.base_model) == (4, 8.0, 2.0, "tiny")
    assert parsed.target_modules[0] == "q_proj"
    assert parsed.raw["lora_dropout"] == 0.1


def test_a_config_as_peft_saves_it_is_accepted() -> None:
    # Every field that PEFT 0.21 writes for a plain adapter.
    off = ["alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config"]
    off += ["exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform"]
    off += ["lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config", "revision"]
    off += ["target_parameters", "task_type", "trainable_token_indices", "use_bdlora", "velora_config"]
    saved: dict[str, Any] = dict.fromkeys(off) | {
        "alpha_pattern": {},
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "ensure_weight_tying": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "loftq_config": {},
        "lora_alpha": 16,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "megatron_core": "megatron.core",
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 8,
        "rank_pattern": {},
        "target_modules": ["q_proj"],
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    }
    parsed = AdapterConfig.parse(saved)
    assert (parsed.rank, parsed.scale, parsed.base_model) == (8, 2.0, "tiny")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("r", 0),
        ("r", -1),
        ("r", "16"),
        ("r", 16.0),
        ("r", True),
        ("r", None),
        ("lora_alpha", "16"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", float("inf")),
        ("lora_alpha", 0),
        ("lora_alpha", 10**400),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", [3]),
        ("target_modules", ""),
        ("target_modules", "(q_proj"),
        ("target_modules", "(?i)q_proj)|(a"),
        ("target_modules", "a" * 5000),
        ("base_model_name_or_path", 7),
        ("_sglang_lora_format", "sideways"),
        ("use_rslora", "yes"),
        ("alpha_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": float("inf")}),
        ("alpha_pattern", {"q_proj(": 2}),
        ("alpha_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 2.0}),
        ("rank_pattern", {"q_proj": True}),
        ("rank_pattern", {"*": 2}),
        ("rank_pattern", "q_proj"),
        ("peft_version", 20),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", "mlp.experts.down_proj"),
        ("target_parameters", [3]),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2]]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(config: dict[str, Any], field: str, value: object) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        AdapterConfig.parse(config | {field: value})
    assert field in [finding.where for finding in caught.value.findings]


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InvalidAdapter) as caught:
        AdapterConfig.parse({"use_dora": True})
    assert [f.where for f in caught.value.findings] == [
        "use_dora",
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
    ]


@pytest.mark.parametrize("value", [float("nan"), b"bytes", "\ud800"])
def test_a_config_that_is_not_json_is_refused(config: dict[str, Any], value: object) -> None:
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json"):
        AdapterConfig.parse(config | {"note": value})
    with pytest.raises((ValueError, TypeError)):
        AdapterDigest({"note": value})


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'"LORA"',
        b"{",
        b"\xff\xfe",
        b'{"r": NaN}',
        b'{"r": 4, "r": 8}',
        b'{"r": ' + b"9" * 5000 + b"}",
        b'{"a":' * 50_000,
    ],
)
def test_a_config_file_that_is_not_one_json_object_is_refused(
    folder: Path, inventory: Inventory, text: bytes
) -> None:
    (folder / "adapter_config.json").write_bytes(text)
    with pytest.raises(InvalidAdapter, match=r"adapter_config\.json"):
        read_adapter(folder, inventory, max_rank=64)
