"""The `openai` SDK, unchanged, against a real server."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.anyio
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: Any, factors: Any) -> Iterator[openai.OpenAI]:
    server.push("argon", factors())
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: Any, factors: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    server.push("argon", factors())
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI, said_by: Any) -> None:
    answer = client.chat.completions.create(model="argon", messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == said_by("argon@1")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.model == "argon"
    assert answer.model_extra is not None
    assert answer.model_extra["lanewise"]["version"] == 1


def test_chat_stream(client: openai.OpenAI, said_by: Any) -> None:
    stream = client.chat.completions.create(
        model="argon@1", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said_by("argon@1")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_completions(client: openai.OpenAI, said_by: Any) -> None:
    answer = client.completions.create(model="base", prompt="Hi", max_tokens=3, n=2)
    assert [choice.text for choice in answer.choices] == ["base:0 base:1 base:2 "] * 2
    assert answer.choices[0].finish_reason == "length"
    stream = client.completions.create(model="argon", prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == said_by("argon@1")


def test_headers_are_there_for_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="argon", messages=HELLO)
    assert raw.headers["x-lanewise-version"] == "1"
    assert raw.parse().choices


def test_lora_path_through_extra_body(client: openai.OpenAI, said_by: Any) -> None:
    answer = client.chat.completions.create(model="base", messages=HELLO, extra_body={"lora_path": "argon"})
    assert answer.choices[0].message.content == said_by("argon@1")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "argon"]
    assert client.models.retrieve("argon@1").owned_by == "lanewise"


def test_errors_have_their_types(client: openai.OpenAI, server: Any) -> None:
    def create(**more: Any) -> Any:
        arguments: dict[str, Any] = {"model": "argon", "messages": HELLO} | more
        return client.chat.completions.create(**arguments)

    with pytest.raises(openai.NotFoundError) as not_found:
        create(model="krypton")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        create(model="krypton", stream=True)
    with pytest.raises(openai.BadRequestError) as bad:
        create(temperature=7)
    assert bad.value.param == "temperature"
    server.engine.fail_after = 2
    with pytest.raises(openai.InternalServerError):
        create()
    with pytest.raises(openai.APIError, match="failed as it was told"):
        list(create(stream=True))
    server.engine.fail_after = None
    server.engine.overloaded = True
    with pytest.raises(openai.RateLimitError):
        create()


async def test_async(async_client: openai.AsyncOpenAI, said_by: Any) -> None:
    answer = await async_client.chat.completions.create(model="argon", messages=HELLO)
    assert answer.choices[0].message.content == said_by("argon@1")
    stream = await async_client.chat.completions.create(model="argon", messages=HELLO, stream=True)
    said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == said_by("argon@1")
    with pytest.raises(openai.NotFoundError):
        await async_client.models.retrieve("krypton")


async def test_async_stream_closed_early_is_aborted(start: Any, factors: Any) -> None:
    with start(engine={"delay_s": 0.2}) as server:
        server.push("argon", factors())
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(model="argon", messages=HELLO, stream=True)
            await anext(stream)
            await stream.close()
            await client.models.list()
        for _ in range(50):
            if server.engine.running == 0:
                break
            server.http.get("/health")
        assert server.engine.running == 0
        assert len(server.engine.aborts) == 1
