"""Every architecture the torch engine serves, step by step: each row as transformers runs merged weights.

The reference is transformers' own loading and forward of the same checkpoint in fp32, one choice at a time.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lanewise.kernels.attach import LanePool, attach
from lanewise.kernels.base import load_base
from lanewise.kernels.fp8 import dequantize_blocks
from lanewise.kernels.tolerances import assert_close
from lanewise.loaders import BaseCheckpoint, UnsupportedBase
from lanewise.server.engines.architectures import SERVED, check_served, prepare
from lanewise.server.engines.seats import Seats, Span, Step
from lanewise.server.tiny_base import Architecture

Pair = tuple[str, Tensor, Tensor, float]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
RANK = 4
CONTEXT = 512
TOKENS = torch.randint(256, (4, 80), generator=torch.Generator().manual_seed(0))


class Served:
    """A tiny base as the engine runs it, beside transformers' own."""

    def __init__(self, folder: Path, scratch: Path, slots: int) -> None:
        self.folder = folder
        self.theirs = load_theirs(folder, scratch)
        config = json.loads((folder / "config.json").read_text())
        self.model = load_base(config, load_file(folder / "model.safetensors").items())
        self.pool = attach(self.model, slots, RANK)
        self.layers = prepare(self.model)

    def seats(self, count: int) -> Seats:
        return Seats(self.layers, max_seats=count, context_length=CONTEXT, dtype=torch.float32, device="cpu")

    def run(self, seats: Seats, spans: Sequence[tuple[int, int, int]], slots: Sequence[int]) -> list[Tensor]:
        """One step over (choice, start, end), choice c on slots[c]: the logits [length, V] of each span."""
        asked = [Span(*span) for span in spans]
        decode, prefill = [s for s in asked if s.length == 1], [s for s in asked if s.length > 1]
        step, every = Step(seats, decode, prefill), decode + prefill
        tokens = torch.cat([TOKENS[span.seat % len(TOKENS), span.start : span.end] for span in every])
        rows = torch.tensor([slots[span.seat] for span in every for _ in range(span.length)])
        arguments: dict[str, Any] = {"use_cache": False, "step": step}
        with torch.inference_mode(), self.pool.using(rows):
            output = self.model(input_ids=tokens[None], position_ids=step.positions[None], **arguments)
        parts = dict(zip(every, output.logits[0].split([s.length for s in every]), strict=True))
        return [parts[span] for span in asked]


def load_theirs(folder: Path, scratch: Path) -> PreTrainedModel:
    """The checkpoint without quantisation, read by transformers."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    tensors = load_file(folder / "model.safetensors")
    plain = {
        name: dequantize_blocks(tensor, tensors[f"{name}_scale_inv"])
        if f"{name}_scale_inv" in tensors
        else tensor.float()
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    (scratch / "config.json").write_text(json.dumps(config))
    save_file(plain, scratch / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def served(
    request: pytest.FixtureRequest, tiny_base: Any, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    return Served(tiny_base(request.param), tmp_path_factory.mktemp("plain"), slots=80)


def random_pair(pool: LanePool, module: str, seed: int, size: float) -> Pair:
    random = torch.Generator().manual_seed(seed)
    a, b = pool.shapes(module)
    return (
        module,
        torch.randn(a, generator=random) * size,
        torch.randn(b, generator=random) * size,
        0.5,
    )


@torch.no_grad()
def merged_logits(model: PreTrainedModel, pairs: Sequence[Pair], tokens: Tensor) -> Tensor:
    """Logits of W + s·B·A, by transformers; the weights are put back."""
    touched: dict[str, Tensor] = {}
    weights = dict(model.named_parameters())

    def add(name: str, delta: Tensor, rows: slice = slice(None)) -> None:
        touched.setdefault(name, weights[name].clone())
        weights[name][..., rows, :] += delta

    for module, a, b, scale in pairs:
        delta, (bank, _, part) = scale * b @ a, module.rpartition(".")
        inner = b.shape[-2]
        if part == "w2":
            add(f"{bank}.down_proj", delta)
        elif part in ("w1", "w3"):
            add(f"{bank}.gate_up_proj", delta, slice(inner) if part == "w1" else slice(inner, None))
        else:
            add(f"{module}.weight", delta)
    logits = model(tokens[None]).logits[0]
    for name, before in touched.items():
        weights[name].copy_(before)
    return logits


def assert_logits_close(actual: Tensor, expected: Tensor) -> None:
    """The tolerances are for outputs of size 1."""
    size = expected.abs().max()
    assert_close(actual / size, expected / size)


def test_each_module_alone_acts_as_merged_in_one_batch(served: Served) -> None:
    """As many choices as modules in one step, each on a lane that adapts one module only."""
    pool, length = served.pool, 40
    pairs = [random_pair(pool, module, i, 0.4) for i, module in enumerate(pool.modules)]
    for slot, pair in enumerate(pairs):
        pool.write(slot, [pair])
    slots = list(range(len(pairs)))
    spans = [(choice, 0, length) for choice in slots]
    logits = served.run(served.seats(len(pairs)), spans, slots)
    bare = [merged_logits(served.theirs, [], tokens[:length]) for tokens in TOKENS]
    for choice, pair in enumerate(pairs):
        tokens = TOKENS[choice % len(TOKENS), :length]
        expected = merged_logits(served.theirs, [pair], tokens)
        assert (expected - bare[choice % len(TOKENS)]).abs().max() > 1e-2, f"{pair[0]} is not heard"
        assert_logits_close(logits[choice], expected)


def test_chunks_decoding_and_company_change_nothing(served: Served) -> None:
    """Four choices on two lanes and the base join at different steps, in chunks, then decode together."""
    pool = served.pool
    adapters = [[random_pair(pool, m, 100 * i, 0.15) for m in pool.modules] for i in range(2)]
    for slot, pairs in enumerate(adapters):
        pool.write(slot, pairs)
    slots = [0, -1, 1, 0]
    steps = [
        [(0, 0, 7)],
        [(0, 7, 60), (1, 0, 30)],
        [(0, 60, 61), (1, 30, 33), (2, 0, 64)],
        [(0, 61, 62), (1, 33, 70), (2, 64, 65), (3, 0, 2)],
        [(0, 62, 63), (1, 70, 71), (2, 65, 66), (3, 2, 50)],
        [(0, 63, 64), (1, 71, 72), (2, 66, 67), (3, 50, 51)],
        [(1, 72, 73), (3, 51, 52)],
        [(1, 73, 74), (3, 52, 53), (2, 67, 80)],
    ]
    seats = served.seats(4)
    got: dict[int, list[Tensor]] = {choice: [] for choice in range(4)}
    for spans in steps:
        for (choice, *_), logits in zip(spans, served.run(seats, spans, slots), strict=True):
            got[choice].append(logits)
    for choice, parts in got.items():
        logits = torch.cat(parts)
        pairs = [] if slots[choice] < 0 else adapters[slots[choice]]
        assert_logits_close(logits, merged_logits(served.theirs, pairs, TOKENS[choice, : len(logits)]))


def test_a_seat_given_back_leaves_nothing_to_the_next(served: Served) -> None:
    seats = served.seats(2)
    served.run(seats, [(seats.take(), 0, 50), (seats.take(), 0, 30)], [-1, -1])
    seats.give_back(0)
    again = seats.take()
    assert again == 0
    spans = [(0, 0, 40), (1, 30, 40)]
    first, _ = served.run(seats, spans, [-1, -1])
    assert_logits_close(first, merged_logits(served.theirs, [], TOKENS[0, :40]))
    seats.give_back(0)
    seats.give_back(1)
    assert seats.nbytes == 0
    assert seats.free == 2


def test_growing_keeps_what_is_there(served: Served) -> None:
    """The second choice needs more seats and more tokens than there was memory for."""
    seats = served.seats(4)
    served.run(seats, [(0, 0, 10)], [-1])
    small = seats.nbytes
    served.run(seats, [(3, 0, 20)], [-1] * 4)
    assert seats.nbytes > small
    [logits] = served.run(seats, [(0, 10, 30)], [-1])
    assert_logits_close(logits, merged_logits(served.theirs, [], TOKENS[0, :30])[10:])


def test_every_module_of_the_inventory_is_adapted_and_no_other(served: Served) -> None:
    assert set(BaseCheckpoint.open(served.folder).inventory.modules) == set(served.pool.modules)


def test_a_tied_head_is_in_neither(tiny_base: Any, tmp_path: Path) -> None:
    """As in most small bases: no lm_head on disk, and none to adapt."""
    config = json.loads((tiny_base("qwen3") / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tiny_base("qwen3") / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = BaseCheckpoint.open(tmp_path)
    pool = attach(load_base(checkpoint.config, checkpoint.tensors()), slots=1, max_rank=1)
    assert "lm_head" not in pool.modules
    assert set(checkpoint.inventory.modules) == set(pool.modules)


def test_a_sharded_checkpoint_is_the_same_base(served: Served, tmp_path: Path) -> None:
    tensors = load_file(served.folder / "model.safetensors")
    shards = {f"model-0000{i}-of-00003.safetensors": list(tensors)[i::3] for i in range(3)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(served.folder / "config.json", tmp_path)
    checkpoint = BaseCheckpoint.open(tmp_path)
    actual = load_base(checkpoint.config, checkpoint.tensors()).state_dict()
    expected = served.theirs.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_what_is_served_has_been_shown_here_and_the_rest_is_refused() -> None:
    assert {kind.removesuffix("_text") for kind in SERVED} == set(ARCHITECTURES)
    for kind in SERVED:
        check_served({"model_type": kind})
    with pytest.raises(UnsupportedBase, match="'gpt2' is not served by the torch engine; expected one of"):
        check_served({"model_type": "gpt2"})


def test_what_a_step_cannot_compute_is_refused(served: Served) -> None:
    model = copy.copy(served.theirs)
    model.config = copy.deepcopy(served.theirs.config)
    model.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(UnsupportedBase, match="rope type 'dynamic'"):
        prepare(model)
    model.config.sliding_window = 128
    with pytest.raises(UnsupportedBase, match="sliding_window is set"):
        prepare(model)
