"""The engine itself: a broken promise ends a run and stays as a small input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import engine
from tests.fuzz.engine import Found, Target, fuzz


class Toy(Target):
    name = "toy"

    def __init__(self, forbidden: bytes) -> None:
        self._forbidden = forbidden

    def check(self, data: bytes) -> None:
        if self._forbidden in data:
            raise ValueError("this is what it cannot read")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tests" / "fuzz" / "corpus"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "one").write_bytes(b"hello world, hello world")
    monkeypatch.setattr(engine, "CORPUS", folder)
    return folder / "toy"


def test_input_that_breaks_a_promise_is_made_small_and_kept(corpus: Path) -> None:
    with pytest.raises(Found, match="this is what it cannot read") as failure:
        fuzz(Toy(b"\xff"), 1, 60)
    (kept,) = corpus.glob("found-*")
    assert kept.read_bytes() == b"\xff"
    assert f"tests/fuzz/corpus/toy/{kept.name}" in str(failure.value)


def test_run_without_one_tells_what_was_tried(corpus: Path) -> None:
    result = fuzz(Toy(b"never made by chance, for it is long"), 1, 0.01)
    assert result["inputs"] >= engine.BATCH / 2
    assert list(corpus.glob("found-*")) == []


def test_growth_beyond_what_is_allowed_is_found(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = iter([{"tasks": 3.0}, {"tasks": 4.0}])
    monkeypatch.setattr(Toy, "vitals", lambda self: next(levels))
    with pytest.raises(Found, match="tasks grew from 3 to 4"):
        fuzz(Toy(b"never made by chance, for it is long"), 1, 0.01)
