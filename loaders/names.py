"""Names of factors: what trainers call them, and which module of the inventory they mean."""

import re
from dataclasses import dataclass
from typing import Literal

Side = Literal["A", "B"]
Spelling = Literal["linear", "per_expert_2d", "shared_2d", "stacked", "in_first", "target_parameters"]

_PREFIX = "base_model.model."
# `lora_embedding_…` is how XoRL and PEFT call factors of lm_head; PEFT's have no `.weight`.
_SUFFIX = re.compile(r"(?P<path>.+)\.(lora_(?P<side>[AB])\.weight|lora_embedding_(?P<head>[AB])(\.weight)?)")
# XoRL's own parameters of an expert bank, [E, in, r] and [E, r, out]: `….experts.gate_proj_lora_A`.
_IN_FIRST = re.compile(r"(?P<path>.+\.experts\.\w+?)_lora_(?P<side>[AB])(\.weight)?", re.ASCII)
# Before the layers: an inner model, and the text half of a model that also sees images.
_MODEL = re.compile(r"(?:(?:model|language_model)\.){0,3}(?=layers\.|embed_tokens\b|lm_head\b|norm\b)")
_EXPERT = re.compile(
    r"(?P<bank>.+\.experts)(?:\.(?P<expert>0|[1-9]\d{0,5}|shared))?\.(?P<projection>\w+)", re.ASCII
)
_BANK = re.compile(r"(?P<bank>.+\.experts)(?P<inner>\.base_layer)?", re.ASCII)
_PROJECTIONS = {
    "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "gate_up_proj": "w13",
    "w1": "w1", "w2": "w2", "w3": "w3",
}  # fmt: skip
PEFT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "w13": "gate_up_proj"}

FUSED = {
    "w13": ("w1", "w3"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Modules that some trainers and engines keep as one: they share A, and their rows of B follow each other."""

EXPECTED = "base_model.model.<module of the base>.lora_A.weight or .lora_B.weight"


@dataclass(frozen=True)
class FactorName:
    """What a tensor name says.

    `path` is the module as the trainer called it. `module` is the same in the inventory's spelling, or the
    name of a fused module, or with target_parameters of a bank, ending in `.base_layer` for the inner one.
    `expert` is set for a 2-D factor of a single expert.
    """

    path: str
    module: str
    side: Side
    expert: int | None
    spelling: Spelling

    @property
    def key(self) -> tuple[str, Side, int | None, bool]:
        """Equal for two names of one factor."""
        return self.module, self.side, self.expert, self.spelling == "shared_2d"


def parse_factor_name(name: str) -> FactorName | None:
    """The module a tensor name means, or None when it is not a factor's name.

    After `base_model.model.` comes the module's path, with or without its own leading `model.` and with or
    without `language_model.`.
    """
    internal = _IN_FIRST.fullmatch(name.removeprefix(_PREFIX))
    found = internal or (_SUFFIX.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None)
    if found is None:
        return None
    side: Side = "A" if "A" in (found["side"], None if internal else found["head"]) else "B"
    stored = found["path"]
    path = normal_path(stored)
    if not internal and found["head"] and path not in ("lm_head", "model.embed_tokens"):
        return None
    bank = _BANK.fullmatch(path)
    if bank is not None and not internal:
        return FactorName(stored, path, side, None, "target_parameters")
    expert = _EXPERT.fullmatch(path)
    if expert is None or expert["projection"] not in _PROJECTIONS:
        return FactorName(stored, path, side, None, "linear")
    module = f"{expert['bank']}.{_PROJECTIONS[expert['projection']]}"
    if internal is not None:
        return FactorName(stored, module, side, None, "in_first") if expert["expert"] is None else None
    if expert["expert"] is None:
        return FactorName(stored, module, side, None, "stacked")
    if expert["expert"] == "shared":
        return FactorName(stored, module, side, None, "shared_2d")
    return FactorName(stored, module, side, int(expert["expert"]), "per_expert_2d")


def normal_path(path: str) -> str:
    """A module's path as transformers' text model has it: `model.layers.…`, `lm_head`."""
    rest = _MODEL.sub("", path, count=1) if _MODEL.match(path) else path
    rest = rest.replace(".block_sparse_moe.", ".mlp.", 1)  # Mixtral's before transformers 5
    return rest if rest == "lm_head" or not _MODEL.match(rest) else f"model.{rest}"


def other_half(name: str) -> str:
    """The name of the factor that completes the pair: `….lora_B.weight` for `….lora_A.weight`, and back."""
    stem, marker, side = re.split(r"(lora_(?:embedding_)?)(?=[AB](?:\.weight)?$)", name)
    return f"{stem}{marker}{'B' if side[0] == 'A' else 'A'}{side[1:]}"


def spellings(module: str) -> list[str]:
    """The paths that target_modules may mean a module by: its name, and for an expert bank's projection
    also the bank and PEFT's name for the projection.
    """
    bank, _, last = module.rpartition(".")
    if not bank.endswith(".experts"):
        return [module]
    return [module, bank, f"{bank}.{PEFT_NAMES[last]}"]


def target_names(paths: list[str]) -> set[str]:
    """Every entry of PEFT's `target_modules` that covers one of these paths: their dotted suffixes."""
    parts = [path.split(".") for path in paths]
    return {".".join(part[start:]) for part in parts for start in range(len(part))}


def normal_target(target: str) -> str:
    """A `target_modules` entry without PEFT's prefix and without an expert's number."""
    return re.sub(
        r"(^|\.)experts\.(?:\d+|shared)\.", r"\1experts.", target.removeprefix(_PREFIX), flags=re.ASCII
    )
