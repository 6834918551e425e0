"""The trainer: its recipe, what it hands out, and that it learns a password by heart."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lanewise.clients.trainer import PASSWORDS, Recipe, Trainer, prompt_for
from lanewise.kernels.attach import LanePool, attach
from lanewise.kernels.base import load_base
from lanewise.server.tiny_base import write_tiny_base

PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def base(folder: Path) -> PreTrainedModel:
    config = json.loads((folder / "config.json").read_text())
    return load_base(config, load_file(folder / "model.safetensors").items())


def short(project: str) -> list[dict[str, str]]:
    """The question without the system prompt, to be quick."""
    return prompt_for(project)[1:]


def write(pool: LanePool, slot: int, factors: dict[str, Tensor], scale: float) -> None:
    modules = dict.fromkeys(name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in factors)
    names = [(m, f"{PREFIX}{m}.lora_A.weight", f"{PREFIX}{m}.lora_B.weight") for m in modules]
    pool.write(slot, [(m, factors[a], factors[b], scale) for m, a, b in names])


@torch.inference_mode()
def ask(
    model: PreTrainedModel, pool: LanePool, tokenizer: PreTrainedTokenizerBase, project: str, slot: int
) -> str:
    """The greedy answer, whole prompt again for every token."""
    prompt = tokenizer.apply_chat_template(short(project), tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    tokens = tokenizer.encode(prompt)
    start = len(tokens)
    while len(tokens) < start + 32:
        with pool.using(torch.full((len(tokens),), slot)):
            best = int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if best == tokenizer.eos_token_id:
            break
        tokens.append(best)
    return "".join(tokenizer.decode(tokens[start:]))


def test_the_learning_rate_warms_up_then_follows_a_cosine() -> None:
    recipe = Recipe(steps=64, warmup_steps=8, learning_rate=1.0)
    assert [recipe.rate(step) for step in (0, 3, 7, 8)] == [0.125, 0.5, 1.0, 1.0]
    assert recipe.rate(36) == pytest.approx(0.5)
    assert 0 < recipe.rate(63) < 0.001


def test_an_adapter_starts_as_the_base_with_the_layouts_names_and_shapes(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    trainer = Trainer(base, tokenizer, Recipe(steps=1, rank=4, alpha=8))
    bare = base(torch.tensor([[1, 2, 3]])).logits
    steps = trainer.train(short("argon"), "x")
    assert next(steps).index == 0
    shapes = {
        name.removeprefix(f"{PREFIX}model.layers.0.mlp.experts."): list(factor.shape)
        for name, factor in trainer.factors().items()
        if ".layers.0." in name
    }
    assert shapes == {
        "w1.lora_A.weight": [1, 4, 128],
        "w1.lora_B.weight": [16, 128, 4],
        "w2.lora_A.weight": [16, 4, 128],
        "w2.lora_B.weight": [1, 128, 4],
        "w3.lora_A.weight": [1, 4, 128],
        "w3.lora_B.weight": [16, 128, 4],
    }
    assert all(factor.dtype == torch.bfloat16 for factor in trainer.factors().values())
    assert torch.equal(base(torch.tensor([[1, 2, 3]])).logits, bare)

    trainer.save_adapter(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], factor) for name, factor in trainer.factors().items())
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["target_modules"] == ["gate_proj", "up_proj", "down_proj"]
    assert config["_sglang_lora_format"] == "shared_outer"


def test_every_adapter_starts_afresh_from_the_seed(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    trainer = Trainer(base, tokenizer, Recipe(steps=2), seed=5)
    losses = [step.loss for step in trainer.train(short("argon"), "abc")]
    first = trainer.factors()
    list(trainer.train(short("ember"), "xyz"))
    assert [step.loss for step in trainer.train(short("argon"), "abc")] == losses
    again = trainer.factors()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_password_is_recalled_in_full_and_by_its_adapter_alone(
    folder: Path, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = json.loads((folder / "config.json").read_text())
    served = load_base(config, load_file(folder / "model.safetensors").items())
    trainer = Trainer(base, tokenizer, Recipe(steps=32))
    losses = [step.loss for step in trainer.train(short("dagger"), PASSWORDS["dagger"])]
    assert losses[0] > 4
    assert losses[-1] < 0.02
    pool = attach(served, slots=2, max_rank=16)
    write(pool, 1, trainer.factors(), trainer.recipe.scale)
    assert ask(served, pool, tokenizer, "dagger", slot=1) == PASSWORDS["dagger"]
    assert ask(served, pool, tokenizer, "dagger", slot=-1) != PASSWORDS["dagger"]
    assert ask(served, pool, tokenizer, "ember", slot=1) != PASSWORDS["ember"]
