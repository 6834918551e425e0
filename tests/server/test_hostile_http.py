"""Requests made to break the server's edge: each ends soon, in a small typed error, and holds up nobody."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

MANY = 200_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def many(item: str) -> str:
    return "[" + ",".join([item] * MANY) + "]"


def members(value: str) -> str:
    return "{" + ",".join(f'"{i}":{value}' for i in range(MANY)) + "}"


def chat(**fields: str) -> str:
    """A chat request from fields that are JSON already."""
    usual = {"model": '"base"', "messages": '[{"role":"user","content":"Hi"}]'} | fields
    return "{" + ",".join(f'"{name}":{value}' for name, value in usual.items()) + "}"


def completion(**fields: str) -> str:
    usual = {"model": '"base"', "prompt": '"Hi"'} | fields
    return "{" + ",".join(f'"{name}":{value}' for name, value in usual.items()) + "}"


@contextmanager
def connected(url: str) -> Generator[socket.socket]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        yield connection


def begin(connection: socket.socket, path: str, headers: dict[str, str]) -> None:
    """Send a request's head and three bytes of the thousand that it promises."""
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-length: 1000"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\nabc")


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of the answer; the server must close the connection after it."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(messages=many("1")), "messages"),
        (CHAT, chat(messages=many('{"role":"user"}')), "messages"),
        (CHAT, chat(messages='[{"role":"user","content":' + many("1") + "}]"), "messages.0.content"),
        (CHAT, chat(messages='[{"role":"user","content":[' + members("1") + "]}]"), "messages.0.content"),
        (CHAT, chat(stream_options=members("1")), "stream_options"),
        (CHAT, chat(logit_bias=members("[]")), "logit_bias"),
        (CHAT, chat(metadata=members("1")), "metadata"),
        (CHAT, chat(tools=many("1")), "tools"),
        (CHAT, chat(stop=many("1")), "stop"),
        (CHAT, chat(stop_token_ids=many('"a"')), "stop_token_ids"),
        (CHAT, members("1"), None),
        (COMPLETION, completion(prompt=many("{}")), "prompt"),
        (COMPLETION, completion(prompt=many("[1]")), "prompt"),
        (COMPLETION, completion(prompt=many('"a"')), "prompt"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_body_of_faults_gets_a_short_answer_soon(server: Any, path: str, body: str, param: str) -> None:
    started = time.monotonic()
    response = server.http.post(path, content=body)
    assert time.monotonic() - started < 3
    assert response.status_code == 400
    assert len(response.content) < 10_000
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param or "")
    assert len(error.get("details", [])) <= 20


def test_what_is_left_out_is_counted(server: Any) -> None:
    unknown = {f"x{i}": 1 for i in range(40)}
    error = server.ask("base", **unknown).json()["error"]
    assert "(and 39 more)" in error["message"]
    assert len(error["details"]) == 20


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"top_k": 10**400}),
        (CHAT, {"top_k": 2**31}),
        (CHAT, {"max_tokens": 10**400}),
        (CHAT, {"max_completion_tokens": 2**31}),
        (CHAT, {"n": 10**400}),
        (CHAT, {"seed": 10**400}),
        (CHAT, {"top_logprobs": 10**400}),
        (CHAT, {"temperature": 10**400}),
        (CHAT, {"logit_bias": {"1": 10**400}}),
        (CHAT, {"logit_bias": {"1": 101}}),
        (CHAT, {"logit_bias": {"9" * 50: 1}}),
        (CHAT, {"stop_token_ids": [10**400]}),
        (CHAT, {"stop_token_ids": [-1]}),
        (COMPLETION, {"prompt": [10**400]}),
        (COMPLETION, {"prompt": [[10**400]]}),
        (COMPLETION, {"max_tokens": 2**31}),
        (COMPLETION, {"best_of": 10**400}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_number_is_bounded(server: Any, path: str, fields: dict[str, Any]) -> None:
    usual = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    response = server.http.post(path, json={"model": "base"} | usual | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(next(iter(fields)))
    assert len(response.content) < 2000


def test_an_image_is_refused_with_what_is_accepted(server: Any) -> None:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    body = {"model": "base", "messages": [{"role": "user", "content": content}]}
    error = server.http.post(CHAT, json=body).json()["error"]
    assert error["param"] == "messages.0.content"
    assert "'image_url'; expected a string, or parts of type text" in error["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/adapters/argon/versions"])
def test_a_body_that_stops_arriving_is_given_up(start: Any, factors: Any, path: str) -> None:
    with start(body_stall_s=0.3, max_pushes=1) as running:
        with connected(running.url) as connection:
            begin(connection, path, factors().headers)
            status, error = answer(connection)
        assert (status, error["type"]) == (408, "invalid_request_error")
        assert "0.3 s" in error["message"]
        assert running.push("argon", factors()).status_code == 201  # its place is free again


def test_a_slow_body_is_taken(start: Any, factors: Any) -> None:
    body = factors().body

    def slowly() -> Generator[bytes]:
        for i in range(0, len(body), 1000):
            yield body[i : i + 1000]
            time.sleep(0.15)

    with start(body_stall_s=0.5) as running:
        url = "/v1/adapters/argon/versions"
        pushed = running.http.post(url, content=slowly(), headers=factors().headers)
        assert pushed.status_code == 201, pushed.text


@pytest.mark.parametrize("path", [CHAT, "/v1/adapters/argon/versions"])
def test_a_server_that_stops_does_not_wait_for_bodies(start: Any, factors: Any, path: str) -> None:
    with ExitStack() as open_after:
        with start(grace_s=20) as running:
            connection = open_after.enter_context(connected(running.url))
            begin(connection, path, factors().headers)
            time.sleep(0.2)
            stopped = time.monotonic()
        assert time.monotonic() - stopped < 3
        status, error = answer(connection)
    assert (status, error["type"], error["code"]) == (503, "unavailable_error", "stopping")


def test_headers_are_bounded(server: Any) -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ")
        for _ in range(64):
            connection.sendall(b"a" * 2**20)
            time.sleep(0.01)

    with connected(server.url) as connection, pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
        flood(connection)  # the server hangs up
    assert server.http.get("/health").status_code == 200


def test_what_is_not_http_is_answered_400(server: Any) -> None:
    with connected(server.url) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_the_config_header_is_utf8(server: Any, factors: Any) -> None:
    url = "/v1/adapters/argon/versions"
    config = factors().config | {"author": "Zoë 雪"}

    def push(header: bytes) -> httpx.Response:
        return server.http.post(url, content=factors().body, headers={"x-lanewise-config": header})

    raw = push(json.dumps(config, ensure_ascii=False).encode())
    escaped = push(json.dumps(config).encode())
    assert (raw.status_code, escaped.status_code) == (201, 201)
    assert raw.json()["digest"] == escaped.json()["digest"]

    broken = push(json.dumps(config, ensure_ascii=False).encode("latin-1", "replace"))
    assert broken.status_code == 400
    assert broken.json()["error"]["param"] == "x-lanewise-config"


def test_probes_may_ask_with_head(server: Any) -> None:
    for path in ("/health", "/ready"):
        response = server.http.head(path)
        assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/nowhere", 404),
        ("DELETE", "/v1/models", 405),
        ("BREW", "/health", 405),
    ],
)
def test_unknown_paths_and_methods_are_named(server: Any, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_host_that_is_nowhere_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lanewise.server", "serve", "--base", str(tmp_path)]
    command += ["--data", str(tmp_path / "data"), "--host", "nowhere.invalid"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "nowhere.invalid" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_refused_push_lists_some_findings_and_counts_all(server: Any, factors: Any) -> None:
    import torch

    tensors = {f"unknown.{i}.lora_A.weight": torch.ones(1, 1) for i in range(50)}
    response = server.push("argon", factors(tensors=tensors))
    assert response.status_code == 422
    error = response.json()["error"]
    assert len(error["details"]) == 20
    assert "more)" in error["message"]
