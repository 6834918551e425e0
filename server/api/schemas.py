"""OpenAI's request bodies, and the objects our own routes answer with.

Requests are OpenAI's as far as an engine can act on them. Unknown fields are refused, not ignored.

Source: OpenAI's API reference for /v1/chat/completions and /v1/completions. Extensions that SGLang and vLLM
share and clients really send: top_k, min_p, stop_token_ids, ignore_eos, lora_path, chat_template_kwargs.
"""

from collections.abc import Sized
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_MESSAGES = 4096  # also the parts of one message
MAX_PROMPTS = 2048
MAX_TOOLS = 1024
MAX_BIASES = 4096
_MAX_FIELDS = 64  # of one object; ours have fewer than 40
_INT32 = 2**31  # every count and token id is below it


def _few(value: object, most: int = _MAX_FIELDS) -> object:
    """Refuse an object with too many members before each of them becomes an error of its own."""
    if isinstance(value, dict) and (found := len(cast(Sized, value))) > most:
        problem = "has {found} fields; expected at most {most}"
        raise PydanticCustomError("too_many_fields", problem, {"found": found, "most": most})
    return value


def _only_text(value: object) -> object:
    """Say what is accepted; pydantic would say that a list with an image in it is no string."""
    for part in cast(list[object], value) if isinstance(value, list) else ():
        if isinstance(part, dict) and (kind := cast(dict[str, object], part).get("type")) != "text":
            problem = "has a part of type {kind}; expected a string, or parts of type text only"
            raise PydanticCustomError("only_text", problem, {"kind": repr(kind)[:80]})
    return value


# A long list ends at its first bad item: what is wrong with the rest is the same, and costs seconds to say.
# The vocabulary bounds a prompt's tokens more closely, and says so better than four kinds of prompt can.
_Tokens = Annotated[list[Annotated[int, Field(ge=-_INT32, lt=_INT32)]], Field(fail_fast=True)]
_StopToken = Annotated[int, Field(ge=0, lt=_INT32)]
_Limit = Annotated[int, Field(ge=1, lt=_INT32)]
_BiasedToken = Annotated[str, Field(max_length=10)]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: object) -> object:
        return _few(value)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted and not done: obfuscation hides lengths from eavesdroppers


class _Sampling(_Body):
    model: Annotated[str, Field(min_length=1, max_length=512)]
    lora_path: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[_BiasedToken, _Bias], BeforeValidator(partial(_few, most=MAX_BIASES))] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[_StopToken], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = (
        None
    )
    ignore_eos: bool = False
    user: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stop_strings(self) -> list[str]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class PushQuery(_Body):
    """What a push's URL may say. Ignoring a misspelt `activate` would leave the old version serving."""

    activate: bool = False


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")  # tool_calls, name, …: whatever the chat template reads
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None,
        BeforeValidator(_only_text),
    ] = None


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None

    @property
    def answer_limit(self) -> int | None:
        """Most tokens to answer with; None means up to the context length."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Sampling):
    """POST /v1/completions. A prompt is a text or token ids; several make several answers."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | _Tokens
        | Annotated[list[_Tokens], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: _Limit | None = 16
    echo: bool = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def answer_limit(self) -> int | None:
        return self.max_tokens


class VersionObject(BaseModel):
    """One version of an adapter. `created` is in Unix seconds, `nbytes` counts the factors."""

    object: Literal["adapter.version"] = "adapter.version"
    adapter: str
    version: int
    digest: str
    state: str
    created: int
    rank: int
    layout: str
    nbytes: int
    leases: int


class AdapterObject(BaseModel):
    """An adapter; `active` is the number of its active version."""

    object: Literal["adapter"] = "adapter"
    name: str
    active: int | None
    versions: list[int]
    created: int


class VersionList(BaseModel):
    object: Literal["list"] = "list"
    data: list[VersionObject]


class AdapterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AdapterObject]


class Deleted(BaseModel):
    """`id` is the adapter, or adapter@version."""

    id: str
    object: Literal["adapter", "adapter.version"]
    deleted: Literal[True] = True


class Provenance(BaseModel):
    version: int
    digest: str


class ModelCard(BaseModel):
    """OpenAI's model object. `parent` is the base's name for adapters, as vLLM has it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["lanewise"] = "lanewise"
    root: str
    parent: str | None = None
    lanewise: Provenance | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
