"""Atheris: libFuzzer leads a target by the coverage of `pushd`. It finds its way where chance does not.

It runs in a process of its own, because it has to see modules as they are imported and ends the process it runs in.
What it finds is judged, kept and made short like any other input.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.engine import CORPUS, LIMIT_S, Found, Target, attempt, kept
from tests.fuzz.inputs import MAX_BYTES


def is_installed() -> bool:
    return importlib.util.find_spec("atheris") is not None


def guide(target: Target, number: int, seconds: float, *, grow: bool = False) -> dict[str, Any]:
    """Run a target led by coverage; what it came to, as far as libFuzzer tells.

    Args:
        target: one without a server.
        number: the seed.
        seconds: for how long.
        grow: add inputs to the corpus that reach what none of it does.

    Raises:
        Found: a promise was broken.
    """
    with tempfile.TemporaryDirectory(prefix="pushd-fuzz-") as name:
        folder = Path(name)
        for part in ("corpus", "grown"):
            (folder / part).mkdir()
            for data in target.seeds():
                (folder / part / hashlib.sha256(data).hexdigest()).write_bytes(data)
        limits = (f"-max_total_time={round(seconds)}", f"-seed={number % 2**32}", f"-max_len={MAX_BYTES}")
        code, text = _atheris(target, folder, "corpus", *limits)
        bad = list(folder.glob("bad-*"))
        if bad:
            series = [bad[0].read_bytes()]
            failure = attempt(target, series)
            if failure is not None:
                raise Found(kept(target, series, failure))
        if bad or code:
            raise Found(f"Atheris ended by {code}; nothing happens without it\n{text[-2_000:]}")
        added = _grown(target, folder) if grow else 0
    last = [line.split() for line in text.splitlines() if line.startswith("#") and "cov:" in line][-1]
    figures = {"inputs": int(last[0][1:]), "seconds": round(seconds, 1), "coverage": int(last[last.index("cov:") + 1])}
    return figures | ({"added": added} if grow else {})


def _grown(target: Target, folder: Path) -> int:
    """Add to the corpus whatever reaches further than it does; how many inputs that is."""
    before = set((folder / "grown").iterdir())
    _atheris(target, folder, "grown", "corpus", "-merge=1")
    added = [path.read_bytes() for path in (folder / "grown").iterdir() if path not in before]
    # Mutations of what fails at the first check mostly fail there too.
    further = [data for data in added if target.check(data)]
    for data in further:
        (CORPUS / target.name / f"guided-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
    return len(further)


def _atheris(target: Target, folder: Path, *arguments: str) -> tuple[int, str]:
    program = folder / "again"  # libFuzzer starts itself anew to merge, by the name it was started with
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.fuzz.guided {program} {target.name} "$@"\n')
    program.chmod(0o755)
    limits = (f"-timeout={round(LIMIT_S)}", "-rss_limit_mb=2048", f"-artifact_prefix={folder}/bad-")
    given = [argument if argument.startswith("-") else str(folder / argument) for argument in arguments]
    ended = subprocess.run([program, *given, *limits], stderr=subprocess.PIPE, check=False)
    return ended.returncode, ended.stderr.decode(errors="replace")


def main() -> None:
    import atheris  # type: ignore[import-untyped]

    with atheris.instrument_imports(include=["pushd"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[sys.argv[2]]()

    def check(data: bytes) -> None:
        target.check(data)

    atheris.Setup([sys.argv[1], *sys.argv[3:]], check)
    with target.opened():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
