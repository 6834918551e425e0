"""Does every tensor of an adapter fit the base? Decided from names, dtypes and shapes; no weight is read.

Steps, each adding to one list of findings: match names, settle the layout, check dtypes and shapes, complete
the pairs, compare with `target_modules`. An adapter may cover any part of the inventory, but a factor never
comes without its other half, nor a 2-D expert factor without those of the other experts.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .config import ALL_LINEAR, AdapterConfig
from .errors import Finding, InvalidAdapter
from .inventory import Inventory, Layout, Module
from .names import EXPECTED, FactorName, normal_target, other_half, parse_factor_name, target_names
from .tensor_file import FLOAT_DTYPES, TensorEntry


@dataclass(frozen=True)
class Pair:
    """The tensors of one module's A and B: one each, or if `per_expert` one for each expert in turn."""

    module: Module
    a: tuple[TensorEntry, ...]
    b: tuple[TensorEntry, ...]
    per_expert: bool


@dataclass(frozen=True)
class _Factor:
    entry: TensorEntry
    name: FactorName
    module: Module

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def outer(self) -> bool:
        """On the side that `shared_outer` shares: what reads or writes the hidden state."""
        return self.name.side == ("B" if self.module.name.endswith(".w2") else "A")


def fit(
    entries: Mapping[str, TensorEntry], config: AdapterConfig, inventory: Inventory
) -> tuple[Layout, tuple[Pair, ...]]:
    """The layout of an adapter and its pairs in the inventory's order.

    `entries` are in file order. Raises InvalidAdapter with every finding, in that order, the config's last.
    """
    findings: list[Finding] = []
    factors = _match(entries.values(), inventory, findings)
    factors = _of_one_spelling(factors, findings)
    layout = _layout(factors, config, findings)
    for factor in factors:
        findings.extend(_check_shape(factor, layout, config.rank))
    pairs = [_pair(module, group, findings) for module, group in _by_module(factors, inventory)]
    _check_targets(factors, config, findings)
    if findings:
        order = {name: number for number, name in enumerate(entries)}
        raise InvalidAdapter(sorted(findings, key=lambda finding: order.get(finding.where, len(order))))
    return layout, tuple(pairs)


def _match(entries: Iterable[TensorEntry], inventory: Inventory, findings: list[Finding]) -> list[_Factor]:
    """Find each tensor's module. Findings: unknown names and modules, doubles, impossible experts."""
    factors: dict[FactorName, _Factor] = {}
    for entry in entries:
        name = parse_factor_name(entry.name)
        module = inventory.modules.get(name.module) if name else None
        if name is None:
            findings.append(Finding(entry.name, "is not a factor's name", EXPECTED))
        elif module is None:
            problem = f"the base ({inventory.architecture}) has no module {name.module} to adapt"
            findings.append(Finding(entry.name, problem, "a module of the base's inventory"))
        elif name.expert is not None and name.expert >= (module.experts or 0):
            expected = f"experts 0 to {(module.experts or 0) - 1}"
            findings.append(Finding(entry.name, f"the base has no expert {name.expert}", expected))
        elif name in factors:
            problem = f"is the same factor as {factors[name].entry.name}"
            findings.append(Finding(entry.name, problem, "each factor once"))
        else:
            factors[name] = _Factor(entry, name, module)
    if not factors and not findings:
        findings.append(
            Finding("adapter_model.safetensors", "holds no tensors", "at least one pair of factors")
        )
    return list(factors.values())


def _of_one_spelling(factors: list[_Factor], findings: list[Finding]) -> list[_Factor]:
    """Drop expert factors that are not stored as the first one is, with a finding for each."""
    spellings = [factor.name.spelling for factor in factors if factor.module.kind == "expert"]
    kept: list[_Factor] = []
    for factor in factors:
        if factor.module.kind == "linear" or factor.name.spelling == spellings[0]:
            kept.append(factor)
        else:
            problem = f"is {factor.name.spelling} among {spellings[0]} expert factors"
            findings.append(Finding(factor.entry.name, problem, "one layout for all experts"))
    return kept


def _layout(factors: list[_Factor], config: AdapterConfig, findings: list[Finding]) -> Layout:
    """How the expert factors are stored: by what they look like, which the config must not contradict."""
    banks = [factor for factor in factors if factor.module.kind == "expert"]
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
    if banks[0].name.spelling == "per_expert_2d":
        return ["per_expert_2d"]
    shared = [factor.shape[:1] == (1,) for factor in banks if factor.outer]
    if banks[0].module.experts == 1:
        return ["stacked", "shared_outer"]
    if all(shared):
        return ["shared_outer"]
    if not any(shared):
        return ["stacked"]
    return ["shared_outer", "stacked"]


def _check_shape(factor: _Factor, layout: Layout, rank: int) -> Iterator[Finding]:
    entry = factor.entry
    if entry.dtype not in FLOAT_DTYPES:
        yield Finding(entry.name, f"has dtype {entry.dtype}", f"one of {', '.join(FLOAT_DTYPES)}")
    expected, found = _expected_shape(factor, layout, rank), factor.shape
    if found == expected:
        return
    rank_axis = len(expected) - (2 if factor.name.side == "A" else 1)
    if found == (*expected[:-2], expected[-1], expected[-2]):
        problem = f"has shape {list(found)}, transposed or A and B swapped"
    elif len(found) == len(expected) and found == (
        *expected[:rank_axis],
        found[rank_axis],
        *expected[rank_axis + 1 :],
    ):
        problem = f"has rank {found[rank_axis]} (shape {list(found)}) where the config's r is {rank}"
    else:
        problem = f"has shape {list(found)}"
    yield Finding(entry.name, problem, f"{list(expected)} for {factor.module.name} as {layout}")


def _expected_shape(factor: _Factor, layout: Layout, rank: int) -> tuple[int, ...]:
    module = factor.module
    pair = (rank, module.in_features) if factor.name.side == "A" else (module.out_features, rank)
    if module.experts is None or layout == "per_expert_2d":
        return pair
    return (1 if layout == "shared_outer" and factor.outer else module.experts, *pair)


def _by_module(factors: list[_Factor], inventory: Inventory) -> Iterator[tuple[Module, list[_Factor]]]:
    groups: dict[str, list[_Factor]] = {}
    for factor in factors:
        groups.setdefault(factor.module.name, []).append(factor)
    return ((module, groups[name]) for name, module in inventory.modules.items() if name in groups)


def _pair(module: Module, factors: list[_Factor], findings: list[Finding]) -> Pair:
    """One module's tensors. Findings: missing halves, missing experts, differing dtypes."""
    first = factors[0]
    names = {factor.name: factor for factor in factors}
    for factor in factors:
        name = factor.name
        if FactorName(name.module, "B" if name.side == "A" else "A", name.expert, name.spelling) not in names:
            other = other_half(factor.entry.name)
            findings.append(Finding(other, "is missing", f"the other half of {factor.entry.name}"))
        if factor.entry.dtype != first.entry.dtype:
            problem = f"has dtype {factor.entry.dtype}, {first.entry.name} has {first.entry.dtype}"
            findings.append(Finding(factor.entry.name, problem, "one dtype for all factors of a module"))
    if first.name.expert is not None:
        _check_all_experts(module, factors, findings)
    ordered = sorted(factors, key=lambda factor: factor.name.expert or 0)
    a = tuple(factor.entry for factor in ordered if factor.name.side == "A")
    b = tuple(factor.entry for factor in ordered if factor.name.side == "B")
    return Pair(module, a, b, per_expert=first.name.expert is not None)


def _check_all_experts(module: Module, factors: list[_Factor], findings: list[Finding]) -> None:
    present = {factor.name.expert for factor in factors}
    missing = [expert for expert in range(module.experts or 0) if expert not in present]
    if missing:
        example = factors[0].entry.name.replace(
            f".experts.{factors[0].name.expert}.", f".experts.{missing[0]}."
        )
        problem = f"is missing, {len(missing)} of {module.experts} experts have no factors"
        findings.append(Finding(example, problem, f"factors for every expert of {module.name}"))


def _check_targets(factors: list[_Factor], config: AdapterConfig, findings: list[Finding]) -> None:
    """`target_modules` and the tensors must say the same: no factor unclaimed, no claim without a factor."""
    targets = {normal_target(target): target for target in config.target_modules}
    if ALL_LINEAR in targets:
        return
    unused = set(targets)
    first_of_module = {factor.module.name: factor for factor in reversed(factors)}
    for module, factor in first_of_module.items():
        covering = target_names(module) & targets.keys()
        unused -= covering
        if not covering:
            expected = "target_modules to name every module that has factors"
            findings.append(Finding(factor.entry.name, "is not in the config's target_modules", expected))
    for target in targets:
        if target in unused:
            expected = "only names of modules that the file has factors for"
            findings.append(Finding("target_modules", f"{targets[target]!r} has no factors", expected))
