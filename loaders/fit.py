"""Does every tensor of an adapter fit the base? Decided from names, dtypes and shapes; no weight is read.

Steps, each adding to one list of findings: match names, settle the layout, check dtypes and shapes, complete
the pairs, compare with the config's targets. An adapter may cover any part of the inventory, but a factor
never comes without its other half, nor a 2-D expert factor without those of the other experts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .config import ALL_LINEAR, AdapterConfig
from .errors import Finding
from .inventory import Inventory, Layout, Module
from .names import (
    EXPECTED,
    FUSED,
    FactorName,
    Side,
    normal_target,
    other_half,
    parse_factor_name,
    spellings,
    target_names,
)
from .parameters import BankShape, bank_shapes
from .tensor_file import FLOAT_DTYPES, TensorEntry

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Stored:
    """Where the values of one canonical factor are and how to read them, in this order.

    One tensor, or those of all experts to stack; `per_expert_axes` of target_parameters are taken apart;
    the last two axes are swapped if `swapped`; of B, only `rows` if it is part of a fused module's.
    """

    entries: tuple[TensorEntry, ...]
    form: str  # "whole", "stack", "expert_major" [E·r, n] or "expert_fastest" [n, r·E]
    swapped: bool = False
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Pair:
    """The factors of one module, its rank, and its scale by the config's rules."""

    module: Module
    a: Stored
    b: Stored
    rank: int
    scale: float


@dataclass(frozen=True)
class Fit:
    """What an adapter holds, as far as it fits; its pairs are in the inventory's order.

    With findings, pairs may be missing. `findings` are in file order, the config's last.
    """

    layout: Layout
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...]

    @property
    def entries(self) -> list[TensorEntry]:
        """Every stored tensor of the pairs once, also where modules share it."""
        stored = (half for pair in self.pairs for half in (pair.a, pair.b))
        return list({entry.name: entry for half in stored for entry in half.entries}.values())


@dataclass(frozen=True)
class _Unit:
    """What one pair of stored factors adapts: a module, or several that are stored as one."""

    module: Module  # of a fused one: with the outputs of all parts
    parts: tuple[Module, ...]


@dataclass(frozen=True)
class _Factor:
    entry: TensorEntry
    name: FactorName
    unit: _Unit
    side: Side  # in the canonical pair; PEFT up to 0.19.0 has target_parameters the other way round
    path: str  # of the module, as rank_pattern and alpha_pattern see it
    rank: int
    swapped: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def outer(self) -> bool:
        return self.unit.module.outer(self.side)


def fit(entries: Mapping[str, TensorEntry], config: AdapterConfig, inventory: Inventory) -> Fit:
    """The layout of an adapter and its pairs. `entries` are in file order.

    Raises InvalidAdapter only when a pattern of the config takes too long to match.
    """
    findings: list[Finding] = []
    factors = _match(entries.values(), config, inventory, findings)
    factors = _of_one_spelling(factors, findings)
    layout = _layout(factors, config, findings)
    factors = _out_first(factors, layout)
    for factor in factors:
        findings.extend(_check_shape(factor, layout))
    pairs = list(_pairs(factors, layout, config, inventory, findings))
    _check_targets(factors, entries, config, findings)
    _check_parameters(factors, entries, config, findings)
    order = {name: number for number, name in enumerate(entries)}
    findings.sort(key=lambda finding: order.get(finding.where, len(order)))
    return Fit(layout, tuple(pairs), tuple(findings))


def _match(
    entries: Iterable[TensorEntry], config: AdapterConfig, inventory: Inventory, findings: list[Finding]
) -> list[_Factor]:
    """Find each tensor's module. Findings: unknown names and modules, doubles, impossible experts."""
    named: dict[tuple[str, Side, int | None, bool], tuple[TensorEntry, FactorName]] = {}
    for entry in entries:
        name = parse_factor_name(entry.name)
        if name is None:
            findings.append(_not_a_factor(entry.name))
        elif name.key in named:
            problem = f"is the same factor as {named[name.key][0].name}"
            findings.append(Finding(entry.name, problem, "each factor once"))
        else:
            named[name.key] = entry, name
    if not named and not findings:
        findings.append(
            Finding("adapter_model.safetensors", "holds no tensors", "at least one pair of factors")
        )
    banks = [(entry, name) for entry, name in named.values() if name.spelling == "target_parameters"]
    parameters = _parameters(banks, config, inventory, findings)
    factors: list[_Factor] = []
    for entry, name in named.values():
        if name.spelling == "target_parameters":
            if entry.name in parameters:
                factors.append(parameters[entry.name])
            continue
        unit = _unit(name.module, inventory)
        if unit is None:
            findings.append(_no_module(entry.name, name.module, inventory))
        elif name.expert is not None and name.expert >= (unit.module.experts or 0):
            expected = f"experts 0 to {(unit.module.experts or 0) - 1}"
            findings.append(Finding(entry.name, f"the base has no expert {name.expert}", expected))
        else:
            rank = config.rank_of(name.path)
            swapped = name.spelling == "in_first"
            factors.append(_Factor(entry, name, unit, name.side, name.path, rank, swapped))
    return factors


def _unit(path: str, inventory: Inventory) -> _Unit | None:
    module = inventory.modules.get(path)
    if module is not None:
        return _Unit(module, (module,))
    prefix, _, last = path.rpartition(".")
    parts = [inventory.modules.get(f"{prefix}.{part}") for part in FUSED.get(last, ())]
    known = tuple(part for part in parts if part is not None)
    if not known or len(known) < len(parts):
        return None
    outputs = sum(part.out_features for part in known)
    return _Unit(replace(known[0], name=path, out_features=outputs), known)


def _not_a_factor(name: str) -> Finding:
    if ".lora_magnitude_vector" in name:
        return Finding(name, "is not a factor's name: DoRA's magnitudes", "plain LoRA factors")
    if name.endswith(("embed_tokens.weight", "lm_head.weight", ".bias", ".modules_to_save.weight")):
        problem = "is not a factor's name: it would replace a weight of the frozen base"
        return Finding(name, problem, EXPECTED)
    return Finding(name, "is not a factor's name", EXPECTED)


def _no_module(name: str, module: str, inventory: Inventory) -> Finding:
    problem = f"the base ({inventory.architecture}) has no module {module} to adapt"
    if module == "lm_head" and inventory.tied_head:
        problem += ": its lm_head is tied to the embedding, and an adapter would have to change both"
    elif module == "model.embed_tokens":
        problem += ": the embedding stays frozen"
    return Finding(name, problem, "a module of the base's inventory")


def _parameters(
    banks: Sequence[tuple[TensorEntry, FactorName]],
    config: AdapterConfig,
    inventory: Inventory,
    findings: list[Finding],
) -> dict[str, _Factor]:
    """The factors that PEFT stores by parameter of a bank, by tensor name: whose, and in which role."""
    by_bank: dict[str, dict[Side, tuple[TensorEntry, FactorName]]] = {}
    for entry, name in banks:
        by_bank.setdefault(name.module, {})[name.side] = entry, name
    candidates: dict[str, list[BankShape]] = {}
    for path, sides in by_bank.items():
        bank = path.removesuffix(".base_layer")
        fused, down = _unit(f"{bank}.w13", inventory), _unit(f"{bank}.w2", inventory)
        stored = next(iter(sides.values()))[1].path.removesuffix(".base_layer")
        if fused is None or down is None:
            findings += [_no_module(entry.name, bank, inventory) for entry, _ in sides.values()]
            continue
        ranks = config.rank_of(f"{stored}.gate_up_proj"), config.rank_of(f"{stored}.down_proj")
        shapes = bank_shapes(fused.module, down.module, *ranks)
        fitting = [shape for shape in shapes if all(shape.fits(s, e.shape) for s, (e, _) in sides.items())]
        candidates[path] = fitting
        if not fitting:
            findings += _misfits(sides, shapes, f"{bank}.base_layer" in by_bank)
    convention = _convention(candidates, config)
    factors: dict[str, _Factor] = {}
    owners: dict[str, str] = {}
    for path, fitting in candidates.items():
        fitting = [shape for shape in fitting if convention in (None, shape.swapped)] or fitting[:0]
        if len(fitting) != 1:
            if candidates[path]:
                expected = "peft_version in adapter_config.json, which decides it, or another layout"
                problem = "could be stored as PEFT up to 0.19.0 does or as later ones: its sizes fit both"
                findings += [Finding(e.name, problem, expected) for e, _ in by_bank[path].values()]
            continue
        (shape,) = fitting
        bank = path.removesuffix(".base_layer")
        unit = _unit(f"{bank}.{'w2' if shape.parameter == 'down_proj' else 'w13'}", inventory)
        assert unit is not None
        if owners.setdefault(unit.module.name, path) != path:
            problem = f"has the sizes of {shape.parameter}, as {owners[unit.module.name]} does"
            findings += [Finding(e.name, problem, "each parameter once") for e, _ in by_bank[path].values()]
            continue
        for side, (entry, name) in by_bank[path].items():
            canonical: Side = side if not shape.swapped else ("B" if side == "A" else "A")
            full = f"{name.path.removesuffix('.base_layer')}.{shape.parameter}"
            factors[entry.name] = _Factor(entry, name, unit, canonical, full, shape.rank, shape.swapped)
    return factors


def _misfits(
    sides: Mapping[Side, tuple[TensorEntry, FactorName]], shapes: Sequence[BankShape], nested: bool
) -> Iterator[Finding]:
    """The halves that fit no parameter; if each fits one, but not the same one, both."""
    halves = list(sides.items())
    alone = [half for half in halves if not any(s.fits(half[0], half[1][0].shape) for s in shapes)]
    for side, (entry, name) in alone or halves:
        inner = name.module.endswith(".base_layer")
        likely = [s for s in shapes if not nested or (s.parameter == "gate_up_proj") == inner]
        expected = " or ".join(f"{list(s.shape(side))} for {s.parameter}" for s in likely)
        yield Finding(entry.name, f"has shape {list(entry.shape)}", f"{expected} as target_parameters")


def _convention(candidates: Mapping[str, Sequence[BankShape]], config: AdapterConfig) -> bool | None:
    """Whether A and B have swapped roles, as PEFT up to 0.19.0 has them; None when every size tells.

    One release wrote the file, so one bank whose sizes tell decides for all; else the config's version does.
    """
    told = {fitting[0].swapped for fitting in candidates.values() if len(fitting) == 1}
    if len(told) == 1:
        return told.pop()
    if told or all(len(fitting) < 2 for fitting in candidates.values()):
        return None
    return config.has_old_parameter_roles


def _of_one_spelling(factors: list[_Factor], findings: list[Finding]) -> list[_Factor]:
    """Drop expert factors that are not stored as the first one is, with a finding for each."""
    found = [_dimensions(factor) for factor in factors if factor.unit.module.kind == "expert"]
    kept: list[_Factor] = []
    for factor in factors:
        if factor.unit.module.kind == "linear" or _dimensions(factor) == found[0]:
            kept.append(factor)
        else:
            problem = f"is {_dimensions(factor)} among {found[0]} expert factors"
            findings.append(Finding(factor.entry.name, problem, "one layout for all experts"))
    return kept


def _dimensions(factor: _Factor) -> str:
    """XoRL's hybrid has one 2-D factor on the shared side and one per expert on the other."""
    return "per_expert_2d" if factor.name.spelling == "shared_2d" else factor.name.spelling


def _layout(factors: list[_Factor], config: AdapterConfig, findings: list[Finding]) -> Layout:
    """How the expert factors are stored: by what they look like, which the config must not contradict."""
    banks = [factor for factor in factors if factor.unit.module.kind == "expert"]
    if not banks:
        return "linear"
    possible = _possible_layouts(banks)
    if config.layout is None:
        return possible[0]
    for layout in possible:
        if layout == config.layout:
            return layout
    problem = f"is {config.layout!r}, but the expert factors are {possible[0]}"
    findings.append(Finding("_sglang_lora_format", problem, f"{possible[0]!r} or no claim"))
    return possible[0]


def _possible_layouts(banks: list[_Factor]) -> list[Layout]:
    """The layouts that the expert factors may have, likeliest first; shapes that fit none are found later."""
    spelling = banks[0].name.spelling
    if spelling == "target_parameters":
        return ["target_parameters"]
    if spelling in ("per_expert_2d", "shared_2d"):
        hybrid = any(factor.name.spelling == "shared_2d" for factor in banks)
        return ["shared_outer" if hybrid else "per_expert_2d"]
    shared = [factor.shape[:1] == (1,) for factor in banks if factor.outer]
    if banks[0].unit.module.experts == 1:
        return ["stacked", "shared_outer"]
    if all(shared):
        return ["shared_outer"]
    if not any(shared):
        return ["stacked"]
    return ["shared_outer", "stacked"]


def _out_first(factors: list[_Factor], layout: Layout) -> list[_Factor]:
    """Mark 3-D expert factors as in-first if that is what every one of them is, and not all are out-first.

    One transposed factor among others is a mistake; a whole file of them is a trainer's own order.
    """
    banks = [f for f in factors if f.name.spelling == "stacked" and f.unit.module.kind == "expert"]
    in_first = [replace(factor, swapped=True) for factor in banks]
    fits_swapped = all(factor.shape == _expected_shape(factor, layout) for factor in in_first)
    if not banks or not fits_swapped or all(f.shape == _expected_shape(f, layout) for f in banks):
        return factors
    swapped = {factor.entry.name: factor for factor in in_first}
    return [swapped.get(factor.entry.name, factor) for factor in factors]


def _check_shape(factor: _Factor, layout: Layout) -> Iterator[Finding]:
    entry, name = factor.entry, factor.unit.module.name
    if entry.dtype not in FLOAT_DTYPES:
        yield Finding(entry.name, f"has dtype {entry.dtype}", f"one of {', '.join(FLOAT_DTYPES)}")
    shared = factor.name.spelling == "shared_2d"
    hybrid = layout == "shared_outer" and _dimensions(factor) == "per_expert_2d"
    if hybrid and shared != factor.outer:
        problem = f"is {'shared' if shared else 'of one expert'}"
        other = "….experts.shared.…" if factor.outer else "one per expert"
        yield Finding(entry.name, problem, f"{other}, as shared_outer keeps {name}")
    expected, found = _expected_shape(factor, layout), factor.shape
    if found == expected or factor.name.spelling == "target_parameters":
        return
    rank_axis = len(expected) - (2 if (factor.side == "A") != factor.swapped else 1)
    if found == (*expected[:-2], expected[-1], expected[-2]):
        problem = f"has shape {list(found)}, transposed or A and B swapped"
    elif len(found) == len(expected) and found == (
        *expected[:rank_axis],
        found[rank_axis],
        *expected[rank_axis + 1 :],
    ):
        problem = f"has rank {found[rank_axis]} (shape {list(found)}) where the config's r is {factor.rank}"
    else:
        problem = f"has shape {list(found)}"
    yield Finding(entry.name, problem, f"{list(expected)} for {name} as {layout}")


def _expected_shape(factor: _Factor, layout: Layout) -> tuple[int, ...]:
    module = factor.unit.module
    a_side = factor.side == "A"
    pair = (factor.rank, module.in_features) if a_side else (module.out_features, factor.rank)
    if factor.swapped:
        pair = pair[::-1]
    if module.experts is None or _dimensions(factor) == "per_expert_2d":
        return pair
    return (1 if layout == "shared_outer" and factor.outer else module.experts, *pair)


def _pairs(
    factors: list[_Factor],
    layout: Layout,
    config: AdapterConfig,
    inventory: Inventory,
    findings: list[Finding],
) -> Iterator[Pair]:
    """The pair of each module, in the inventory's order. Findings: what keeps factors from making pairs."""
    groups: dict[str, list[_Factor]] = {}
    for factor in factors:
        groups.setdefault(factor.unit.module.name, []).append(factor)
    pairs: dict[str, Pair] = {}
    owners: dict[str, str] = {}
    for group in groups.values():
        whole = _complete(group, layout, findings)
        scale = _one_scale(group, config, findings)
        row = 0
        for part in group[0].unit.parts:
            if part.name in owners:
                problem = f"adapts {part.name}, as {owners[part.name]} does"
                findings.append(Finding(group[0].entry.name, problem, "each module once"))
            owners[part.name] = group[0].entry.name
            if whole:
                rows = (row, row + part.out_features) if len(group[0].unit.parts) > 1 else None
                a, b = _stored(group, "A"), _stored(group, "B")
                pairs[part.name] = Pair(part, a, replace(b, rows=rows), group[0].rank, scale)
            row += part.out_features
    return (pairs[name] for name in inventory.modules if name in pairs)


def _stored(group: list[_Factor], side: Side) -> Stored:
    ordered = sorted((f for f in group if f.side == side), key=lambda factor: factor.name.expert or 0)
    first, entries = ordered[0], tuple(factor.entry for factor in ordered)
    if first.name.spelling == "target_parameters":
        form = "expert_major" if first.name.side == "A" else "expert_fastest"
    else:
        form = "stack" if _dimensions(first) == "per_expert_2d" else "whole"
    return Stored(entries, form, first.swapped)


def _complete(group: list[_Factor], layout: Layout, findings: list[Finding]) -> bool:
    """Both halves, every expert, one dtype and one rank?"""
    before = len(findings)
    first, module = group[0], group[0].unit.module
    per_expert = _dimensions(first) == "per_expert_2d"
    present = {(factor.side, factor.name.expert) for factor in group}
    sides = {factor.side for factor in group}
    # With experts.shared on one side, the other half of an expert's factor has another name.
    hybrid = per_expert and layout == "shared_outer"
    for factor in group:
        other: Side = "B" if factor.side == "A" else "A"
        if (other not in sides) if hybrid else ((other, factor.name.expert) not in present):
            name = other_half(factor.entry.name)
            findings.append(Finding(name, "is missing", f"the other half of {factor.entry.name}"))
        if factor.entry.dtype != first.entry.dtype:
            problem = f"has dtype {factor.entry.dtype}, {first.entry.name} has {first.entry.dtype}"
            findings.append(Finding(factor.entry.name, problem, "one dtype for all factors of a module"))
        if factor.rank != first.rank:
            problem = f"has rank {factor.rank} by rank_pattern, {first.entry.name} has {first.rank}"
            findings.append(Finding(factor.entry.name, problem, f"one rank for all of {module.name}"))
    if per_expert:
        _check_all_experts(module, [f for f in group if f.name.expert is not None], findings)
    return len(findings) == before and len(sides) == 2


def _check_all_experts(module: Module, factors: list[_Factor], findings: list[Finding]) -> None:
    present = {factor.name.expert for factor in factors}
    missing = [expert for expert in range(module.experts or 0) if expert not in present]
    if missing and factors:
        example = factors[0].entry.name.replace(
            f".experts.{factors[0].name.expert}.", f".experts.{missing[0]}."
        )
        problem = f"is missing, {len(missing)} of {module.experts} experts have no factors"
        findings.append(Finding(example, problem, f"factors for every expert of {module.name}"))


def _one_scale(group: list[_Factor], config: AdapterConfig, findings: list[Finding]) -> float:
    """The scale of a pair; patterns that tell a bank's experts apart are refused."""
    scales = {factor.path: 0.0 for factor in group}
    for path in scales:
        scales[path] = config.scale_of(path)
    first = scales[group[0].path]
    for factor in group:
        if scales[factor.path] != first:
            problem = f"has scale {scales[factor.path]:g}, {group[0].entry.name} has {first:g}"
            expected = f"one scale for all of {group[0].unit.module.name}"
            findings.append(Finding(factor.entry.name, problem, expected))
    return first


def _check_targets(
    factors: list[_Factor], names: Iterable[str], config: AdapterConfig, findings: list[Finding]
) -> None:
    """`target_modules` and the tensors must say the same: no factor unclaimed, no claim without a factor."""
    targets = {normal_target(target): target for target in config.target_modules}
    if ALL_LINEAR in targets:
        return
    unused = set(targets)
    named = [factor for factor in factors if factor.name.spelling != "target_parameters"]
    first_of_unit = {factor.unit.module.name: factor for factor in reversed(named)}
    for factor in first_of_unit.values():
        paths = [factor.path, normal_target(factor.path), *_spellings(factor.unit)]
        if config.target_regex is not None:
            covered = any(config.targets(path) for path in paths)
        else:
            covering = target_names(paths) & targets.keys()
            unused -= covering
            covered = bool(covering)
        if not covered:
            expected = "target_modules to name every module that has factors"
            findings.append(Finding(factor.entry.name, "is not in the config's target_modules", expected))
    if unused:  # a factor that does not fit the base has its own finding; its target is not one more
        unused -= target_names([path for path in map(_path, names) if path is not None])
    for target in targets:
        if target in unused:
            expected = "only names of modules that the file has factors for"
            findings.append(Finding("target_modules", f"{targets[target]!r} has no factors", expected))


def _path(name: str) -> str | None:
    parsed = parse_factor_name(name)
    return None if parsed is None else normal_target(parsed.path)


def _is_parameters(name: str) -> bool:
    parsed = parse_factor_name(name)
    return parsed is not None and parsed.spelling == "target_parameters"


def _spellings(unit: _Unit) -> list[str]:
    return [path for module in {unit.module, *unit.parts} for path in spellings(module.name)]


def _check_parameters(
    factors: list[_Factor], names: Iterable[str], config: AdapterConfig, findings: list[Finding]
) -> None:
    """`target_parameters` and the tensors must say the same too."""
    unused = set(config.target_parameters)
    for factor in factors:
        if factor.name.spelling != "target_parameters":
            continue
        covering = target_names([factor.path]) & set(config.target_parameters)
        unused -= covering
        if not covering:
            expected = "target_parameters to name every parameter that has factors"
            findings.append(Finding(factor.entry.name, "is not in the config's target_parameters", expected))
    fitting = {factor.entry.name for factor in factors}
    if unused and any(name not in fitting and _is_parameters(name) for name in names):
        return  # which of them it is meant for cannot be said
    for target in sorted(unused):
        expected = "only parameters that the file has factors for"
        findings.append(Finding("target_parameters", f"{target!r} has no factors", expected))
