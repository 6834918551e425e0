"""Choosing the next token: one row of logits per choice, each by its own rules and its own random numbers.

A row's pick depends on that row alone: the random number comes from the choice's own generator, so a seed
gives the same tokens whatever else is in the batch.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

_GREEDY_BELOW = 1e-5  # dividing logits by less would overflow before it changed any token


@dataclass(frozen=True)
class Sampling:
    """How one request wants its tokens chosen; OpenAI's names and OpenAI's default temperature.

    `logprobs` None: not wanted; k: the chosen token's and those of the k likeliest. They come from the
    model's own distribution: before bias, penalties, temperature and truncation.
    Penalties count the answer's tokens, not the prompt's. A choice's seed is `seed` + its index.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        # Rows are sampled together: a number that a tensor cannot hold would break every row's answer.
        assert 0 <= self.top_k < 2**31, f"top_k {self.top_k} is out of range"
        floats = (self.temperature, self.top_p, self.min_p, self.presence_penalty, self.frequency_penalty)
        assert all(map(math.isfinite, (*floats, *self.logit_bias.values()))), "every number is finite"

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty)

    def random(self, choice: int) -> Random:
        """The random numbers of one choice; fresh ones when no seed was given."""
        return Random() if self.seed is None else Random(self.seed + choice)


@dataclass(frozen=True)
class Row:
    """What one row of logits needs to be sampled: the rules, the generator, how often each token was used."""

    sampling: Sampling
    random: Random
    used: Counter[int]


@dataclass(frozen=True)
class Pick:
    """The token chosen, its logprob, and the likeliest tokens with theirs (empty unless asked for)."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Pick | None]:
    """One pick per row, None where the logits are not finite (factors that overflow break their row only).

    Shapes: logits [R, V], any float dtype; `rows` has R entries.
    """
    assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} choices"
    logits = logits.float()
    finite = logits.isfinite().all(1)
    logits = logits.where(finite.unsqueeze(1), 0.0)
    tokens = _choose(_adjusted(logits, rows), rows)
    picks = _with_logprobs(logits, tokens, rows)
    return [pick if ok else None for pick, ok in zip(picks, finite.tolist(), strict=True)]


def _adjusted(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with each row's bias and penalties: l − presence·[n > 0] − frequency·n + bias."""
    touched = [i for i, row in enumerate(rows) if row.sampling.logit_bias or row.sampling.penalised]
    if not touched:
        return logits
    logits = logits.clone()
    for i in touched:
        rules = rows[i].sampling
        change = dict(rules.logit_bias)
        if rules.penalised:
            for token, times in rows[i].used.items():
                penalty = rules.presence_penalty + rules.frequency_penalty * times
                change[token] = change.get(token, 0.0) - penalty
        ids = torch.tensor(list(change.keys()), dtype=torch.long, device=logits.device)
        logits[i, ids] += torch.tensor(list(change.values()), device=logits.device)
    return logits


def _choose(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    tokens: list[int] = logits.argmax(1).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    if drawn:
        for i, token in zip(drawn, _draw(logits[drawn], [rows[i] for i in drawn]), strict=True):
            tokens[i] = token
    return tokens


def _draw(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token per row from softmax(logits / temperature), cut by top_k, then top_p, then min_p."""
    rules = [row.sampling for row in rows]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    p, ids = (logits.double() / column([r.temperature for r in rules])).softmax(1).sort(1, descending=True)
    rank = torch.arange(p.shape[1], device=p.device)
    p = p.where(rank < column([r.top_k or p.shape[1] for r in rules]), 0.0)
    p = p / p.sum(1, keepdim=True)
    before = p.cumsum(1) - p  # probability of the likelier tokens: the first token is always kept
    keep = (before < column([r.top_p for r in rules])) & (p >= p[:, :1] * column([r.min_p for r in rules]))
    cumulative = p.where(keep, 0.0).cumsum(1)
    target = cumulative[:, -1:] * column([row.random.random() for row in rows])
    place = torch.searchsorted(cumulative, target, right=True).clamp(max=p.shape[1] - 1)
    return ids.gather(1, place).squeeze(1).tolist()


def _with_logprobs(logits: Tensor, tokens: list[int], rows: Sequence[Row]) -> list[Pick]:
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    picks = [Pick(token) for token in tokens]
    if not wanted:
        return picks
    logprobs = logits[wanted].log_softmax(1)
    most = min(max(rows[i].sampling.logprobs or 0 for i in wanted), logits.shape[1])
    values, ids = (part.tolist() for part in logprobs.topk(most, 1))
    for j, i in enumerate(wanted):
        top = tuple(zip(ids[j], values[j], strict=True))[: rows[i].sampling.logprobs]
        picks[i] = Pick(tokens[i], float(logprobs[j, tokens[i]]), top)
    return picks
