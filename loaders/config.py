"""`adapter_config.json`: what PEFT writes, and which of it lanewise can act on.

Source: PEFT's LoraConfig (0.21). A field that changes the maths and that lanewise does not implement is
refused by name when it is switched on, never ignored. Fields about training (dropout, task type, …) change
nothing here.
"""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from .errors import Finding, InvalidAdapter

ALL_LINEAR = "all-linear"
_EXPERT_LAYOUTS = ("per_expert_2d", "stacked", "shared_outer")

# Field → why an adapter that uses it is refused. It is used unless absent, None, False, empty or "none".
_REFUSED = {
    "use_rslora": "rank-stabilised scaling (alpha / sqrt(r)) is not supported yet",
    "alpha_pattern": "an alpha per module is not supported yet",
    "rank_pattern": "a rank per module is not supported yet",
    "use_dora": "DoRA rescales the base's weights, which stay frozen here",
    "bias": "trained biases are not part of the LoRA branch",
    "lora_bias": "a bias on lora_B is not part of the LoRA branch",
    "modules_to_save": "fully trained modules would replace modules of the frozen base",
    "trainable_token_indices": "trained embedding rows would replace rows of the frozen base",
    "target_parameters": "the target_parameters layout of expert factors is not supported yet",
    "fan_in_fan_out": "transposed base weights (Conv1D) are not supported",
    "layer_replication": "replicated layers would change the frozen base",
    "alora_invocation_tokens": "an adapter that starts in mid-prompt (activated LoRA) is not supported",
    "use_qalora": "QALoRA pools activations in groups, which is not supported",
    "use_bdlora": "block-diagonal factors are not supported",
    "arrow_config": "routing between adapters (Arrow) is not supported",
    "kasa_config": "KaSA's singular values are not part of the LoRA branch",
    "monteclora_config": "MonteCLoRA's sampled factors are not supported",
}
# Initialisations that leave the base's weights as they are. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract
# from the base instead, so such factors are wrong beside the original one unless PEFT converted them on save.
_INIT_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
_REGEX = set("\\^$*+?()[]{}|")


@dataclass(frozen=True)
class AdapterConfig:
    """The part of an adapter's config that serving depends on; `raw` is the whole of it.

    `target_modules` are name suffixes as PEFT defines them, or only "all-linear". `layout` is the layout
    that the config claims (SGLang's `_sglang_lora_format`), None when it claims none.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str | None
    layout: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "AdapterConfig":
        """Check a config and keep what serving needs. Raises InvalidAdapter with one finding per field."""
        findings = [*_refused_fields(config), *_bad_values(config)]
        if findings:
            raise InvalidAdapter(findings)
        targets = config["target_modules"]
        return cls(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
            base_model=config.get("base_model_name_or_path"),
            layout=config.get("_sglang_lora_format"),
            raw=dict(config),
        )


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Strict JSON: one object, no duplicate keys, no NaN. Raises InvalidAdapter naming `where`."""
    try:
        value: object = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter([Finding(where, f"is not valid JSON ({error})", "a JSON object")]) from error
    if not isinstance(value, dict):
        raise InvalidAdapter([Finding(where, f"holds a {type(value).__name__}", "a JSON object")])
    return cast(dict[str, Any], value)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json that refuses what json would silently overwrite. Raises ValueError."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"duplicate key {key!r}")
        result[key] = value
    return result


def canonical_json(config: Mapping[str, Any]) -> bytes:
    """One text per config: sorted keys, no spaces, UTF-8. Raises ValueError or TypeError if not JSON."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refused_fields(config: Mapping[str, Any]) -> list[Finding]:
    findings = [
        Finding(name, f"is {reprlib.repr(config[name])}: {reason}", "the field absent or off")
        for name, reason in _REFUSED.items()
        if config.get(name) not in (None, False, "none", {}, [], "")
    ]
    init = config.get("init_lora_weights")
    if init not in _INIT_KEEPS_BASE:
        expected = "factors trained beside the original base, or converted on save"
        findings.append(
            Finding("init_lora_weights", f"is {reprlib.repr(init)}, which alters the base", expected)
        )
    return findings


def _bad_values(config: Mapping[str, Any]) -> list[Finding]:
    findings: list[Finding] = []

    def check(name: str, valid: bool, expected: str) -> None:
        if not valid:
            found = f"is {reprlib.repr(config[name])}" if name in config else "is missing"
            findings.append(Finding(name, found, expected))

    rank, alpha = config.get("r"), config.get("lora_alpha")
    base_model = config.get("base_model_name_or_path")
    check("peft_type", config.get("peft_type") == "LORA", '"LORA"')
    check("r", type(rank) is int and rank > 0, "a positive integer")
    check("lora_alpha", _positive_number(alpha), "a positive finite number")
    check("base_model_name_or_path", base_model is None or isinstance(base_model, str), "a string or null")
    targets_expected = f'a list of module names (no regular expression), or "{ALL_LINEAR}"'
    check("target_modules", _is_targets(config.get("target_modules")), targets_expected)
    known_layout = config.get("_sglang_lora_format") in (None, *_EXPERT_LAYOUTS)
    check("_sglang_lora_format", known_layout, f"one of {', '.join(_EXPERT_LAYOUTS)}")
    try:
        canonical_json(config)
    except (ValueError, TypeError, RecursionError) as error:
        findings.append(Finding("adapter_config.json", f"is not JSON ({error})", "a JSON object"))
    return findings


def _positive_number(value: object) -> bool:
    # The bound keeps an integer of any length convertible to a float.
    return type(value) in (int, float) and 0 < cast(float, value) < 2**63


def _is_targets(value: object) -> bool:
    if value == ALL_LINEAR:
        return True
    if not isinstance(value, list | tuple):
        return (
            False  # PEFT reads another string as a regular expression; matching a hostile one may never end
        )
    names = cast(list[object], value)
    return bool(names) and all(isinstance(name, str) and name and not _REGEX & set(name) for name in names)
