"""What an adapter folder holds and what is wrong with it, all in one report; nothing is raised.

The header and the config tell everything but the values, so a file of any size is described at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .adapter import WEIGHTS, added_tokens, check_values, read_config
from .config import AdapterConfig
from .errors import Finding, InvalidAdapter, UnsafeFile
from .fit import Fit, fit
from .inventory import Inventory, Layout, Module
from .names import FUSED, FactorName, parse_factor_name
from .tensor_file import TensorEntry, TensorFile


@dataclass(frozen=True)
class Region:
    """A part of the model: how many of its modules are adapted, by how many numbers, in how many bytes."""

    modules: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """An adapter as far as it can be understood; what cannot is None, 0 or empty and in `problems`.

    `warnings` are what is odd but does no harm. `scale` says the rule and what it gives.
    """

    layout: Layout | None
    rank: int | None
    scale: str | None
    dtypes: Mapping[str, int]
    regions: Mapping[str, Region]
    factors: int
    parameters_per_rank: int
    nbytes: int
    values_read: bool
    problems: tuple[Finding, ...]
    warnings: tuple[Finding, ...]

    @property
    def modules(self) -> int:
        return sum(region.modules for region in self.regions.values())

    @property
    def parameters(self) -> int:
        return sum(region.parameters for region in self.regions.values())


def inspect_adapter(folder: Path, inventory: Inventory | None, *, values_up_to: int | None) -> Inspection:
    """Describe an adapter folder and check it against a base, or without one against itself only.

    Values are read, for NaN and zeros, when the file has at most `values_up_to` bytes; None: always.
    """
    problems: list[Finding] = []
    warnings: list[Finding] = []
    tensors: TensorFile | None = None
    config: AdapterConfig | None = None
    try:
        raw = read_config(folder)
        config, found = AdapterConfig.read(raw)
        problems += found
        if inventory is not None:
            problems += added_tokens(folder, inventory)
    except (InvalidAdapter, UnsafeFile) as error:
        problems += findings_of(error)
    try:
        if (folder / WEIGHTS).exists():
            tensors = TensorFile(folder / WEIGHTS)
    except UnsafeFile as error:
        problems += findings_of(error)
    if tensors is None or config is None:
        return Inspection(None, None, None, {}, {}, 0, 0, 0, False, tuple(problems), ())
    fitted = Fit("linear", (), ())
    try:
        base = inventory or inventory_of(tensors.entries.values(), config)
        fitted = fit(tensors.entries, config, base)
    except InvalidAdapter as error:
        problems += error.findings
    problems += fitted.findings
    # Only factors have values that can be checked; other dtypes are among the problems already.
    read_values = not problems and (values_up_to is None or tensors.size <= values_up_to)
    if read_values:
        wrong, warnings = check_values(tensors)
        problems += wrong
    return Inspection(
        layout=fitted.layout,
        rank=max((pair.rank for pair in fitted.pairs), default=config.rank),
        scale=_scale_rule(config, {pair.scale for pair in fitted.pairs}),
        dtypes=dict(Counter(entry.dtype for entry in fitted.entries)),
        regions=_regions(fitted),
        factors=len(fitted.entries),
        parameters_per_rank=_per_rank(fitted),
        nbytes=sum(entry.nbytes for entry in fitted.entries),
        values_read=read_values,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


def findings_of(error: InvalidAdapter | UnsafeFile) -> tuple[Finding, ...]:
    if isinstance(error, InvalidAdapter):
        return error.findings
    where, _, problem = str(error).partition(": ")
    found, _, expected = problem.partition("; expected ")
    return (Finding(where, found, expected),)


def own_inventory(folder: Path) -> Inventory:
    """`inventory_of` an adapter folder. Raises UnsafeFile or InvalidAdapter."""
    config = AdapterConfig.parse(read_config(folder))
    return inventory_of(TensorFile(folder / WEIGHTS).entries.values(), config)


def inventory_of(entries: Iterable[TensorEntry], config: AdapterConfig) -> Inventory:
    """The modules that an adapter of an unknown base says there are, with the sizes of its own tensors."""
    sizes: dict[str, _Sizes] = {}
    for entry in entries:
        name = parse_factor_name(entry.name)
        if name is not None and len(entry.shape) in (2, 3):
            for module, parts in _modules(name, config):
                sizes.setdefault(module, _Sizes()).learn(entry, name, config, parts)
    modules = {name: size.module(name) for name, size in sizes.items()}
    return Inventory("unknown", 0, 0, 0, False, modules)


@dataclass
class _Sizes:
    experts: int = 0
    in_features: int = 0
    out_features: int = 0

    def learn(self, entry: TensorEntry, name: FactorName, config: AdapterConfig, parts: int) -> None:
        """Take in one tensor; `parts` modules share the outputs of a B."""
        side, shape = name.side, entry.shape
        if name.spelling == "target_parameters":
            rank = config.rank_of(f"{name.path.removesuffix('.base_layer')}.{_parameter(name, config)}")
            folded, size = shape if side == "A" else shape[::-1]
            self.experts = max(folded // rank, 1)
            if config.has_old_parameter_roles:
                side = "B" if side == "A" else "A"
        else:
            rank = config.rank_of(name.path)
            first, last = shape[-2:]
            in_first = len(shape) == 3 and (last, first)[side == "B"] == rank != (first, last)[side == "B"]
            size = last if (side == "A") != in_first else first
            if ".experts." in name.module:
                here = shape[0] if len(shape) == 3 else (name.expert or 0) + 1
                self.experts = max(self.experts, here)
        if side == "A":
            self.in_features = size
        else:
            self.out_features = size // parts

    def module(self, name: str) -> Module:
        kind = "expert" if self.experts else "linear"
        sizes = max(self.in_features, 1), max(self.out_features, 1)
        return Module(name, kind, *sizes, self.experts or None, _region(name))


def _modules(name: FactorName, config: AdapterConfig) -> list[tuple[str, int]]:
    """The modules a factor adapts, each with how many of them share it."""
    path = name.module
    if name.spelling == "target_parameters":
        unit = "w2" if _parameter(name, config) == "down_proj" else "w13"
        path = f"{path.removesuffix('.base_layer')}.{unit}"
    prefix, _, last = path.rpartition(".")
    if last not in FUSED:
        return [(path, 1)]
    return [(f"{prefix}.{part}", len(FUSED[last])) for part in FUSED[last]]


def _parameter(name: FactorName, config: AdapterConfig) -> str:
    """PEFT wraps gate_up_proj first, so it is the inner one, unless it is the only one."""
    only = {target.rpartition(".")[2] for target in config.target_parameters}
    return "gate_up_proj" if name.module.endswith(".base_layer") or only == {"gate_up_proj"} else "down_proj"


def _region(name: str) -> str:
    marks = {
        ".experts.": "routed_experts",
        ".shared_expert": "shared_experts",
        "lm_head": "lm_head",
        ".linear_attn.": "linear_attention",
        "attn.": "attention",
        ".mlp.": "dense_mlp",
    }
    return next((region for mark, region in marks.items() if mark in name), "other")


def _regions(fitted: Fit) -> dict[str, Region]:
    """By region; a tensor that several modules share is counted with the first."""
    counted: set[str] = set()
    regions: dict[str, Region] = {}
    for pair in fitted.pairs:
        entries = {entry.name: entry for half in (pair.a, pair.b) for entry in half.entries}
        new = [entry for name, entry in entries.items() if name not in counted]
        counted.update(entries)
        old = regions.get(pair.module.region, Region(0, 0, 0))
        regions[pair.module.region] = Region(
            old.modules + 1,
            old.parameters + sum(math.prod(entry.shape) for entry in new),
            old.nbytes + sum(entry.nbytes for entry in new),
        )
    return regions


def _per_rank(fitted: Fit) -> int:
    ranks = {e.name: pair.rank for pair in fitted.pairs for half in (pair.a, pair.b) for e in half.entries}
    return sum(math.prod(entry.shape) // ranks[entry.name] for entry in fitted.entries)


def _scale_rule(config: AdapterConfig, scales: set[float]) -> str:
    rule = "alpha / √r" if config.use_rslora else "alpha / r"
    root = "√" if config.use_rslora else ""
    if scales <= {config.scale}:
        return f"{rule} = {config.alpha:g} / {root}{config.rank} = {config.scale:g}"
    return f"{rule} by patterns: {len(scales)} scales from {min(scales):g} to {max(scales):g}"
