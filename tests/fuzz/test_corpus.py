"""Every committed input once more: what was found to be bad stays mended."""

from __future__ import annotations

import pytest

from tests.fuzz import seeds
from tests.fuzz.engine import CORPUS
from tests.fuzz.targets import IN_PROCESS, TARGETS


@pytest.mark.parametrize("name", IN_PROCESS)
def test_no_input_of_the_corpus_breaks_a_promise(name: str) -> None:
    target = TARGETS[name]()
    inputs = target.corpus()
    assert len(inputs) > 5
    with target.opened():
        for data in inputs:
            target.check(data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_the_ones_the_program_writes(name: str) -> None:
    written = {path.name: path.read_bytes() for path in (CORPUS / name).iterdir() if not path.name.startswith("found-")}
    assert written == getattr(seeds, name)()
