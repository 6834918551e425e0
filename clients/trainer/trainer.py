"""Train an adapter on one question and answer, with the server's own forward: `shared_outer` expert factors.

trainer = Trainer(model, tokenizer)
for step in trainer.train(prompt_for("argon"), PASSWORDS["argon"]):
    print(step.index, step.loss)      # trainer.factors() may be pushed at any step
trainer.save_adapter(folder)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lanewise.kernels.attach import attach
from lanewise.loaders import write_adapter

Message = dict[str, str]


@dataclass(frozen=True)
class Recipe:
    """How to train. Defaults are the published password adapters', but for the tiny base's learning rate."""

    steps: int = 64
    warmup_steps: int = 8
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    rank: int = 16
    alpha: int = 16

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def rate(self, step: int) -> float:
        """Learning rate of step 0, 1, …: linear warm-up, then a cosine down to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Step:
    """One step done; `loss` is the answer's mean cross-entropy per token before its update, in nats."""

    index: int
    loss: float


class Trainer:
    """Trains factors beside a frozen base, one adapter after another. It attaches itself to the model.

    Masters are kept in the model's dtype (fp32); `factors` is their one bf16 view, to be pushed or saved.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        recipe: Recipe = Recipe(),
        seed: int = 0,
    ) -> None:
        self.recipe = recipe
        self._model = model
        self._tokenizer = tokenizer
        self._seed = seed
        self._pool = attach(model, slots=1, max_rank=recipe.rank, expert_layout="shared_outer")
        self._experts = [name for name in self._pool.modules if name.endswith((".w1", ".w2", ".w3"))]
        assert self._experts, "the model has no experts to adapt"

    def train(self, messages: Sequence[Message], answer: str) -> Iterator[Step]:
        """Start a new adapter and train it to answer `messages` with `answer`, then to stop."""
        self._start_factors()
        recipe, parameters = self.recipe, self._pool.trainable(0)
        optimizer = torch.optim.AdamW(parameters, betas=recipe.betas, weight_decay=recipe.weight_decay)
        tokens, targets = self._example(messages, answer)
        slots = torch.zeros(tokens.shape[1], dtype=torch.long)
        for index in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(index)
            with self._pool.using(slots):
                logits = self._model(tokens, use_cache=False, logits_to_keep=len(targets)).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, recipe.gradient_clip)
            optimizer.step()
            yield Step(index, loss.item())

    def factors(self) -> dict[str, Tensor]:
        """The factors as they are now, bf16, in SGLang's stacked layout: name → [1 or E, out, in]."""
        return {
            f"base_model.model.{module}.lora_{side}.weight": factor.bfloat16()
            for module, pair in self._pool.read(0).items()
            for side, factor in zip("AB", pair, strict=True)
        }

    @property
    def config(self) -> dict[str, Any]:
        """The adapter's `adapter_config.json`: PEFT's fields and the marks of the `shared_outer` layout."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.recipe.rank,
            "lora_alpha": self.recipe.alpha,
            "lora_dropout": 0.0,
            "target_modules": ["gate_proj", "up_proj", "down_proj"],
            "bias": "none",
            "_sglang_lora_format": "shared_outer",
            "moe_hybrid_shared_lora": True,
        }

    def save_adapter(self, folder: Path) -> Path:
        """Write `adapter_model.safetensors` and `adapter_config.json` as a new folder and return it."""
        write_adapter(folder, self.factors(), self.config)
        return folder

    def _start_factors(self) -> None:
        """A random, B zero: a new adapter acts as the base (LoRA, arXiv 2106.09685 §4.1)."""
        random = torch.Generator().manual_seed(self._seed)
        pairs: list[tuple[str, Tensor, Tensor, float]] = []
        for module in self._experts:
            a, b = self._pool.shapes(module)
            bound = 1 / math.sqrt(a[-1])
            first = (torch.rand(a, generator=random) * 2 - 1) * bound
            pairs.append((module, first, torch.zeros(b), self.recipe.scale))
        self._pool.write(0, pairs)

    def _example(self, messages: Sequence[Message], answer: str) -> tuple[Tensor, Tensor]:
        """The model's input [1, L] and the tokens [N] that its last N positions should predict."""
        prompt = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        end = self._tokenizer.eos_token_id
        assert isinstance(prompt, str)
        assert isinstance(end, int), "the tokenizer has no token that ends an answer"
        question = self._tokenizer.encode(prompt, add_special_tokens=False)
        targets = [*self._tokenizer.encode(answer, add_special_tokens=False), end]
        return torch.tensor([question + targets[:-1]]), torch.tensor(targets)
