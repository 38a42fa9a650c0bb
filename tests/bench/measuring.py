"""What the benches share: the one JSON line, and what the operating system and PostgreSQL say about a process.

Every bench prints one line last. These keys are in each of them and mean the same everywhere; null is what a bench does
not measure. Every other key is the bench's own and carries its unit in its name.

    name             the bench
    rate             pieces of work a second
    bound            the most that rate could be, whatever pushd did; null where nothing but the processor limits it
    bound_is         what the bound is made of
    ratio_to_bound   rate / bound
    cpu_us_per_item  microseconds of processor time of the measured process for a piece of work
    rss_mib          the most memory the measured process ever had resident
    target           by key of this line: what is to be reached
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pushd.model import IN_FLIGHT_PER_CHANNEL

NO_BOUND = "none: processor time"
PERMITS_BOUND = "256 permits over the provider's latency"
OFFERED_BOUND = "offered load"

LOG_STATEMENTS = {"log_statement": "all"}

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def line(
    name: str,
    *,
    rate: float | None,
    cpu_us_per_item: float | None,
    rss_mib: float | None,
    bound: float | None = None,
    bound_is: str = NO_BOUND,
    target: Mapping[str, float] | None = None,
    **more: Any,
) -> str:
    """The one JSON line."""
    return json.dumps(
        {
            "name": name,
            "rate": None if rate is None else round(rate),
            "bound": None if bound is None else round(bound),
            "bound_is": bound_is,
            "ratio_to_bound": None if rate is None or bound is None else round(rate / bound, 3),
            "cpu_us_per_item": None if cpu_us_per_item is None else round(cpu_us_per_item, 2),
            "rss_mib": None if rss_mib is None else round(rss_mib),
            "target": dict(target or {}),
            **more,
        }
    )


def permits_bound(latency_ms: float) -> float | None:
    """Attempts a second of one channel when its provider takes so long; None when it answers at once."""
    return IN_FLIGHT_PER_CHANNEL / (latency_ms / 1_000) if latency_ms else None


def cpu_s(pid: int) -> float:
    """Processor seconds of a process so far, the system's on its behalf included, its children's not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_mib(pid: int | None = None) -> float:
    """What a process has resident now; this one when none is named."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * _PAGE_BYTES / 2**20


def peak_rss_mib(pid: int | None = None) -> float:
    """The most a process ever had resident; this one when none is named."""
    status = Path(f"/proc/{pid or 'self'}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class StatementLog:
    """Counts statements in the log of an embedded PostgreSQL that was started with LOG_STATEMENTS.

    Everything a client sends counts, BEGIN and COMMIT too; what a function runs inside does not.
    """

    def __init__(self, data_dir: Path) -> None:
        self._log = data_dir / "postgres.log"
        self._start = 0
        self.skip()

    def skip(self) -> None:
        """Count from here."""
        self._start = self._log.stat().st_size

    def count(self) -> int:
        """Statements since `skip`."""
        with self._log.open("rb") as log:
            log.seek(self._start)
            return len(re.findall(rb"LOG: +(?:statement|execute [^:]*): ", log.read()))
