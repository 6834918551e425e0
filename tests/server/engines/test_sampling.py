"""Each row is sampled by its own rules, as if it were alone."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lanewise.server.engines.sampling import Pick, Row, Sampling, sample

VOCABULARY = 50


def row(sampling: Sampling, choice: int = 0, used: Counter[int] | None = None) -> Row:
    return Row(sampling, sampling.random(choice), used or Counter())


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(one: Tensor, sampling: Sampling, times: int = 4000) -> Counter[int]:
    """How often each token comes out of the same logits."""
    picks = sample(one.expand(times, -1), [row(sampling)] * times)
    return Counter(pick.token for pick in picks if pick)


def test_greedy_takes_the_likeliest() -> None:
    batch = logits(4)
    picks = sample(batch, [row(Sampling(temperature=0))] * 4)
    assert [pick.token for pick in picks if pick] == batch.argmax(1).tolist()


def test_frequencies_follow_the_softmax() -> None:
    one = logits(1)[0]
    counts = drawn(one, Sampling(seed=0, temperature=0.8), 10_000)
    expected = (one / 0.8).softmax(0)
    found = torch.tensor([counts[token] / 10_000 for token in range(VOCABULARY)])
    assert (found - expected).abs().max() < 0.015


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1, top_k=5),
        Sampling(seed=1, top_p=0.6),
        Sampling(seed=1, min_p=0.2),
        Sampling(seed=1, top_k=10, top_p=0.5, min_p=0.1, temperature=1.5),
        Sampling(seed=1, top_p=1e-6),
    ],
)
def test_truncation_keeps_exactly_the_tokens_it_says(sampling: Sampling) -> None:
    one = logits(1, seed=3)[0]
    p, ids = (one.double() / sampling.temperature).softmax(0).sort(descending=True)
    kept = int(sampling.top_k or VOCABULARY)
    p = p[:kept] / p[:kept].sum()
    nucleus = int((p.cumsum(0) - p < sampling.top_p).sum())
    likely = int((p >= sampling.min_p * p[0]).sum())
    allowed = set(ids[: min(nucleus, likely)].tolist())
    seen = set(drawn(one, sampling))
    assert seen <= allowed
    assert len(seen) >= min(len(allowed), 4)


def test_a_seed_repeats_whatever_the_company() -> None:
    mine = Sampling(seed=11)
    others = [Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(seed=2, min_p=0.1)]
    alone, crowd = row(mine), row(mine)
    company = [row(other) for other in others]
    for step in range(30):
        batch = logits(5, seed=step)
        [single] = sample(batch[2:3], [alone])
        many = sample(batch, [*company[:2], crowd, *company[2:]])
        assert many[2] == single


def test_choices_of_one_seed_differ() -> None:
    batch = torch.zeros(8, VOCABULARY)
    picks = sample(batch, [row(Sampling(seed=5), choice) for choice in range(8)])
    assert len({pick.token for pick in picks if pick}) > 3


def test_bias_and_penalties() -> None:
    batch = torch.zeros(3, VOCABULARY)
    batch[:, 7] = 2.0
    used = Counter({7: 3})
    rows = [
        row(Sampling(temperature=0, logit_bias={9: 100.0, 7: -100.0})),
        row(Sampling(temperature=0, presence_penalty=1.9), used=used),
        row(Sampling(temperature=0, frequency_penalty=0.7), used=used),
    ]
    picks = sample(batch, rows)
    assert picks[0] == Pick(9)
    assert picks[1] == Pick(7), "2.0 − 1.9 still leads"
    assert picks[2] == Pick(0), "2.0 − 3·0.7 does not"
    assert batch[0, 9] == 0, "the caller's logits stay"


def test_logprobs_are_the_models_own() -> None:
    batch = logits(3)
    picks = sample(
        batch,
        [
            row(Sampling(temperature=0, logprobs=3, logit_bias={4: 100.0})),
            row(Sampling(seed=0, temperature=2, top_k=1, logprobs=0)),
            row(Sampling(temperature=0)),
        ],
    )
    expected = batch.log_softmax(1)
    assert picks[0] is not None
    assert picks[1] is not None
    assert picks[2] is not None
    assert picks[0].token == 4
    assert picks[0].logprob == pytest.approx(expected[0, 4].item())
    assert [value for _, value in picks[0].top] == pytest.approx(expected[0].topk(3).values.tolist())
    assert picks[1].logprob == pytest.approx(expected[1].max().item())
    assert picks[1].top == picks[2].top == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    batch = logits(3)
    batch[1, 10] = bad
    picks = sample(batch, [row(Sampling(seed=4, logprobs=1)) for _ in range(3)])
    assert picks[1] is None
    assert picks[0] == sample(batch[:1], [row(Sampling(seed=4, logprobs=1))])[0]
    assert picks[2] is not None


@pytest.mark.parametrize(
    "rules", [{"top_k": 10**400}, {"temperature": float("inf")}, {"logit_bias": {1: float("nan")}}]
)
def test_rules_that_would_break_other_rows_cannot_be_made(rules: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        Sampling(**rules)
