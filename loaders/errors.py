"""What can be wrong with files. One finding says what was wrong, where, and what was expected.

LoaderError
├── UnsafeFile          the bytes are not a well-formed safetensors file, or exceed a limit
├── UnsupportedBase     a base checkpoint or config lanewise cannot serve
└── InvalidAdapter      an adapter that does not fit the base; carries every finding, not only the first
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One problem: `where` is a tensor name, a config field or a file."""

    where: str
    problem: str
    expected: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; expected {self.expected}"


class LoaderError(Exception):
    """Base of everything this package raises about a file."""


class UnsafeFile(LoaderError):
    """The bytes are not a well-formed safetensors file, or exceed a limit."""


class UnsupportedBase(LoaderError):
    """The base checkpoint or its config is one lanewise cannot serve."""


class InvalidAdapter(LoaderError):
    """The adapter does not fit the base. `findings` has every problem found, in file order."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        assert findings, "an invalid adapter has at least one finding"
        self.findings = tuple(findings)
        rest = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(f"{findings[0]}{rest}")
