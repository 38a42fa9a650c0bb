"""Every committed input of the targets without a server once more: what was found to be bad stays mended.

The others begin each of their runs with all of theirs, so `just fuzz --short` replays those.
"""

from __future__ import annotations

import pytest

from tests.fuzz import engine, seeds
from tests.fuzz.engine import CORPUS
from tests.fuzz.inputs import packed, unpacked
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", [name for name in TARGETS if TARGETS[name].series == 1])
def test_no_input_of_the_corpus_breaks_a_promise(name: str) -> None:
    target = TARGETS[name]()
    series = [[data] for data in target.seeds()] + target.found()
    assert len(series) > 5
    failure = engine.attempt(target, [data for one in series for data in one])
    assert failure is None, failure.text


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_the_ones_the_program_writes(name: str) -> None:
    written = {path.name: path.read_bytes() for path in (CORPUS / name).iterdir()}
    grown = {name for name in written if name.startswith(("found-", "guided-"))}
    assert {name: written[name] for name in written.keys() - grown} == getattr(seeds, name)()


def test_packed_inputs_come_apart_again() -> None:
    assert unpacked(packed([b"a", b"", b"bc"])) == [b"a", b"", b"bc"]
    assert unpacked(packed([b"a", b"bc"])[:-1]) == [b"a", b"b"]
