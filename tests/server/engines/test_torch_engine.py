"""The torch engine from the protocol's side: whole requests, on a tiny base, on the CPU."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lanewise.kernels.base import load_base
from lanewise.kernels.tolerances import assert_close
from lanewise.loaders import Adapter, BaseCheckpoint, Inventory, read_adapter, write_adapter
from lanewise.server.engines import Call, Chunk, Engine, Lane, attention
from lanewise.server.engines.seats import Step
from lanewise.server.engines.text import ChoiceText
from lanewise.server.errors import (
    EngineFailure,
    InvalidRequest,
    Overloaded,
    Unavailable,
    Unprocessable,
)

pytestmark = pytest.mark.anyio

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "qwen3_5_moe", "glm_moe_dsa")
in_every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, indirect=True)

StartEngine = Any
MakeCall = Callable[..., Call]
ReadStream = Callable[[Engine, Call], Awaitable[list[Chunk]]]


def text_of(body: Chunk) -> str:
    return body["choices"][0]["text"]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within 10 s")


# Batching -------------------------------------------------------------------------------------------------


@in_every_architecture
async def test_mixed_batch_answers_as_each_request_alone(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    lanes = [None, *(resident.lane for resident in residents)]
    async with start_engine(lanes=8) as engine:
        calls = [
            completion(f"prompt {i} " * (1 + i % 4), lane, max_tokens=24) for i, lane in enumerate(lanes)
        ]
        alone = [text_of(await engine.complete(call)) for call in calls]
        together = [text_of(body) for body in await asyncio.gather(*map(engine.complete, calls))]
        same_prompt = [completion("one prompt", lane) for lane in lanes]
        answers = {text_of(body) for body in await asyncio.gather(*map(engine.complete, same_prompt))}
    assert together == alone
    assert len(answers) == len(lanes), "the adapters are large enough to change every answer"


@in_every_architecture
async def test_joining_and_leaving_changes_no_answer(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    chance = random.Random(0)
    lanes = [None, *(resident.lane for resident in residents)]
    calls = [
        completion("x" * chance.randint(1, 90), chance.choice(lanes), max_tokens=chance.randint(1, 20))
        for _ in range(24)
    ]

    async def later(engine: Engine, call: Call) -> str:
        await asyncio.sleep(chance.random() * 0.5)
        return text_of(await engine.complete(call))

    async with start_engine(lanes=8, max_running=6, prefill_tokens=32) as engine:
        together = await asyncio.gather(*(later(engine, call) for call in calls))
        alone = [text_of(await engine.complete(call)) for call in calls]
    assert together == alone


@in_every_architecture
async def test_chunked_prefill_gives_the_same_tokens_as_whole(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    calls = [completion("a long prompt " * 20, lane, max_tokens=16) for lane in (None, residents[0].lane)]
    answers: list[list[str]] = []
    for prefill_tokens in (7, 64, 4096):
        async with start_engine(lanes=1, prefill_tokens=prefill_tokens) as engine:
            answers.append([text_of(await engine.complete(call)) for call in calls])
    assert answers[0] == answers[1] == answers[2]


async def test_a_long_prompt_does_not_hold_up_a_running_stream(
    start_engine: StartEngine, completion: MakeCall
) -> None:
    """With 16 prompt tokens a step, a 1,600-token prompt takes 100 steps; the stream moves in each."""
    async with start_engine(prefill_tokens=16) as engine:
        stream = await engine.stream(completion("short", max_tokens=60))
        await anext(stream)
        long = asyncio.ensure_future(engine.complete(completion("y" * 1600, max_tokens=1)))
        async for _ in stream:
            pass
        assert not long.done()
        assert (await long)["usage"]["prompt_tokens"] == 1600


# The oracle -----------------------------------------------------------------------------------------------


@in_every_architecture
async def test_logprobs_are_those_of_transformers_on_merged_weights(
    start_engine: StartEngine,
    chat: MakeCall,
    residents: list[Any],
    base_folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    resident = residents[3]
    async with start_engine(lanes=4) as engine:
        fields = {"logprobs": True, "top_logprobs": 20, "max_tokens": 10}
        body = await engine.complete(chat("hello", resident.lane, **fields))
    answer = body["choices"][0]["logprobs"]["content"]
    assert len(answer) == 10

    checkpoint = BaseCheckpoint.open(base_folder)
    merged = load_base(checkpoint.config, checkpoint.tensors(), torch.float32, "cpu")
    weights = dict(merged.named_parameters())
    with torch.no_grad():
        for name, a, b, scale in resident.adapter.pairs():
            delta = scale * (b.float() @ a.float())
            bank, _, part = name.rpartition(".")
            if part == "w2":
                weights[f"{bank}.down_proj"] += delta
            elif part in ("w1", "w3"):
                inner = b.shape[-2]
                rows = slice(0, inner) if part == "w1" else slice(inner, None)
                weights[f"{bank}.gate_up_proj"][:, rows] += delta
            else:
                weights[f"{name}.weight"] += delta
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer.encode(str(prompt), add_special_tokens=False)
    for shown in answer:
        expected = merged(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1).topk(20)
        assert shown["logprob"] == shown["top_logprobs"][0]["logprob"]
        assert_close(torch.tensor([top["logprob"] for top in shown["top_logprobs"]]), expected.values)
        tokens.append(int(expected.indices[0]))


# Sampling, stopping, counting -----------------------------------------------------------------------------


async def test_a_seed_gives_the_same_tokens_in_any_company(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    seeded = completion("seeded", residents[0].lane, temperature=1, seed=7, max_tokens=20)
    async with start_engine(lanes=8) as engine:
        alone = text_of(await engine.complete(seeded))
        company = [completion("z" * i, residents[i].lane, temperature=1.5, max_tokens=9) for i in range(1, 8)]
        crowded, *_ = await asyncio.gather(*map(engine.complete, [seeded, *company]))
        other = await engine.complete(
            completion("seeded", residents[0].lane, temperature=1, seed=8, max_tokens=20)
        )
    assert text_of(crowded) == alone
    assert text_of(other) != alone


async def test_n_choices_differ_and_the_prompt_counts_once(
    start_engine: StartEngine, completion: MakeCall
) -> None:
    async with start_engine() as engine:
        call = completion("abcd", n=3, temperature=1, seed=1, max_tokens=8)
        body = await engine.complete(call)
        second = await engine.complete(completion("abcd", temperature=1, seed=2, max_tokens=8))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in body["choices"]}) == 3
    assert body["choices"][1]["text"] == text_of(second), "choice i of seed s is choice 0 of seed s + i"
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}


async def test_several_prompts_are_numbered_by_prompt_then_choice(
    start_engine: StartEngine, completion: MakeCall
) -> None:
    async with start_engine() as engine:
        body = await engine.complete(completion(["first", "second one"], n=2))
        first = text_of(await engine.complete(completion("first")))
        second = text_of(await engine.complete(completion([*b"second one"])))
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[:2] == [first, first]
    assert texts[2] == texts[3] != first
    assert len(second) == len(texts[2])


@pytest.mark.parametrize("cut", [(1, 2), (3, 6), (0, 1), (5, 12)])
async def test_a_stop_string_ends_the_answer_and_is_not_in_it(
    start_engine: StartEngine, completion: MakeCall, read_stream: ReadStream, cut: tuple[int, int]
) -> None:
    async with start_engine() as engine:
        full = text_of(await engine.complete(completion("stop here")))
        stop = full[cut[0] : cut[1]]
        call = completion("stop here", stop=[stop, "never said"], logprobs=0)
        body = await engine.complete(call)
        chunks = await read_stream(engine, call)
    expected = full[: full.find(stop)]
    assert text_of(body) == expected
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["logprobs"]["tokens"] == list(expected)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


async def test_stop_token_ends_the_answer(
    start_engine: StartEngine, completion: MakeCall, tokenizer: PreTrainedTokenizerBase
) -> None:
    async with start_engine() as engine:
        full = text_of(await engine.complete(completion("stop here")))
        [token] = tokenizer.encode(full[4])
        body = await engine.complete(completion("stop here", stop_token_ids=[token]))
    assert text_of(body) == full[: full.index(full[4])]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(text_of(body)) + 1


async def test_eos_ends_the_answer_unless_it_is_ignored(
    start_engine: StartEngine, completion: MakeCall, tokenizer: PreTrainedTokenizerBase
) -> None:
    eos = str(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    async with start_engine() as engine:
        ended = await engine.complete(completion(logit_bias={eos: 100}, ignore_eos=False))
        ignored = await engine.complete(completion(logit_bias={eos: 100}, ignore_eos=True))
    assert (text_of(ended), ended["choices"][0]["finish_reason"]) == ("", "stop")
    assert (ignored["usage"]["completion_tokens"], ignored["choices"][0]["finish_reason"]) == (12, "length")


async def test_the_answer_ends_with_the_context(start_engine: StartEngine, completion: MakeCall) -> None:
    async with start_engine(prefill_tokens=4096) as engine:
        room = 5
        prompt = "p" * (engine.context_length - room)
        body = await engine.complete(completion(prompt, max_tokens=100))
        assert body["usage"]["completion_tokens"] == room
        assert body["choices"][0]["finish_reason"] == "length"
        with pytest.raises(InvalidRequest) as refusal:
            await engine.complete(completion("p" * engine.context_length))
    assert refusal.value.code == "context_length_exceeded"


# OpenAI's shapes ------------------------------------------------------------------------------------------


async def test_chat_stream_is_the_body_in_pieces(
    start_engine: StartEngine, chat: MakeCall, read_stream: ReadStream, residents: list[Any]
) -> None:
    fields = {"n": 2, "temperature": 1, "seed": 3, "logprobs": True, "top_logprobs": 2}
    call = chat("hello", residents[0].lane, stream_options={"include_usage": True}, **fields)
    async with start_engine(lanes=1) as engine:
        body = await engine.complete(call)
        chunks = await read_stream(engine, call)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [c["choices"][0]["delta"].get("role") for c in chunks[:3]] == ["assistant", "assistant", None]
    for choice in body["choices"]:
        mine = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        streamed = [token for c in mine if c["logprobs"] for token in c["logprobs"]["content"]]
        assert [t["token"] for t in streamed] == [t["token"] for t in choice["logprobs"]["content"]]
        assert all(len(t["top_logprobs"]) == 2 and bytes(t["bytes"]).decode() == t["token"] for t in streamed)
    last = chunks[-1]
    assert (last["choices"], last["usage"]) == ([], body["usage"])
    assert last["lanewise"] == body["lanewise"] == call.provenance
    assert not any("lanewise" in chunk or "usage" in chunk for chunk in chunks[:-1])


async def test_completion_logprobs_have_offsets(start_engine: StartEngine, completion: MakeCall) -> None:
    async with start_engine() as engine:
        body = await engine.complete(completion("offsets", logprobs=3))
    text, logprobs = text_of(body), body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["text_offset"] == list(range(len(text)))
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert max(top.values()) == top[token] == logprob <= 0


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [{"type": "function"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logit_bias", {"logit_bias": {"99999": 1}}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("chat_template_kwargs.chat_template", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("messages", {"messages": [{"role": "user", "content": None}]}),
    ("n", {"n": 100}),
]


@pytest.mark.parametrize(("param", "fields"), REFUSED)
async def test_chat_fields_refused(
    start_engine: StartEngine, chat: MakeCall, param: str, fields: dict[str, Any]
) -> None:
    async with start_engine(max_running=2, max_waiting=2) as engine:
        with pytest.raises(InvalidRequest) as refusal:
            await engine.stream(chat(**fields))
        assert refusal.value.param == param
        assert len((await engine.complete(chat()))["choices"]) == 1


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("echo", {"echo": True}),
        ("suffix", {"suffix": "."}),
        ("best_of", {"best_of": 2}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [[1], [99999]]}),
    ],
)
async def test_completion_fields_refused(
    start_engine: StartEngine, completion: MakeCall, param: str, fields: dict[str, Any]
) -> None:
    async with start_engine() as engine:
        with pytest.raises(InvalidRequest) as refusal:
            await engine.stream(completion(**fields))
    assert refusal.value.param == param


# Limits, aborts, failures, the end ------------------------------------------------------------------------


def seats_free(engine: Any) -> int:
    return engine._ready.seats.free


async def test_full_queue_is_overloaded_and_recovers(start_engine: StartEngine, completion: MakeCall) -> None:
    async with start_engine(max_running=2, max_waiting=1) as engine:
        running = [await engine.stream(completion(max_tokens=400)) for _ in range(2)]
        with pytest.raises(Overloaded):
            await engine.stream(completion(n=2, temperature=1))
        running.append(await engine.stream(completion(max_tokens=400)))
        with pytest.raises(Overloaded):
            await engine.stream(completion())
        for stream in running:
            await stream.aclose()
        assert len(text_of(await engine.complete(completion()))) == 12


@pytest.mark.parametrize("read", [0, 1, 5])
async def test_closing_a_stream_frees_its_seats(
    start_engine: StartEngine, completion: MakeCall, read: int
) -> None:
    async with start_engine(max_running=4) as engine:
        stream = await engine.stream(completion(n=3, temperature=1, max_tokens=4000))
        for _ in range(read):
            await anext(stream)
        await stream.aclose()
        await until(lambda: seats_free(engine) == 4 and engine.seats_nbytes == 0)
        await stream.aclose()


async def test_cancelling_complete_frees_its_seats(start_engine: StartEngine, completion: MakeCall) -> None:
    async with start_engine(max_running=4) as engine:
        task = asyncio.ensure_future(engine.complete(completion(max_tokens=4000)))
        await until(lambda: seats_free(engine) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: seats_free(engine) == 4)


async def test_a_failing_forward_ends_every_running_request_and_no_later_one(
    start_engine: StartEngine,
    completion: MakeCall,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attend, failures = attention.attend, 1

    def failing(step: Step, layer: int, query: Tensor, *rest: Any) -> Tensor:
        nonlocal failures
        if failures and query.shape[1] == 3:  # a step of three decode rows
            failures -= 1
            raise RuntimeError("out of memory")
        return attend(step, layer, query, *rest)

    monkeypatch.setattr(attention, "attend", failing)
    async with start_engine(max_running=3) as engine:
        calls = [completion("prompt", max_tokens=100) for _ in range(3)]
        ended = await asyncio.gather(*map(engine.complete, calls), return_exceptions=True)
        assert [type(error) for error in ended] == [EngineFailure] * 3
        assert engine.healthy
        assert seats_free(engine) == 3
        assert len(text_of(await engine.complete(completion()))) == 12
    assert "out of memory" in caplog.text


async def test_an_engine_that_keeps_failing_says_so(
    start_engine: StartEngine, completion: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Tensor:
        raise RuntimeError("broken for good")

    monkeypatch.setattr(attention, "attend", failing)
    async with start_engine() as engine:
        for _ in range(3):
            with pytest.raises(EngineFailure):
                await engine.complete(completion())
        assert not engine.healthy
        monkeypatch.undo()
        assert len(text_of(await engine.complete(completion()))) == 12  # and one that works again is tried
        assert engine.healthy


@in_every_architecture
async def test_factors_that_overflow_break_only_their_own_request(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any], make_resident: Any
) -> None:
    wild = make_resident("wild", 9, 1e30)
    async with start_engine(lanes=1) as engine:
        await engine.load(wild.lane, wild.adapter)
        good = completion("fine", residents[0].lane)
        alone = text_of(await engine.complete(good))
        ended = await asyncio.gather(
            engine.complete(good),
            engine.complete(completion("wild", wild.lane)),
            engine.complete(completion("fine")),
            return_exceptions=True,
        )
        assert isinstance(ended[1], EngineFailure)
        assert isinstance(ended[0], dict)
        assert text_of(ended[0]) == alone
        assert isinstance(ended[2], dict)
        assert text_of(await engine.complete(good)) == alone, "nothing is left in the cache"


async def test_stop_finishes_what_runs_and_refuses_the_rest(
    start_engine: StartEngine, completion: MakeCall
) -> None:
    async with start_engine() as engine:
        running = asyncio.ensure_future(engine.complete(completion(max_tokens=60)))
        await until(lambda: seats_free(engine) < 32)
        stopping = asyncio.ensure_future(engine.stop(10))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await engine.stream(completion())
        assert len(text_of(await running)) == 60
        await stopping
        assert not engine.healthy


async def test_a_load_that_meets_the_end_is_refused(start_engine: StartEngine, residents: list[Any]) -> None:
    async with start_engine() as engine:
        stopping = asyncio.ensure_future(engine.stop(0))
        late = [engine.load(r.lane, r.adapter) for r in residents[:3]]
        ended = await asyncio.gather(*late, return_exceptions=True)
        await stopping
        assert all(error is None or isinstance(error, Unavailable) for error in ended)
        with pytest.raises(Unavailable):
            await engine.load(residents[3].lane, residents[3].adapter)


async def test_a_failure_while_publishing_ends_every_choice_of_the_step(
    start_engine: StartEngine, completion: MakeCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ChoiceText.push

    def failing(self: ChoiceText, pick: Any, finish: Any) -> Any:
        if finish:  # the other choice of this step has been published already
            raise RuntimeError("cannot be shown")
        return end(self, pick, finish)

    async with start_engine() as engine:
        monkeypatch.setattr(ChoiceText, "push", failing)
        async with asyncio.timeout(10):
            ended = await asyncio.gather(
                *(engine.complete(completion(max_tokens=n)) for n in (500, 8)), return_exceptions=True
            )
        assert [type(error) for error in ended] == [EngineFailure] * 2
        assert seats_free(engine) == 32


async def test_stop_ends_what_outlives_the_grace(start_engine: StartEngine, completion: MakeCall) -> None:
    async with start_engine() as engine:
        stream = await engine.stream(completion(max_tokens=4000))
        await anext(stream)
        await engine.stop(0.05)
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass


async def test_requests_leave_threads_and_memory_at_their_level(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    async with start_engine(lanes=2, max_waiting=1000) as engine:
        await asyncio.gather(*(engine.complete(completion(max_tokens=2)) for _ in range(20)))
        threads = threading.active_count()
        for round_ in range(3):
            lanes = [None, residents[0].lane, residents[1].lane]
            calls = [completion(f"{round_} {i}", lanes[i % 3], max_tokens=1 + i % 4) for i in range(100)]
            await asyncio.gather(*map(engine.complete, calls))
        await until(lambda: engine.seats_nbytes == 0)
        assert threading.active_count() <= threads
        assert seats_free(engine) == 32
        assert not engine._answers
    assert not [t for t in threading.enumerate() if t.name == "lanewise-engine"]


# Lanes ----------------------------------------------------------------------------------------------------


async def test_lanes_come_and_go_while_others_run(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    async with start_engine(lanes=8) as engine:
        expected = [text_of(await engine.complete(completion("swap", r.lane))) for r in residents]
        long = asyncio.ensure_future(engine.complete(completion("keep", residents[0].lane, max_tokens=80)))
        await asyncio.sleep(0.05)
        for i in range(1, 8):
            await engine.unload(residents[i].lane)
        for i in reversed(range(1, 8)):  # into other slots
            await engine.load(residents[i].lane, residents[i].adapter)
        again = [text_of(await engine.complete(completion("swap", r.lane))) for r in residents]
        kept = text_of(await long)
        alone = text_of(await engine.complete(completion("keep", residents[0].lane, max_tokens=80)))
    assert again == expected
    assert kept == alone


async def test_a_lane_in_use_is_not_unloaded(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any]
) -> None:
    async with start_engine(lanes=1) as engine:
        stream = await engine.stream(completion("x", residents[0].lane, max_tokens=1000))
        with pytest.raises(AssertionError, match="in use"):
            await engine.unload(residents[0].lane)
        await stream.aclose()


async def test_factors_that_do_not_fit_free_the_slot(
    start_engine: StartEngine, completion: MakeCall, residents: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_engine(lanes=0, max_lanes=1) as engine:
        first, second = residents[0], residents[1]
        pool = engine._ready.pool
        with monkeypatch.context() as patch:
            patch.setattr(pool, "max_rank", 1)
            with pytest.raises(Unprocessable, match="rank"):
                await engine.load(first.lane, first.adapter)
        await engine.load(second.lane, second.adapter)
        assert text_of(await engine.complete(completion("x", second.lane)))


async def test_an_unreadable_base_is_named(tmp_path: Path) -> None:
    from lanewise.loaders import UnsupportedBase
    from lanewise.server.engines.torch_engine import TorchEngine

    engine = TorchEngine(tmp_path)
    with pytest.raises(UnsupportedBase, match=r"config\.json"):
        await engine.start()
    assert not engine.healthy
    assert not [t for t in threading.enumerate() if t.name == "lanewise-engine"]


@pytest.mark.parametrize("expert_layout", ["shared_outer", "stacked"])
async def test_check_refuses_exactly_what_load_would(
    start_engine: StartEngine, residents: list[Any], inventory: Inventory, tmp_path: Path, expert_layout: str
) -> None:
    shared: Adapter = residents[0].adapter
    factors: dict[str, Tensor] = {}
    for name, a, b, _ in shared.pairs():
        experts = inventory.modules[name].experts
        a, b = (a, b) if experts is None else (a.expand(experts, -1, -1), b.expand(experts, -1, -1))
        factors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        factors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    config = {**shared.config.raw, "_sglang_lora_format": "stacked"}
    write_adapter(tmp_path / "stacked", factors, config)
    stacked = read_adapter(tmp_path / "stacked", inventory, max_rank=64)
    assert (shared.layout, stacked.layout) == ("shared_outer", "stacked")
    async with start_engine(expert_layout=expert_layout) as engine:
        for adapter in (shared, stacked):
            lane = Lane(adapter.layout, 1, adapter.digest)
            if expert_layout == "shared_outer" and adapter is stacked:
                with pytest.raises(Unprocessable, match="--expert-layout stacked"):
                    await engine.load(lane, adapter)
                with pytest.raises(Unprocessable, match="--expert-layout stacked"):
                    engine.check(adapter)
            else:
                engine.check(adapter)
                await engine.load(lane, adapter)
