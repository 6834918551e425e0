"""`adapter_config.json`: what PEFT writes, and which of it lanewise can act on.

Source: PEFT's LoraConfig (0.21). A field that changes the maths and that lanewise does not implement is
refused by name when it is switched on, never ignored. Fields about training (dropout, task type, …) change
nothing here.
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from .errors import Finding, InvalidAdapter
from .patterns import Patterns

ALL_LINEAR = "all-linear"
_EXPERT_LAYOUTS = ("per_expert_2d", "stacked", "shared_outer", "target_parameters")

# Field → why an adapter that uses it is refused. It is used unless absent, None, False, empty or "none".
_REFUSED = {
    "use_dora": "DoRA rescales the base's weights, which stay frozen here",
    "bias": "trained biases are not part of the LoRA branch",
    "lora_bias": "a bias on lora_B is not part of the LoRA branch",
    "modules_to_save": "fully trained modules would replace modules of the frozen base",
    "trainable_token_indices": "trained embedding rows would replace rows of the frozen base",
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
_MAX_PATTERNS = 10_000
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?P<dev>\.dev)?", re.ASCII)


@dataclass(frozen=True)
class AdapterConfig:
    """The part of an adapter's config that serving depends on; `raw` is the whole of it.

    `target_modules` are name suffixes as PEFT defines them, or only "all-linear"; a string that is a regular
    expression is in `target_regex` instead. `target_parameters` name banks of experts that are one parameter.
    `layout` is the layout that the config claims (SGLang's `_sglang_lora_format`), None when it claims none.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str | None
    layout: str | None = None
    target_regex: str | None = None
    target_parameters: tuple[str, ...] = ()
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    peft_version: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @property
    def scale(self) -> float:
        """Of the modules that no pattern mentions: alpha / r, or with rsLoRA alpha / √r."""
        return _scale(self.alpha, self.rank, self.use_rslora)

    @property
    def has_old_parameter_roles(self) -> bool | None:
        """Whether PEFT up to 0.19.0 wrote it, which has A and B of target_parameters the other way round.

        None when the config does not say, or names a development version from around the change.
        """
        version = _VERSION.match(self.peft_version or "")
        if version is None:
            return None
        number = tuple(int(part) for part in version.groups()[:3])
        if version["dev"] and (0, 19, 1) <= number <= (0, 20, 0):
            return None
        return number < (0, 19, 1)

    def rank_of(self, path: str) -> int:
        """The rank of one module by its path in the trained model, as PEFT decides it.

        Raises InvalidAdapter when matching `rank_pattern` takes too long.
        """
        key = self._rank_keys.first_match(path)
        return self.rank if key is None else self.rank_pattern[key]

    def scale_of(self, path: str) -> float:
        """The scale of one module by its path. Raises InvalidAdapter when matching takes too long."""
        key = self._alpha_keys.first_match(path)
        alpha = self.alpha if key is None else self.alpha_pattern[key]
        return _scale(alpha, self.rank_of(path), self.use_rslora)

    def targets(self, path: str) -> bool:
        """Does the regular expression in `target_modules` match a module's whole path?"""
        assert self.target_regex is not None
        return self._target.first_match(path) is not None

    def _broken_patterns(self) -> list[Finding]:
        findings: list[Finding] = []
        for field_name in ("_rank_keys", "_alpha_keys", "_target"):
            try:
                getattr(self, field_name)
            except InvalidAdapter as error:
                findings.extend(error.findings)
        return findings

    @cached_property
    def _rank_keys(self) -> Patterns:
        return Patterns("rank_pattern", self.rank_pattern)

    @cached_property
    def _alpha_keys(self) -> Patterns:
        return Patterns("alpha_pattern", self.alpha_pattern)

    @cached_property
    def _target(self) -> Patterns:
        return Patterns("target_modules", [self.target_regex or ""], whole=True)

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "AdapterConfig":
        """Check a config and keep what serving needs. Raises InvalidAdapter with one finding per field."""
        parsed, findings = cls.read(config)
        if findings:
            raise InvalidAdapter(findings)
        assert parsed is not None
        return parsed

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> tuple["AdapterConfig | None", list[Finding]]:
        """`parse` for a full report: what is wrong, and the config if the factors can still be checked."""
        refused, bad = _refused_fields(config), _bad_values(config)
        if bad:
            return None, refused + bad
        targets = config.get("target_modules") or []
        pattern: str | None = targets if isinstance(targets, str) and targets != ALL_LINEAR else None
        names = cast(list[str], [targets] if isinstance(targets, str) else targets)
        parsed = cls(
            rank=config["r"],
            alpha=float(config["lora_alpha"]),
            target_modules=() if pattern else tuple(names),
            base_model=config.get("base_model_name_or_path"),
            layout=config.get("_sglang_lora_format"),
            target_regex=pattern,
            target_parameters=tuple(config.get("target_parameters") or ()),
            use_rslora=config.get("use_rslora") or False,
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
            peft_version=config.get("peft_version"),
            raw=dict(config),
        )
        return parsed, refused + parsed._broken_patterns()


def _scale(alpha: float, rank: int, use_rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if use_rslora else rank)


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
    check("r", _is_rank(rank), "a positive integer")
    check("lora_alpha", _positive_number(alpha), "a positive finite number")
    check("base_model_name_or_path", base_model is None or isinstance(base_model, str), "a string or null")
    targets, parameters = config.get("target_modules"), config.get("target_parameters")
    names_expected = f'a list of module names, a regular expression, or "{ALL_LINEAR}"'
    has_targets = (isinstance(targets, str) or _is_names(targets)) and bool(targets)
    # PEFT takes an adapter of parameters alone.
    check("target_modules", has_targets or bool(not targets and parameters), names_expected)
    check("target_parameters", parameters is None or _is_names(parameters), "a list of parameter names")
    check("use_rslora", config.get("use_rslora") in (None, False, True), "true or false")
    check("peft_version", isinstance(config.get("peft_version", ""), str | None), "a string")
    for name, valid, expected in (
        ("rank_pattern", _is_rank, "positive integers"),
        ("alpha_pattern", _positive_number, "positive finite numbers"),
    ):
        pattern = config.get(name) or {}
        fits = isinstance(pattern, dict) and len(cast(dict[str, object], pattern)) <= _MAX_PATTERNS
        fits = fits and all(map(valid, cast(dict[str, object], pattern).values()))
        check(name, fits, f"regular expressions (at most {_MAX_PATTERNS}) with {expected}")
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


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_names(value: object) -> bool:
    if not isinstance(value, list | tuple):
        return False
    names = cast(list[object], value)
    return all(isinstance(name, str) and name for name in names)
