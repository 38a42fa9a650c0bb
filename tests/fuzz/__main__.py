"""Throws hostile input at everything that reads what others wrote: `python -m tests.fuzz [--short] [TARGET …]`.

Inputs are bytes. Each target mutates the files of its corpus, makes some of its own with hypothesis, and says what must
hold for any of them. An input that breaks a promise is made as short as can be, kept in the corpus under `found-…`, and
ends the run with an error; every later run begins with it. The inputs of a target depend on the seed alone.

Atheris, where it is installed, gets half the time of the targets without a server, unless the run is a short one: it
is led by coverage. With `--grow` what reaches code that no input of the corpus does is added to it under `guided-…`.

Prints one JSON line a target: inputs, how deep they got, and what memory and tasks did meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from functools import partial

from tests.fuzz.engine import Found, Target, fuzz
from tests.fuzz.guided import guide, is_installed
from tests.fuzz.targets import TARGETS

LONG_S, SHORT_S = 3_600.0, 60.0
STARTING_S = 8.0  # of each target with a server, to start it and to see it come to rest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"some of: {', '.join(TARGETS)}; all by default")
    parser.add_argument("--short", action="store_true", help="a minute for all of them instead of an hour")
    parser.add_argument("--minutes", type=float, help="for all of them together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    parser.add_argument("--grow", action="store_true", help="Atheris alone, and add to the corpus what it reaches")
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if options.grow and not is_installed():
        parser.error("Atheris is not installed")
    total_s = options.minutes * 60 if options.minutes else SHORT_S if options.short else LONG_S
    chosen: list[Target] = [TARGETS[name]() for name in options.targets or TARGETS]
    # Two lanes, one for each kind: a server and its client leave a processor free, and figures stay comparable.
    lanes = [[target for target in chosen if (target.series == 1) == kind] for kind in (False, True)]
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=_lane, args=(lane, options, total_s)) for lane in lanes if lane]
    began = time.monotonic()
    for process in running:
        process.start()
    for process in running:
        process.join()
    ok = all(process.exitcode == 0 for process in running)
    print(json.dumps({"name": "fuzz", "seed": options.seed, "ok": ok, "seconds": round(time.monotonic() - began, 1)}))
    raise SystemExit(not ok)


def _lane(targets: list[Target], options: argparse.Namespace, total_s: float) -> None:
    weights = sum(target.share for target in targets)
    starting_s = sum(STARTING_S for target in targets if target.series > 1)
    broken = False
    for target in targets:
        seconds = max(total_s - starting_s, total_s / 4) * target.share / weights
        is_guided = target.series == 1 and not options.short and is_installed()
        runs = [] if options.grow else [("fuzz", partial(fuzz, target, options.seed, seconds / (1 + is_guided)))]
        if is_guided:
            part_s = seconds if options.grow else seconds / 2
            runs.append(("fuzz-guided", partial(guide, target, options.seed, part_s, grow=options.grow)))
        for name, run in runs:
            try:
                result = run()
            except Found as found:
                broken = True
                print(f"{target.name}: {found}", flush=True)
                continue
            except KeyboardInterrupt:
                raise SystemExit(1) from None
            print(json.dumps({"name": f"{name}-{target.name}", "seed": options.seed, **result}), flush=True)
    raise SystemExit(broken)


if __name__ == "__main__":
    main()
