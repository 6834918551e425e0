"""How a server process ends: streams finish, a second signal is final, `kill -9` costs nothing stored."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

SERVER = """
import sys
from pathlib import Path
from lanewise.loaders import Inventory
from lanewise.server.engines.fake import FakeEngine
from lanewise.server.serve import serve
from lanewise.server.settings import Settings

data, grace_s, delay_s, config = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), eval(sys.argv[4])
script = lambda call: [f"{call.lane.key if call.lane else 'base'}:{i} " for i in range(12)]
engine = FakeEngine(Inventory.from_config(config), script, delay_s=delay_s)
settings = Settings(base=data, base_name="tiny", data=data, port=0, grace_s=grace_s)
serve(engine, settings, lambda url: print("serves at", url, flush=True))
"""
Launch = Callable[..., Any]


@pytest.fixture
def launch(tmp_path: Path, base_config: dict[str, Any]) -> Launch:
    """Starts a server process with a scripted engine; the block gets the process and its URL."""

    @contextmanager
    def launched(grace_s: float = 10, delay_s: float = 0.05) -> Generator[tuple[subprocess.Popen[str], str]]:
        arguments = [str(tmp_path / "data"), str(grace_s), str(delay_s), repr(base_config)]
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip().rpartition(" ")[2]
        finally:
            process.kill()
            process.communicate()

    return launched


def stream(url: str) -> Iterator[str]:
    """The data of a stream's events, one by one."""
    body = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=20) as response:
        for line in response.iter_lines():
            if line:
                yield line.removeprefix("data: ")


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_streams_finish_and_exits_0(launch: Launch, sig: signal.Signals) -> None:
    with launch() as (process, url):
        events = stream(url)
        next(events)
        process.send_signal(sig)
        *chunks, done = events
        assert done == "[DONE]"
        said = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert "".join(said) == "".join(f"base:{i} " for i in range(12))
        assert process.wait(10) == 0


def test_streams_longer_than_the_grace_end_with_an_error_event(launch: Launch) -> None:
    with launch(grace_s=0.3, delay_s=0.2) as (process, url):
        events = stream(url)
        next(events)
        process.send_signal(signal.SIGTERM)
        *_, last = events
        assert json.loads(last)["error"]["type"] == "unavailable_error"
        assert process.wait(10) == 0


def test_stopping_server_refuses_new_requests(launch: Launch) -> None:
    with launch(delay_s=0.2) as (process, url), httpx.Client(base_url=url) as client:
        assert client.get("/ready").status_code == 200
        events = stream(url)
        next(events)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.4)
        with pytest.raises(httpx.TransportError):
            client.get("/ready")
        assert list(events)[-1] == "[DONE]"


def test_second_signal_ends_at_once(launch: Launch) -> None:
    with launch(grace_s=60, delay_s=5) as (process, url):
        events = stream(url)
        next(events)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            list(events)


def test_kill_9_in_mid_push_leaves_a_clean_start(launch: Launch, factors: Any, tmp_path: Path) -> None:
    def half() -> Generator[bytes]:
        yield factors(variant=1).body[:500]
        sent.set()
        time.sleep(2)

    sent = threading.Event()
    with launch() as (process, url):
        versions = f"{url}/v1/adapters/argon/versions"
        kept = httpx.post(f"{versions}?activate=true", content=factors().body, headers=factors().headers)
        assert kept.status_code == 201

        def push() -> None:
            with pytest.raises(httpx.TransportError):
                httpx.post(versions, content=half(), headers=factors().headers)

        thread = threading.Thread(target=push)
        thread.start()
        sent.wait(10)
        incoming = tmp_path / "data" / "incoming"
        deadline = time.monotonic() + 5
        while not list(incoming.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        thread.join()
    assert list(incoming.iterdir())
    with launch() as (_, url):
        assert list(incoming.iterdir()) == []
        assert httpx.get(f"{url}/v1/adapters/argon").json()["versions"] == [1]
        body = {"model": "argon", "prompt": "Hi"}
        assert httpx.post(f"{url}/v1/completions", json=body).headers["x-lanewise-version"] == "1"


def test_busy_port_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "lanewise.server", "serve", "--base", str(tmp_path), "--port", port]
        command += ["--data", str(tmp_path / "data")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
