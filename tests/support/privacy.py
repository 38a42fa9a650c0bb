"""Finds private values in what a program lets out: any run of four bytes of one, however it is written down.

`PrivateValues` is told every id, secret, token, URL, key and topic of a test, and searches texts for pieces of them:
as they are, in hexadecimal, in base64, escaped as Python, C or a URL would, or as a list of numbers. `captured_logs`
collects everything that is logged meanwhile, at the lowest level of every logger.

Values have to be told from ordinary text. `private_bytes` and `private_text` make ones that no log line contains by
accident: bytes above 0x7f, and letters that English rarely puts side by side.
"""

from __future__ import annotations

import base64
import io
import logging
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog

RUN_BYTES = 4
# Text decoded as base64 is random, and four random bytes hit one of many thousand runs too easily; six do not.
BASE64_RUN_BYTES = 6

_ESCAPES = re.compile(rb"\\x([0-9a-fA-F]{2})|\\([0-3][0-7]{2})|%([0-9a-fA-F]{2})")
_HEX = re.compile(rb"[0-9a-fA-F]{8,}")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{8,}")
_NUMBERS = re.compile(rb"\d{1,3}(?:[,;\s]+\d{1,3}){3,}")

_Value = TypeVar("_Value", bytes, str)


def private_bytes(rng: random.Random, size: int) -> bytes:
    """Random bytes, none of them ASCII."""
    return bytes(rng.randrange(0x80, 0x100) for _ in range(size))


def private_text(rng: random.Random, size: int) -> str:
    """Random lower-case letters that make no English."""
    return "".join(rng.choices("qxzjkvw", k=size))


class PrivateValues:
    """The values of a test that nothing may let out."""

    def __init__(self) -> None:
        self._runs: set[bytes] = set()
        self._long_runs: set[bytes] = set()

    def keep(self, value: _Value) -> _Value:
        """Add a value to those searched for, and return it."""
        data = value.encode() if isinstance(value, str) else value
        self._runs |= _windows(data, RUN_BYTES)
        self._long_runs |= _windows(data, BASE64_RUN_BYTES)
        return value

    def find_in(self, text: str | bytes) -> set[str]:
        """In which forms a piece of a private value is in `text`; empty when there is none."""
        data = text.encode(errors="surrogateescape") if isinstance(text, str) else text
        readings = {
            "plain": [data, data.lower()],
            "escaped": [_ESCAPES.sub(_unescape, data)],
            "hexadecimal": [run for found in _HEX.findall(data) for run in _from_hex(found)],
            "numbers": [bytes(n & 0xFF for n in map(int, re.findall(rb"\d+", run))) for run in _NUMBERS.findall(data)],
        }
        forms = {
            form for form, texts in readings.items() if any(self._runs & _windows(each, RUN_BYTES) for each in texts)
        }
        for found in _BASE64.findall(data):
            if any(self._long_runs & _windows(each, BASE64_RUN_BYTES) for each in _from_base64(found)):
                forms.add("base64")
        return forms


def _windows(data: bytes, size: int) -> set[bytes]:
    return {data[start : start + size] for start in range(len(data) - size + 1)}


def _unescape(match: re.Match[bytes]) -> bytes:
    hexadecimal = match[1] or match[3]
    return bytes([int(hexadecimal, 16) if hexadecimal else int(match[2], 8)])


def _from_hex(digits: bytes) -> list[bytes]:
    return [bytes.fromhex(digits[start : len(digits) - (len(digits) - start) % 2].decode()) for start in (0, 1)]


def _from_base64(text: bytes) -> list[bytes]:
    text = text.translate(bytes.maketrans(b"-_", b"+/"))
    return [base64.b64decode(text[start : len(text) - (len(text) - start) % 4]) for start in range(4)]


@contextmanager
def captured_logs() -> Iterator[io.StringIO]:
    """Everything that structlog and logging write during the block, at every level, tracebacks included."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s %(args)r"))
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    levels = [(logger, logger.level) for logger in loggers]
    before = structlog.get_config()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    logging.root.addHandler(handler)
    logging.captureWarnings(True)
    for logger in loggers:
        logger.setLevel(1)
    try:
        yield stream
    finally:
        for logger, level in levels:
            logger.setLevel(level)
        logging.captureWarnings(False)
        logging.root.removeHandler(handler)
        structlog.configure(**before)
