"""What an examination of the configuration comes to, and the exception made of it.

A finding names keys, variables and files. It never holds a value: even a value of an ordinary key may have come from
an environment variable that was named by mistake (PUSH-072).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from attrs import frozen

from pushd.errors import ConfigError


class Severity(enum.StrEnum):
    """How bad a finding is: an error stops the start, a warning and a note do not."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@frozen
class Finding:
    """One line of `pushd check-config`.

    `key` is the dotted path of the key ("" for the file as a whole), `where` is `file:line` as far as it is known.
    """

    severity: Severity
    key: str
    where: str
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key} {self.what}" if self.key else f"{self.where}: {self.what}"


class InvalidConfig(ConfigError):
    """The configuration cannot be used; the text has one line for every mistake.

    `findings` are those mistakes with how to mend each.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))
