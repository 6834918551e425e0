"""The OpenAI routes over a real server: selection, provenance, streams, errors, disconnects."""

import json
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

HELLO = [{"role": "user", "content": "Hi"}]


def events(text: str) -> list[Any]:
    """The events of a stream, `[DONE]` as a string."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def wait_until(condition: Callable[[], bool], within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_base_answers_only_to_its_names(server: Any, said_by: Any) -> None:
    for model in ("base", "tiny"):
        response = server.ask(model)
        assert response.json()["choices"][0]["message"]["content"] == said_by("base")
        assert response.json()["lanewise"] == {"adapter": "base", "version": None, "digest": None}
        assert response.headers["x-lanewise-adapter"] == "base"
        assert "x-lanewise-version" not in response.headers


def test_answer_says_which_version_made_it(server: Any, factors: Any, said_by: Any) -> None:
    pushed = server.push("argon", factors()).json()
    response = server.ask("argon")
    provenance = {"adapter": "argon", "version": 1, "digest": pushed["digest"]}
    assert response.json()["lanewise"] == provenance
    assert response.json()["choices"][0]["message"]["content"] == said_by("argon@1")
    named = ("x-lanewise-adapter", "x-lanewise-version", "x-lanewise-digest")
    assert [response.headers[name] for name in named] == ["argon", "1", pushed["digest"]]

    stream = server.ask("argon", stream=True)
    assert [stream.headers[name] for name in named] == ["argon", "1", pushed["digest"]]
    assert stream.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(stream.text)
    assert done == "[DONE]"
    assert chunks[-1]["lanewise"] == provenance
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == said_by("argon@1")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "model", ["krypton", "argon@9", "argon@x", "argon@", "base:krypton", "gpt-4", "@1", ":"]
)
def test_unknown_is_404_and_never_the_base(
    start: Any, factors: Any, model: str, path: str, stream: bool
) -> None:
    with start() as server:
        server.push("argon", factors())
        prompt = {"messages": HELLO} if "chat" in path else {"prompt": "Hi"}
        response = server.http.post(path, json={"model": model, "stream": stream, **prompt})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"
    assert "x-lanewise-adapter" not in response.headers


def test_adapter_without_active_version_is_404_that_says_what_to_do(server: Any, factors: Any) -> None:
    server.push("argon", factors(), activate=False)
    response = server.ask("argon")
    assert response.status_code == 404
    assert "activate" in response.json()["error"]["message"]
    assert server.ask("argon@1").status_code == 200


def test_lora_path_names_an_adapter(server: Any, factors: Any, said_by: Any) -> None:
    server.push("argon", factors())
    server.push("neon", factors(variant=1))
    answer = server.ask("base", lora_path="argon")
    assert answer.json()["choices"][0]["message"]["content"] == said_by("argon@1")
    clash = server.ask("neon", lora_path="argon")
    assert (clash.status_code, clash.json()["error"]["param"]) == (400, "lora_path")
    assert server.ask("base", lora_path="xenon").status_code == 404


def test_models(server: Any, factors: Any) -> None:
    pushed = server.push("argon", factors()).json()
    server.push("idle", factors(variant=1), activate=False)
    cards = server.http.get("/v1/models").json()
    assert [card["id"] for card in cards["data"]] == ["tiny", "argon"]
    card = server.http.get("/v1/models/argon@1").json()
    assert card["parent"] == "tiny"
    assert card["root"] == "argon@1"
    assert card["lanewise"] == {"version": 1, "digest": pushed["digest"]}
    assert server.http.get("/v1/models/base").json()["id"] == "tiny"
    assert server.http.get("/v1/models/tiny:argon").json()["id"] == "tiny:argon"
    assert server.http.get("/v1/models/org/model").status_code == 404


def test_base_name_may_hold_slash_colon_and_at(start: Any, factors: Any, said_by: Any) -> None:
    with start(base_name="org/model:fp8@x") as server:
        server.push("argon", factors())
        assert server.said("org/model:fp8@x") == said_by("base")
        assert server.said("org/model:fp8@x:argon@1") == said_by("argon@1")
        assert server.http.get("/v1/models/org/model:fp8@x").json()["id"] == "org/model:fp8@x"


BAD_BODIES: list[tuple[str, str, Any, int, str | None]] = [
    ("POST", "/v1/chat/completions", b"{", 400, None),
    ("POST", "/v1/chat/completions", b"", 400, None),
    ("POST", "/v1/chat/completions", b"[" * 200_000, 400, None),
    ("POST", "/v1/chat/completions", b'{"model": "\xff"}', 400, None),
    ("POST", "/v1/chat/completions", b'{"model": "\\ud800"}', 400, None),
    ("POST", "/v1/chat/completions", {"messages": HELLO}, 400, "model"),
    ("POST", "/v1/chat/completions", {"model": "base"}, 400, "messages"),
    ("POST", "/v1/chat/completions", {"model": "base", "messages": []}, 400, "messages"),
    (
        "POST",
        "/v1/chat/completions",
        {"model": "base", "messages": [{"content": "x"}]},
        400,
        "messages.0.role",
    ),
    (
        "POST",
        "/v1/chat/completions",
        {"model": "base", "messages": HELLO, "temperature": 9},
        400,
        "temperature",
    ),
    ("POST", "/v1/chat/completions", {"model": "base", "messages": HELLO, "wings": 2}, 400, "wings"),
    (
        "POST",
        "/v1/chat/completions",
        b'{"model": "base", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        400,
        "temperature",
    ),
    ("POST", "/v1/chat/completions", b'{"model": "base", "x": "' + b"x" * 70_000 + b'"}', 413, "body"),
    ("POST", "/v1/completions", {"model": "base"}, 400, "prompt"),
    ("POST", "/v1/completions", {"model": "base", "prompt": {"a": 1}}, 400, "prompt"),
    ("POST", "/v1/completions", {"model": "nobody", "prompt": "x"}, 404, "model"),
    ("GET", "/v1/chat/completions", None, 405, None),
    ("GET", "/v1/nothing", None, 404, None),
    ("GET", "/v1/models/nobody", None, 404, "model"),
    ("GET", "/v1/adapters/nobody", None, 404, "name"),
    ("DELETE", "/v1/adapters/nobody", None, 404, "name"),
    ("GET", "/v1/adapters/nobody/versions/1", None, 404, "name"),
    ("GET", "/v1/adapters/nobody/versions/first", None, 400, "number"),
    ("POST", "/v1/adapters/nobody/versions/1/activate", None, 404, "name"),
    ("POST", "/v1/adapters/base/versions", b"x", 400, "name"),
    ("POST", "/v1/adapters/tiny/versions", b"x", 400, "name"),
    ("POST", "/v1/adapters/.hidden/versions", b"x", 400, "name"),
    ("POST", "/v1/adapters/a%20b/versions", b"x", 400, "name"),
    ("POST", f"/v1/adapters/{'a' * 129}/versions", b"x", 400, "name"),
    ("POST", "/v1/adapters/argon/versions?activate=maybe", b"x", 400, "activate"),
    ("POST", "/v1/adapters/argon/versions", b"x", 400, "x-lanewise-config"),
]


def test_every_refusal_has_openai_shape(start: Any) -> None:
    with start(max_json_bytes=65_536) as server:
        for method, path, body, status, param in BAD_BODIES:
            sent = {"content": body} if isinstance(body, bytes) else {"json": body} if body else {}
            if status == 400 and isinstance(body, bytes) and body.startswith(b"[["):
                sent = {"content": b"[" * 60_000}
            response = server.http.request(method, path, **sent)
            told = (method, path, str(body)[:80], response.text[:300])
            assert response.status_code == status, told
            error = response.json()["error"]
            assert set(error) - {"details"} == {"message", "type", "param", "code"}, told
            assert error["message"], told
            assert error["type"], told
            assert error["param"] == param, told
            assert response.headers["x-request-id"], told
        assert server.ask("base").status_code == 200


def test_request_id_is_the_clients_if_sane(server: Any) -> None:
    def reply_id(asked: str) -> str:
        return server.http.get("/health", headers={"x-request-id": asked}).headers["x-request-id"]

    assert reply_id("trace-7.a:b_c") == "trace-7.a:b_c"
    for insane in ("", "a b", "x" * 200, "<script>"):
        assert reply_id(insane) != insane
        assert len(reply_id(insane)) == 32


def test_overload_is_429_with_retry_after(server: Any) -> None:
    server.engine.overloaded = True
    for stream in (False, True):
        response = server.ask("base", stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"


def test_failure_after_the_stream_began_is_an_error_event_without_done(server: Any, factors: Any) -> None:
    server.push("argon", factors())
    server.engine.fail_after = 3
    *_, last = events(server.ask("argon", stream=True).text)
    assert last["error"]["type"] == "engine_error"
    assert server.ask("argon").status_code == 500
    server.engine.fail_after = None
    assert server.http.get("/v1/adapters/argon/versions/1").json()["leases"] == 0


def test_unexpected_errors_are_500_without_internals(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> list[str]:
        raise RuntimeError("secret path")

    monkeypatch.setattr(server.engine, "_script", broken)
    for stream in (False, True):
        response = server.ask("base", stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_aborts_the_call_and_frees_the_lease(start: Any, factors: Any, stream: bool) -> None:
    with start(engine={"delay_s": 0.2}) as server:
        server.push("argon", factors())
        body = {"model": "argon", "messages": HELLO, "stream": stream}
        with httpx.Client(base_url=server.url, timeout=0.3) as hasty:
            if stream:
                with hasty.stream("POST", "/v1/chat/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    hasty.post("/v1/chat/completions", json=body)
        wait_until(lambda: server.engine.running == 0, within_s=1)
        assert len(server.engine.aborts) == 1
        wait_until(lambda: server.http.get("/v1/adapters/argon/versions/1").json()["leases"] == 0)
        wait_until(lambda: 'status="499"' in server.http.get("/metrics").text)


@contextmanager
def unread_stream(url: str, model: str) -> Generator[socket.socket]:
    """A client that asks for a stream and never reads it."""
    body = json.dumps({"model": model, "messages": HELLO, "stream": True}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        client.sendall(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        yield client


def says(token: str, times: int) -> Callable[[Any], list[str]]:
    return lambda _: [token] * times


def leases(server: Any) -> int:
    return server.http.get("/v1/adapters/argon/versions/1").json()["leases"]


def test_a_client_that_does_not_read_holds_no_lane_once_the_engine_has_ended(
    start: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(engine={"max_lanes": 1, "delay_s": 0.01}, lane_wait_s=2) as server:
        monkeypatch.setattr(server.engine, "_script", says("x" * 200_000, 40))
        server.push("argon", factors())
        with unread_stream(server.url, "argon") as client:
            wait_until(lambda: server.engine.running == 1)
            wait_until(lambda: server.engine.running == 0)
            wait_until(lambda: leases(server) == 0, within_s=1)
            assert "lanewise_requests_running 1.0" in server.http.get("/metrics").text
            assert server.push("neon", factors(variant=1)).status_code == 201  # it takes the only lane
            assert server.engine.aborts == []
            read = b""
            while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                read = read[-100:] + client.recv(1 << 20)
        wait_until(lambda: "lanewise_requests_running 0.0" in server.http.get("/metrics").text)
        assert (
            'adapter="argon",route="chat.completions",status="200"} 1.0' in server.http.get("/metrics").text
        )


def test_a_stream_that_nobody_reads_is_ended_in_time(
    start: Any, factors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(engine={"delay_s": 0.01}, client_stall_s=0.3) as server:
        monkeypatch.setattr(server.engine, "_script", says("x" * 200_000, 1000))
        server.push("argon", factors())
        with unread_stream(server.url, "argon"):
            wait_until(lambda: server.engine.running == 1)
            wait_until(lambda: server.engine.running == 0)
            assert len(server.engine.aborts) == 1
            assert leases(server) == 0
            wait_until(lambda: 'status="499"' in server.http.get("/metrics").text)


def test_a_slow_stream_is_not_taken_for_a_stalled_client(start: Any, said_by: Any) -> None:
    with start(engine={"delay_s": 0.06}, client_stall_s=0.03) as server:
        *chunks, done = events(server.ask("base", stream=True).text)
        assert done == "[DONE]"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == said_by("base")


def test_health_and_readiness(server: Any) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
    server.engine.die()
    assert server.http.get("/health").status_code == 500
    assert server.http.get("/ready").status_code == 503


def test_metrics_count_what_happened(server: Any, factors: Any) -> None:
    server.push("argon", factors())
    server.push("argon", factors(rank=999))
    server.ask("argon")
    server.ask("argon", stream=True)
    server.ask("nobody")
    text = server.http.get("/metrics").text
    assert 'lanewise_requests_total{adapter="argon",route="chat.completions",status="200"} 2.0' in text
    assert 'lanewise_requests_total{adapter="unknown",route="chat.completions",status="404"} 1.0' in text
    assert 'lanewise_tokens_total{adapter="argon",kind="completion"} 24.0' in text
    assert 'lanewise_pushes_total{outcome="stored"} 1.0' in text
    assert 'lanewise_pushes_total{outcome="invalid_adapter"} 1.0' in text
    assert 'lanewise_activations_total{adapter="argon"} 1.0' in text
    assert "lanewise_lanes_loaded 1.0" in text
    assert "lanewise_requests_running 0.0" in text


def test_docs_describe_the_bodies(server: Any) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    chat = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages"} <= set(chat["required"])
    assert "content" in chat["properties"]["messages"]["items"]["properties"]
    assert "$ref" not in str(chat)
    assert "application/octet-stream" in str(paths["/v1/adapters/{name}/versions"]["post"]["requestBody"])
    assert server.http.get("/docs").status_code == 200
