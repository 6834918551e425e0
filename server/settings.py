"""Everything that can be set, from the environment (LANEWISE_…) or the command line."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 2**20


class Settings(BaseSettings):
    """Settings of one server. Sizes are in bytes, times in seconds."""

    model_config = SettingsConfigDict(env_prefix="LANEWISE_", frozen=True, extra="forbid")

    base: Path
    """Folder of the base checkpoint."""
    base_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name the base is served under beside `base`; the folder's name unless given."""
    data: Path = Path("lanewise-data")
    """Folder the catalog owns. Nothing is written outside it."""
    adapters: dict[str, Path] = {}
    """Adapter folders to store and activate at start, by name."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free port."""
    grace_s: Annotated[float, Field(ge=0)] = 30
    """How long running requests may go on after a signal to stop."""

    engine: Literal["torch"] = "torch"
    device: str = "cpu"
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads for the model; torch decides unless given. A tiny or shared machine is faster with 1."""
    expert_layout: Literal["shared_outer", "stacked"] = "shared_outer"
    """How lanes keep expert factors; `stacked` also takes per-expert adapters and needs more memory."""
    max_lanes: Annotated[int, Field(ge=1)] = 16
    max_rank: Annotated[int, Field(ge=1)] = 64
    max_running: Annotated[int, Field(ge=1)] = 16
    max_waiting: Annotated[int, Field(ge=0)] = 256

    lane_wait_s: Annotated[float, Field(gt=0)] = 30
    """How long a request waits for a lane before it is refused with 429."""
    max_pushes: Annotated[int, Field(ge=1)] = 16
    """Pushes received at the same time."""
    max_push_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * MIB
    max_json_bytes: Annotated[int, Field(ge=1)] = 4 * MIB
    """Largest JSON body."""

    @property
    def served_base_name(self) -> str:
        return self.base_name or self.base.resolve().name
