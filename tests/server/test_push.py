"""Pushes, activations and deletions over HTTP, while requests run."""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@contextmanager
def streaming(url: str, model: str) -> Generator[Callable[[], str]]:
    """A stream whose first chunk has arrived; the function reads the rest and returns what was said."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
        assert response.status_code == 200, response.read()
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)

        def rest() -> str:
            *data, done = [first, *lines]
            assert done == "data: [DONE]", done
            chunks = [json.loads(line.removeprefix("data: ")) for line in data]
            return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

        yield rest


def test_push_answers_with_the_version(server: Any, factors: Any) -> None:
    push = factors()
    response = server.push("argon", push, activate=False)
    assert response.status_code == 201
    canonical = json.dumps(push.config, sort_keys=True, separators=(",", ":")).encode()
    version = response.json()
    assert version["digest"] == hashlib.sha256(canonical + b"\n" + push.body).hexdigest()
    assert (version["adapter"], version["version"], version["state"], version["rank"]) == (
        "argon",
        1,
        "stored",
        2,
    )
    assert server.push("argon", factors(variant=1)).json()["version"] == 2
    assert server.http.get("/v1/adapters/argon").json()["active"] == 2
    states = [v["state"] for v in server.http.get("/v1/adapters/argon/versions").json()["data"]]
    assert states == ["stored", "active"]
    assert server.http.get("/v1/adapters/argon/versions/1").json() == version
    assert [a["name"] for a in server.http.get("/v1/adapters").json()["data"]] == ["argon"]


def test_a_refused_push_changes_nothing_and_names_the_tensor(
    server: Any, factors: Any, said_by: Any, subtests: pytest.Subtests
) -> None:
    server.push("argon", factors())
    usual = {A: torch.ones(2, 128), B: torch.ones(256, 2)}
    nan = torch.ones(256, 2)
    nan[7, 1] = float("nan")
    good = factors(variant=1)
    refused: list[tuple[str, bytes, dict[str, str], int, str]] = [
        ("truncated", good.body[:-100], good.headers, 422, "adapter_model.safetensors"),
        ("cut in its header", good.body[:20], good.headers, 422, "adapter_model.safetensors"),
        ("empty", b"", good.headers, 422, "adapter_model.safetensors"),
        ("pickle", b"\x80\x04.", good.headers, 422, "adapter_model.safetensors"),
        ("mis-shaped", factors(tensors=usual | {A: torch.ones(2, 64)}).body, good.headers, 422, A),
        ("NaN", factors(tensors=usual | {B: nan}).body, good.headers, 422, B),
        ("half a pair", factors(tensors={A: torch.ones(2, 128)}).body, good.headers, 422, ""),
        ("integers", factors(tensors=usual | {A: torch.ones(2, 128).int()}).body, good.headers, 422, A),
        ("over-rank", factors(rank=65).body, factors(rank=65).headers, 422, "r"),
        ("wrong digest", good.body, good.headers | {"x-lanewise-digest": "0" * 64}, 422, "x-lanewise-digest"),
        ("config not JSON", good.body, {"x-lanewise-config": "{"}, 422, "x-lanewise-config"),
        ("config a list", good.body, {"x-lanewise-config": "[]"}, 422, "x-lanewise-config"),
        ("DoRA", good.body, factors(changes={"use_dora": True}).headers, 422, "use_dora"),
        ("no config", good.body, {}, 400, "x-lanewise-config"),
    ]
    before = tree(server.data)
    for what, body, headers, status, param in refused:
        with subtests.test(what):
            url = "/v1/adapters/argon/versions?activate=true"
            response = server.http.post(url, content=body, headers=headers)
            error = response.json()["error"]
            assert response.status_code == status, error
            if param:
                assert error["param"] == param
                assert param in error["message"] or status == 400 or param == "x-lanewise-digest"
            assert tree(server.data) == before
            assert server.engine.loads == ["argon@1"]
    assert server.said("argon") == said_by("argon@1")
    assert server.push("argon", factors(variant=2)).json()["version"] == 2


def test_too_large_push_is_413(start: Any, factors: Any) -> None:
    with start(max_push_bytes=1000) as server:
        assert server.push("argon", factors()).status_code == 413
        chunks = (b"x" * 300 for _ in range(10))  # no content-length
        response = server.http.post("/v1/adapters/argon/versions", content=chunks, headers=factors().headers)
        assert response.status_code == 413
        assert list((server.data / "incoming").iterdir()) == []


def test_client_gone_in_mid_push_leaves_nothing(server: Any, factors: Any) -> None:
    def body() -> Generator[bytes]:
        yield factors().body[:500]
        raise ConnectionAbortedError

    headers = factors().headers | {"content-length": str(len(factors().body))}
    with httpx.Client() as client, pytest.raises(ConnectionAbortedError):
        client.post(f"{server.url}/v1/adapters/argon/versions", content=body(), headers=headers)
    for _ in range(100):
        if 'lanewise_pushes_total{outcome="client_gone"} 1.0' in server.http.get("/metrics").text:
            break
    assert list((server.data / "incoming").iterdir()) == []
    assert server.http.get("/v1/adapters").json()["data"] == []


def test_a_request_keeps_the_version_it_started_with(start: Any, factors: Any, said_by: Any) -> None:
    with start(engine={"delay_s": 0.03}) as server:
        server.push("argon", factors())
        with streaming(server.url, "argon") as rest:
            server.push("argon", factors(variant=1))
            assert server.http.get("/v1/adapters/argon/versions/1").json()["state"] == "draining"
            assert server.said("argon") == said_by("argon@2")
            assert rest() == said_by("argon@1")
        back = server.http.post("/v1/adapters/argon/versions/1/activate")
        assert back.json()["state"] == "active"
        assert server.said("argon") == said_by("argon@1")


def test_sixteen_streams_during_pushes_each_get_their_version(start: Any, factors: Any, said_by: Any) -> None:
    names = ["argon", "neon", "xenon"]
    with start(engine={"delay_s": 0.01, "max_lanes": 40}) as server:
        for number, name in enumerate(names):
            server.push(name, factors(variant=number))
        stop = threading.Event()

        def push_on() -> int:
            count = 0
            while not stop.is_set():
                assert server.push("argon", factors(variant=count)).status_code == 201
                count += 1
            return count

        def ask(worker: int) -> set[str]:
            model = ["argon", "neon", "xenon", "base"][worker % 4]
            seen: set[str] = set()
            for _ in range(4):
                with streaming(server.url, model) as rest:
                    said = rest()
                version = said.split(":")[0]
                assert version.split("@")[0] == model
                assert said == said_by(version)
                seen.add(version)
            return seen

        with ThreadPoolExecutor(17) as threads:
            pushes = threads.submit(push_on)
            try:
                seen = set[str]().union(*threads.map(ask, range(16)))
            finally:
                stop.set()
            assert pushes.result() >= 3
        assert {"neon@1", "xenon@1", "base"} < seen
        assert len({key for key in seen if key.startswith("argon")}) >= 2
        assert server.engine.aborts == []
        assert server.engine.running == 0


def test_failed_load_leaves_the_old_version_active(server: Any, factors: Any, said_by: Any) -> None:
    from lanewise.server.errors import EngineFailure

    server.push("argon", factors())
    server.engine.refuse_load = EngineFailure("out of memory")
    response = server.push("argon", factors(variant=1))
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "out of memory (argon@2 is stored but not active)"
    assert server.said("argon") == said_by("argon@1")
    assert server.said("argon@2") == said_by("argon@2")


@pytest.mark.parametrize("activate", [True, False])
def test_what_no_lane_can_hold_is_not_stored(server: Any, factors: Any, activate: bool) -> None:
    server.engine.refuse_layouts = {"linear"}
    before = tree(server.data)
    for _ in range(2):
        response = server.push("argon", factors(), activate=activate)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_adapter")
    assert tree(server.data) == before
    assert server.engine.loads == []


def test_delete_while_running(start: Any, factors: Any, said_by: Any) -> None:
    with start(engine={"delay_s": 0.03}) as server:
        server.push("argon", factors())
        with streaming(server.url, "argon") as rest:
            assert server.http.delete("/v1/adapters/argon").json()["deleted"] is True
            assert server.ask("argon").status_code == 404
            assert server.ask("argon@1").status_code == 404
            assert server.engine.unloads == []
            assert rest() == said_by("argon@1")
        assert server.ask("base").status_code == 200
        assert server.engine.unloads == ["argon@1"]
        # The name may come back; the number never does.
        assert server.push("argon", factors(variant=1)).json()["version"] == 2


def test_the_active_version_is_deleted_only_with_its_adapter(server: Any, factors: Any) -> None:
    server.push("argon", factors())
    server.push("argon", factors(variant=1))
    refused = server.http.delete("/v1/adapters/argon/versions/2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_is_active")
    assert server.http.delete("/v1/adapters/argon/versions/1").json()["id"] == "argon@1"
    assert server.ask("argon@1").status_code == 404
    assert server.http.delete("/v1/adapters/argon/versions/2").status_code == 200
    assert server.http.get("/v1/adapters").json()["data"] == []


def test_versions_come_back_after_a_restart(start: Any, factors: Any, said_by: Any) -> None:
    with start() as server:
        server.push("argon", factors())
        kept = server.push("argon", factors(variant=1)).json()
        server.push("argon", factors(variant=2), activate=False)
        server.http.delete("/v1/adapters/argon/versions/3")
        server.push("neon", factors(variant=3), activate=False)
        before = tree(server.data)
    with start() as server:
        assert tree(server.data) == before
        assert server.engine.loads == ["argon@2"]
        assert server.said("argon") == said_by("argon@2")
        assert server.said("argon@1") == said_by("argon@1")
        again = server.http.get("/v1/adapters/argon/versions/2").json()
        assert again == kept
        assert server.http.get("/v1/adapters/neon").json()["active"] is None
        assert server.push("argon", factors(variant=4)).json()["version"] == 4


def test_preloaded_adapters_are_stored_once(start: Any, factors: Any, said_by: Any, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(factors().body)
    (folder / "adapter_config.json").write_text(json.dumps(factors().config))
    for _ in range(2):
        with start(adapters={"argon": folder}) as server:
            assert server.said("argon") == said_by("argon@1")
            assert server.http.get("/v1/adapters/argon").json()["versions"] == [1]


def test_a_restart_keeps_what_was_pushed_after_the_folder(
    start: Any, factors: Any, said_by: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(factors().config))
    (folder / "adapter_model.safetensors").write_bytes(factors().body)
    with start(adapters={"argon": folder}) as server:
        assert server.push("argon", factors(variant=1)).json()["version"] == 2
    with start(adapters={"argon": folder}) as server:
        assert server.said("argon") == said_by("argon@2")
        assert server.http.get("/v1/adapters/argon").json()["versions"] == [1, 2]
    (server.data / "adapters" / "argon" / "active").unlink()
    with start(adapters={"argon": folder}) as server:
        assert server.said("argon") == said_by("argon@1")
    (folder / "adapter_model.safetensors").write_bytes(factors(variant=2).body)
    with start(adapters={"argon": folder}) as server:
        assert server.said("argon") == said_by("argon@3")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("damage", ["{", "[]", None])
def test_a_damaged_active_version_is_named_and_the_rest_is_served(
    start: Any, factors: Any, said_by: Any, file: str, damage: str | None
) -> None:
    with start() as server:
        server.push("argon", factors())
        server.push("argon", factors(variant=1))
        server.push("neon", factors(variant=2))
        damaged = server.data / "adapters" / "argon" / "2" / file
    damaged.unlink()
    if damage is not None:
        damaged.write_text(damage)
    with start() as server:
        refused = server.ask("argon")
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "version_damaged")
        assert "argon@2" in refused.json()["error"]["message"]
        assert str(server.data) not in refused.text
        assert server.said("argon@1") == said_by("argon@1")
        assert server.said("neon") == said_by("neon@1")
        assert server.push("argon", factors(variant=1)).json()["version"] == 3
        assert server.said("argon") == said_by("argon@3")


def test_a_version_damaged_while_it_is_served(start: Any, factors: Any) -> None:
    with start(engine={"max_lanes": 1}) as server:
        server.push("argon", factors())
        server.push("neon", factors(variant=1))
        (server.data / "adapters" / "argon" / "1" / "adapter_config.json").write_text("{")
        for _ in range(2):
            refused = server.ask("argon")
            assert (refused.status_code, refused.json()["error"]["code"]) == (500, "version_damaged")
        assert server.http.post("/v1/adapters/argon/versions/1/activate").status_code == 500
        assert server.ask("neon").status_code == 200


def test_a_data_folder_that_goes_away_is_named(start: Any, factors: Any, said_by: Any) -> None:
    with start(engine={"max_lanes": 1}) as server:
        server.push("neon", factors(variant=1))
        server.push("argon", factors())
        shutil.rmtree(server.data)
        refused = [
            server.push("argon", factors(variant=2)),
            server.http.post("/v1/adapters/argon/versions/1/activate"),
            server.http.delete("/v1/adapters/argon"),
            server.http.delete("/v1/adapters/argon/versions/1"),
        ]
        for response in refused:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (507, "storage_failed"), error
            assert "No such file or directory" in error["message"]
            assert str(server.data) not in error["message"]
        assert server.said("argon") == said_by("argon@1")
        assert server.ask("neon").json()["error"]["code"] == "version_damaged"
        assert len(server.http.get("/v1/adapters").json()["data"]) == 2


def test_a_disk_that_fills_up_during_a_push_is_named(
    start: Any, factors: Any, said_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with start() as server:
        server.push("argon", factors())
        before = tree(server.data)
        with monkeypatch.context() as broken:
            broken.setattr("lanewise.server.api.bodies._append", full)
            response = server.push("argon", factors(variant=1))
        assert (response.status_code, response.json()["error"]["code"]) == (507, "storage_failed")
        assert "No space left on device" in response.json()["error"]["message"]
        assert tree(server.data) == before
        assert 'lanewise_pushes_total{outcome="storage_failed"} 1.0' in server.http.get("/metrics").text
        assert server.push("argon", factors(variant=1)).json()["version"] == 2
        assert server.said("argon") == said_by("argon@2")


@pytest.mark.parametrize("number", ["+1", "1.0", "01", "1_0", "%201", "0", "-1", "9" * 30, "%D9%A1"])
def test_a_version_has_one_spelling(server: Any, factors: Any, number: str) -> None:
    server.push("argon", factors())
    server.push("argon", factors(variant=1))
    url = f"/v1/adapters/argon/versions/{number}"
    for response in (server.http.get(url), server.http.post(f"{url}/activate"), server.http.delete(url)):
        assert (response.status_code, response.json()["error"]["param"]) == (400, "number")
    assert server.http.get("/v1/adapters/argon").json()["versions"] == [1, 2]


def test_nothing_is_written_outside_the_data_folder(start: Any, factors: Any, tmp_path: Path) -> None:
    with start() as server:
        server.push("argon", factors())
        server.http.post("/v1/adapters/..%2F..%2Fevil/versions", content=b"x", headers=factors().headers)
        server.http.post("/v1/adapters/../../evil/versions", content=b"x", headers=factors().headers)
        server.ask("argon")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert {path.name for path in (tmp_path / "data").iterdir()} == {
        "adapters",
        "incoming",
        "lock",
        "retired",
    }


def test_two_servers_do_not_share_a_data_folder(start: Any) -> None:
    from lanewise.server.errors import Conflict

    with start(), pytest.raises(Conflict, match="in use by another server"), start():
        pass


def test_pushes_are_limited_in_number(start: Any, factors: Any) -> None:
    with start(max_pushes=1) as server:
        started, go_on = threading.Event(), threading.Event()

        def slow_body() -> Generator[bytes]:
            yield factors().body[:100]
            started.set()
            go_on.wait(10)
            yield factors().body[100:]

        def slow_push() -> httpx.Response:
            with httpx.Client(base_url=server.url) as client:
                return client.post(
                    "/v1/adapters/argon/versions", content=slow_body(), headers=factors().headers
                )

        with ThreadPoolExecutor(1) as thread:
            slow = thread.submit(slow_push)
            started.wait(10)
            while "lanewise_pushes_running 1.0" not in server.http.get("/metrics").text:
                pass
            refused = server.push("neon", factors())
            go_on.set()
            assert slow.result().status_code == 201
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_pushes")
        assert refused.headers["retry-after"]


def test_a_misspelt_query_is_refused(server: Any, factors: Any) -> None:
    usual = factors()
    response = server.http.post(
        "/v1/adapters/argon/versions?activat=true", content=usual.body, headers=usual.headers
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "activat"
    assert server.http.get("/v1/adapters").json()["data"] == []
