"""What a call to the server can end in.

ClientError
├── ConnectionFailed     no answer: refused, timed out, cut off; the request may be tried again
└── ServerRefused        the server answered with an error: status, type, param, details
"""

from collections.abc import Sequence


class ClientError(Exception):
    """Base of everything `lanewise.clients` raises."""


class ConnectionFailed(ClientError):
    """No answer came: refused, timed out or cut off. The request may be tried again."""


class ServerRefused(ClientError):
    """The server answered with an error, whose fields these are."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,  # noqa: A002  (the field's name in OpenAI's error object)
        param: str | None = None,
        code: str | None = None,
        details: Sequence[dict[str, str]] = (),
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.details = tuple(details)
