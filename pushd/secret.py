"""One type for every text that must never be printed (PUSH-072, PUSH-096)."""

from __future__ import annotations

import hmac
from typing import NoReturn, final

REDACTED = "<redacted>"


@final
class Secret:
    """A text that shows itself only when asked by `reveal()`.

    A plain `str` ends up in a repr, an f-string or a traceback by accident; `reveal` in the source is easy to find.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself. Hand it to the function that needs it and keep no copy."""
        return self._text

    def __repr__(self) -> str:
        return REDACTED

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        # object's own __format__ raises on a width, and a log line should not fail because it holds a secret.
        return format(REDACTED, spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not serialized")
