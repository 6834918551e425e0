"""Regular expressions from an adapter's config, matched as PEFT does but within a time limit.

They come from outside, and some, like `(a+)+$`, would keep Python's own `re` busy for ever. The `regex`
package takes the same expressions and a timeout.
"""

import re
import reprlib
import time
from collections.abc import Iterable

import regex

from .errors import Finding, InvalidAdapter

MAX_LENGTH = 4096
_BUDGET_S = 2.0


class Patterns:
    """Some expressions of one config field; all their matching together may take two seconds."""

    def __init__(self, where: str, expressions: Iterable[str], *, whole: bool = False) -> None:
        """`where` names the config field in errors. Raises InvalidAdapter naming a broken expression.

        An expression matches a `whole` path, as in `target_modules`, or else also what follows one of a
        path's dots, as in `rank_pattern`.
        """
        self._where = where
        self._frame = "(?:{})$" if whole else r"(.*\.)?({})$"
        self._compiled: dict[str, regex.Pattern[str]] = {}
        self._left = _BUDGET_S
        for expression in expressions:
            self._compiled[expression] = self._compile(expression)

    def first_match(self, path: str) -> str | None:
        """The first expression that matches. Raises InvalidAdapter when time is up."""
        if not self._compiled:  # most configs; asked for every tensor
            return None
        return next((e for e, p in self._compiled.items() if self._matches(e, p, path)), None)

    def _compile(self, expression: str) -> regex.Pattern[str]:
        try:
            if len(expression) > MAX_LENGTH:
                raise ValueError(f"longer than {MAX_LENGTH} characters")
            re.compile(expression)
            framed = self._frame.format(expression)
            re.compile(framed)  # PEFT's own dialect: `regex` takes more than it
            return regex.compile(framed)
        except (ValueError, re.error, regex.error, RecursionError, OverflowError) as error:
            problem = f"{reprlib.repr(expression)} is not a regular expression ({error})"
            raise InvalidAdapter([Finding(self._where, problem, "one as PEFT takes it")]) from error

    def _matches(self, expression: str, compiled: regex.Pattern[str], path: str) -> bool:
        started = time.perf_counter()
        try:
            return compiled.match(path, timeout=max(self._left, 1e-3)) is not None
        except TimeoutError as error:
            problem = f"{reprlib.repr(expression)} takes too long to match"
            raise InvalidAdapter([Finding(self._where, problem, "a simpler regular expression")]) from error
        finally:
            self._left -= time.perf_counter() - started
