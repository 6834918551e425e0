"""What the server asks of an engine. `torch` implements it; `fake` is for tests.

The seam is OpenAI's own: a request goes in as OpenAI's body, an answer comes back as OpenAI's chunks or
body. So an engine that already speaks it can pass bytes through, and those that make tokens share
`openai_output.py`. Choosing adapters, versions, lanes and leases is the server's, never the
engine's: by the time an engine sees a request its lane is decided and leased.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from lanewise.loaders import Adapter, Inventory

from ..api.schemas import ChatRequest, CompletionRequest

Chunk = dict[str, Any]
"""One OpenAI object, ready for JSON: a stream's chunk or a whole answer."""


@dataclass(frozen=True)
class Lane:
    """One version resident on an engine. Its key is unique for ever: an engine never re-binds it."""

    adapter: str
    version: int
    digest: str

    @property
    def key(self) -> str:
        return f"{self.adapter}@{self.version}"


@dataclass(frozen=True)
class Call:
    """One request on its way to an engine; `lane` None means the base was named."""

    id: str
    body: ChatRequest | CompletionRequest
    lane: Lane | None

    @property
    def provenance(self) -> Chunk:
        """Which bytes answer this call: the `lanewise` object of a body and of a stream's last chunk."""
        if self.lane is None:
            return {"adapter": "base", "version": None, "digest": None}
        return {"adapter": self.lane.adapter, "version": self.lane.version, "digest": self.lane.digest}


class Chunks(Protocol):
    """A stream's chunks. An async generator is one, if it has been started."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def __anext__(self) -> Chunk: ...

    async def aclose(self) -> None:
        """Abort what is left, also when nothing was read yet. Does nothing after the end."""
        ...


class Engine(Protocol):
    """Runs the model. All methods are called on the event loop; none may block it."""

    @property
    def inventory(self) -> Inventory:
        """The base's adaptable modules; what pushes are validated against."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and answer together, that one request may hold."""
        ...

    @property
    def max_lanes(self) -> int:
        """How many lanes fit at once, the base not counted."""
        ...

    @property
    def max_rank(self) -> int: ...

    @property
    def healthy(self) -> bool: ...

    async def start(self) -> None:
        """Load the base. Raises LoaderError or EngineFailure."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Finish what runs for at most `grace_s` seconds, then end the rest with `Unavailable`."""
        ...

    def check(self, adapter: Adapter) -> None:
        """Raise Unprocessable for an adapter that fits the base but none of this engine's lanes.

        Reads no factors: it is asked before a push is stored.
        """
        ...

    async def load(self, lane: Lane, adapter: Adapter) -> None:
        """Make the lane selectable. The caller has made sure that a slot is free."""
        ...

    async def unload(self, lane: Lane) -> None:
        """Free the lane's slot. The caller holds no lease on it."""
        ...

    async def stream(self, call: Call) -> Chunks:
        """Admit the request, then return its chunks. Closing them aborts it.

        Returns only once the request is accepted, so that the errors below still become an HTTP status;
        a later failure is raised from the iterator. Raises InvalidRequest (prompt too long, unsupported
        field), Overloaded (queue full), Unavailable (stopping).
        """
        ...

    async def complete(self, call: Call) -> Chunk:
        """The whole answer as one body. Cancelling aborts it. Raises what `stream` raises."""
        ...
