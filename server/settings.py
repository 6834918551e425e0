"""Everything that can be set, from the environment (LANEWISE_…) or the command line."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 2**20


class Settings(BaseSettings):
    """Settings of one server. Sizes are in bytes, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="LANEWISE_", frozen=True, extra="forbid", use_attribute_docstrings=True
    )

    base: Path
    """Folder of the base checkpoint."""
    base_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name to serve the base under beside `base`; its folder's name unless given."""
    adapters: dict[str, Path] = {}
    """Adapter folder to store and activate at start, by name (as JSON in the environment)."""
    data: Path = Path("lanewise-data")
    """Folder for stored adapters. Nothing is written outside it."""

    host: str = "127.0.0.1"
    """Address to listen on. There are no keys yet: beyond loopback anyone who reaches it can push."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    grace_s: Annotated[float, Field(ge=0)] = 30
    """Seconds that running requests may go on after a signal to stop."""

    device: str = "cpu"
    """Where the model runs: cpu, cuda or cuda:N."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads for the model; torch decides unless given. A tiny base or a shared machine wants 1."""
    expert_layout: Literal["shared_outer", "stacked"] = "shared_outer"
    """How lanes keep expert factors: shared_outer; or stacked, which takes per-expert adapters too."""
    max_lanes: Annotated[int, Field(ge=1)] = 16
    """Adapter versions resident at the same time."""
    max_rank: Annotated[int, Field(ge=1)] = 64
    """Highest rank taken; every lane has room for it."""
    max_running: Annotated[int, Field(ge=1)] = 16
    """Answers made at the same time."""
    max_waiting: Annotated[int, Field(ge=0)] = 256
    """Answers queued before requests are refused with 429."""
    client_stall_s: Annotated[float, Field(gt=0)] = 60
    """Seconds that a stream waits for a client that does not read, before it is ended."""

    body_stall_s: Annotated[float, Field(gt=0)] = 30
    """Longest silence, in seconds, while a request's body arrives."""

    lane_wait_s: Annotated[float, Field(gt=0)] = 30
    """Seconds a request waits for a lane before it is refused with 429."""
    max_pushes: Annotated[int, Field(ge=1)] = 16
    """Pushes received at the same time."""
    max_push_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * MIB
    """Largest push, in bytes."""
    max_json_bytes: Annotated[int, Field(ge=1)] = 4 * MIB
    """Largest JSON body, in bytes."""

    @property
    def served_base_name(self) -> str:
        return self.base_name or self.base.resolve().name
