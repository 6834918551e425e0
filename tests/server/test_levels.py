"""Memory, threads and open files return to their level, and a push is never held in memory."""

import gc
import os
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

MIB = 2**20


def level() -> tuple[int, int, int]:
    """Resident bytes, threads, open files of this process, server and client together."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_threads(), process.num_fds()


def test_a_thousand_requests_and_two_hundred_pushes_leave_no_trace(start: Any, factors: Any) -> None:
    with start(engine={"max_lanes": 3}) as server:

        def work(rounds: int) -> None:
            for number in range(rounds):
                name = f"a{number % 4}"  # one more than there are lanes
                assert server.push(name, factors(variant=number)).status_code == 201
                for model in (name, "base", f"{name}@1", "nobody", name):
                    server.ask(model, stream=number % 2 == 0)

        server.push("a0", factors())
        work(20)
        before = level()
        work(200)
        after = level()
        lanes = [v["leases"] for v in server.http.get("/v1/adapters/a0/versions").json()["data"]]
        assert set(lanes) == {0}
        assert len(server.engine.lanes) == 3
        assert server.engine.running == 0
    assert after[0] - before[0] < 24 * MIB
    assert after[1] <= before[1] + 2  # the worker pool may still be growing to its limit
    assert after[2] <= before[2] + 2


def test_a_large_push_is_not_held_in_memory(start: Any, factors: Any) -> None:
    with start() as server:
        chunk = os.urandom(MIB)
        peak, done = 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.005):
                peak = max(peak, level_rss())

        def body() -> Generator[bytes]:
            for _ in range(128):
                yield chunk

        server.push("warm", factors())
        before = level_rss()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(watch)
            response = server.http.post(
                "/v1/adapters/argon/versions", content=body(), headers=factors().headers
            )
            done.set()
        assert response.status_code == 422  # 128 MiB of noise is no safetensors file
        assert peak - before < 32 * MIB


def level_rss() -> int:
    return psutil.Process().memory_info().rss
