"""Names of factors: what trainers call them, and which module of the inventory they mean."""

import re
from dataclasses import dataclass
from typing import Literal

Side = Literal["A", "B"]
Spelling = Literal["linear", "per_expert_2d", "stacked"]

_PREFIX = "base_model.model."
_SUFFIX = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight", re.ASCII)
_EXPERT = re.compile(r"(?P<bank>.+\.experts)(?:\.(?P<expert>0|[1-9]\d{0,5}))?\.(?P<projection>\w+)", re.ASCII)
_PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "w1": "w1", "w2": "w2", "w3": "w3"}
_ALIASES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

EXPECTED = "base_model.model.<module of the base>.lora_A.weight or .lora_B.weight"


@dataclass(frozen=True)
class FactorName:
    """`module` in the inventory's spelling; `expert` is set for a 2-D factor of a single expert."""

    module: str
    side: Side
    expert: int | None
    spelling: Spelling


def parse_factor_name(name: str) -> FactorName | None:
    """The module a tensor name means, or None when it is not a factor's name.

    After `base_model.model.` comes the module's path, with or without its own leading `model.`.
    """
    suffix = _SUFFIX.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if suffix is None:
        return None
    side: Side = "A" if suffix["side"] == "A" else "B"
    path = f"model.{suffix['path']}" if suffix["path"].startswith("layers.") else suffix["path"]
    expert = _EXPERT.fullmatch(path)
    if expert is None or expert["projection"] not in _PROJECTIONS:
        return FactorName(path, side, None, "linear")
    module = f"{expert['bank']}.{_PROJECTIONS[expert['projection']]}"
    if expert["expert"] is None:
        return FactorName(module, side, None, "stacked")
    return FactorName(module, side, int(expert["expert"]), "per_expert_2d")


def other_half(name: str) -> str:
    """The name of the factor that completes the pair: `….lora_B.weight` for `….lora_A.weight`, and back."""
    stem, _, side = name.removesuffix(".weight").rpartition(".lora_")
    return f"{stem}.lora_{'B' if side == 'A' else 'A'}.weight"


def target_names(module: str) -> set[str]:
    """Every entry of PEFT's `target_modules` that covers a module: the dotted suffixes of its name.

    An expert bank's projection is also covered under its PEFT name and by `experts`.
    """
    bank, _, last = module.rpartition(".")
    spellings = [module]
    if bank.endswith(".experts"):
        spellings += [bank, f"{bank}.{_ALIASES[last]}"]
    parts = [spelling.split(".") for spelling in spellings]
    return {".".join(part[start:]) for part in parts for start in range(len(part))}


def normal_target(target: str) -> str:
    """A `target_modules` entry without PEFT's prefix and without an expert's number."""
    return re.sub(r"(^|\.)experts\.\d+\.", r"\1experts.", target.removeprefix(_PREFIX), flags=re.ASCII)
