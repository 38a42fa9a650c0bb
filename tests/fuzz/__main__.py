"""Throws hostile input at everything that reads what others wrote: `python -m tests.fuzz [--short] [TARGET …]`.

Inputs are bytes. Each target mutates the files of its corpus, makes some of its own, and says what must hold for any of
them. An input that breaks a promise is made as small as can be, kept in the corpus under `found-…`, and ends the run
with an error; from then on the ordinary tests replay it too. Hypothesis makes and shrinks the inputs. Atheris, which
would be led by coverage, has no wheel for this Python, so nothing here depends on it.

Prints one JSON line a target: inputs, seconds, and what memory and tasks did meanwhile.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from tests.fuzz.engine import Found, Target, fuzz
from tests.fuzz.targets import TARGETS

LONG_S, SHORT_S = 3_600.0, 60.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of: {', '.join(TARGETS)}; all by default")
    parser.add_argument("--short", action="store_true", help="a minute for all of them instead of an hour")
    parser.add_argument("--minutes", type=float, help="for all of them together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    total_s = options.minutes * 60 if options.minutes else SHORT_S if options.short else LONG_S
    chosen: list[Target] = [TARGETS[name]() for name in options.targets or TARGETS]
    weights = sum(target.share for target in chosen)
    began = time.monotonic()
    broken = False
    for target in chosen:
        try:
            result = fuzz(target, options.seed, total_s * target.share / weights)
        except Found as found:
            broken = True
            print(f"{target.name}: {found}", flush=True)
            continue
        print(json.dumps({"name": f"fuzz-{target.name}", "seed": options.seed, **result}), flush=True)
    print(json.dumps({"name": "fuzz", "ok": not broken, "seconds": round(time.monotonic() - began, 1)}))
    raise SystemExit(broken)


if __name__ == "__main__":
    main()
