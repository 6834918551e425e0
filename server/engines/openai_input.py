"""From OpenAI's request bodies to tokens and rules, refusing by name what the torch engine cannot do."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..api.schemas import ChatRequest, CompletionRequest, Message
from ..errors import InvalidRequest
from .sampling import Sampling

# What a request may set of the template's own call; everything else of it is the server's to decide.
_TEMPLATE_SWITCHES = {"add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True)
class Question:
    """A request as the scheduler takes it: each prompt is answered `choices` times.

    `limits` has one entry per prompt: most tokens to answer with, the context length respected.
    """

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    choices: int
    sampling: Sampling
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    ignore_eos: bool

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices answer it."""
        return sum(map(len, self.prompts))

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.choices


class Reader:
    """Reads requests for one base: its tokenizer, its vocabulary of `vocab_size`, its context length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length

    def read(self, body: ChatRequest | CompletionRequest) -> Question:
        """Raises InvalidRequest naming the field that cannot be served."""
        if isinstance(body, ChatRequest):
            _refuse_in_chat(body)
            prompts = [self._chat_prompt(body)]
        else:
            _refuse_in_completion(body)
            prompts = self._completion_prompts(body)
        return Question(
            prompts=prompts,
            limits=[self._limit(prompt, body.answer_limit) for prompt in prompts],
            choices=body.choices,
            sampling=self._sampling(body),
            stops=tuple(body.stop_strings),
            stop_tokens=frozenset(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
        )

    def _chat_prompt(self, body: ChatRequest) -> list[int]:
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "this base has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        arguments = _template_arguments(body)
        messages = [_template_message(message) for message in body.messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the base's chat template refused the messages: {error}", param="messages"
            ) from error
        assert isinstance(text, str), "one conversation renders to one text"
        return self._encode(text, special_tokens=False)  # the template writes them itself

    def _completion_prompts(self, body: CompletionRequest) -> list[list[int]]:
        prompt = body.prompt
        if isinstance(prompt, str):
            return [self._encode(prompt)]
        if not prompt:
            raise InvalidRequest("prompt is an empty list; give a text or token ids", param="prompt")
        if isinstance(prompt[0], int):
            return [self._checked(cast(list[int], prompt))]
        return [
            self._encode(item) if isinstance(item, str) else self._checked(item)
            for item in cast(list[str] | list[list[int]], prompt)
        ]

    def _encode(self, text: str, special_tokens: bool = True) -> list[int]:
        # `verbose` would warn on our side about a prompt whose refusal the client reads.
        return self._tokenizer.encode(text, add_special_tokens=special_tokens, verbose=False)

    def _checked(self, tokens: list[int]) -> list[int]:
        self._check_vocabulary(tokens, "prompt")
        return tokens

    def _check_vocabulary(self, tokens: Sequence[int], param: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise InvalidRequest(
                    f"token {token} is not in the base's vocabulary; expected 0 to {self._vocab_size - 1}",
                    param=param,
                )

    def _limit(self, prompt: Sequence[int], wanted: int | None) -> int:
        if not prompt:
            raise InvalidRequest("the prompt has no tokens; give at least one", param="prompt")
        room = self._context_length - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; with one to answer, the base's context holds "
                f"{self._context_length - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        return min(wanted or room, room)

    def _sampling(self, body: ChatRequest | CompletionRequest) -> Sampling:
        if isinstance(body, ChatRequest):
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
        else:
            logprobs = body.logprobs
        return Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=self._logit_bias(body.logit_bias or {}),
            seed=body.seed,
            logprobs=logprobs,
        )

    def _logit_bias(self, bias: Mapping[str, float]) -> dict[int, float]:
        try:
            parsed = {int(token): value for token, value in bias.items()}
        except ValueError as error:
            raise InvalidRequest(
                f"logit_bias has a key that is no token id: {error}", param="logit_bias"
            ) from error
        self._check_vocabulary(list(parsed), "logit_bias")
        return parsed


def _refuse_in_chat(body: ChatRequest) -> None:
    if body.tools or body.tool_choice not in (None, "none", "auto"):
        raise _unsupported("does not call tools", "tools" if body.tools else "tool_choice")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise _unsupported("does not constrain answers to a format other than text", "response_format")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def _refuse_in_completion(body: CompletionRequest) -> None:
    if body.echo:
        raise _unsupported("does not echo prompts", "echo")
    if body.suffix is not None:
        raise _unsupported("does not fill in before a suffix", "suffix")
    if body.best_of not in (None, body.choices):
        raise _unsupported(
            "does not pick the best of several answers; leave best_of out or equal to n", "best_of"
        )


def _unsupported(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"the torch engine {what}", param=param, code="unsupported_parameter")


def _template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates read it: text parts joined, absent fields left out."""
    fields = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        fields["content"] = "\n".join(part.text for part in message.content)
    return fields


def _template_arguments(body: ChatRequest) -> dict[str, Any]:
    arguments: dict[str, Any] = {"add_generation_prompt": True}
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
    for name, value in (body.chat_template_kwargs or {}).items():
        if name in _RESERVED:
            raise InvalidRequest(f"{name} is not the request's to set", param=f"chat_template_kwargs.{name}")
        arguments[name] = value
    return arguments


_RESERVED = (
    set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}
) - _TEMPLATE_SWITCHES
