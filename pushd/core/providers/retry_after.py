"""The Retry-After header (RFC 9110 §10.2.3): seconds, or one of the three forms of an HTTP date (§5.6.7).

Written out rather than left to `email.utils`, which takes far more than HTTP dates and returns a naive time for the
asctime form.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY = "(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"
_MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
_TIME = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_DATES = (
    re.compile(rf"{_DAY}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT\Z"),
    re.compile(rf"{_LONG_DAY}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT\Z"),
    re.compile(rf"{_DAY} {_MONTH} (?P<day>[0-9]{{2}}| [0-9]) {_TIME} (?P<year>[0-9]{{4}})\Z"),
)
_SECONDS = re.compile(r"[0-9]+\Z")
# Longer numbers are not read: int() refuses 5,000 digits, and everything near this is far above any bound anyway.
_MAX_DIGITS = 10
_FAR_FUTURE_S = 1e10


def parse_retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds to wait from `now`, 0 for a moment that has passed, None when there is nothing usable.

    Args:
        value: the header's text.
        now: an aware time.
    """
    if value is None:
        return None
    text = value.strip(" \t")
    if _SECONDS.match(text):
        digits = text.lstrip("0")
        return float(digits or 0) if len(digits) <= _MAX_DIGITS else _FAR_FUTURE_S
    moment = _http_date(text, now)
    return None if moment is None else max(0.0, (moment - now).total_seconds())


def _http_date(text: str, now: datetime) -> datetime | None:
    found = next((match for form in _DATES if (match := form.match(text))), None)
    if found is None:
        return None
    year = int(found["year"])
    if len(found["year"]) == 2:
        year += now.year // 100 * 100
        if year > now.year + 50:  # RFC 9110 §5.6.7: such a year is the latest past one with these digits
            year -= 100
    try:
        return datetime(
            year,
            _MONTHS.index(found["month"]) + 1,
            int(found["day"]),
            int(found["hour"]),
            int(found["minute"]),
            int(found["second"]),
            tzinfo=UTC,
        )
    except ValueError:
        return None
