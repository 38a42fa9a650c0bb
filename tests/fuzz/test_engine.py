"""The engine itself: whichever way an input ends badly, the run ends and the input stays, as short as it can be."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz import engine
from tests.fuzz.engine import Found, Target, fuzz
from tests.fuzz.inputs import inputs, unpacked

BAD = b"\xfd"


class Toy(Target):
    name = "toy"

    def __init__(self, behave: Callable[[bytes], object]) -> None:
        self._behave = behave

    def made(self) -> st.SearchStrategy[bytes]:
        return st.binary(max_size=20)

    def check(self, data: bytes) -> str:
        self._behave(data)
        return "far" if data else ""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tests" / "fuzz" / "corpus"
    (folder / "toy").mkdir(parents=True)
    (folder / "toy" / "one").write_bytes(b"hello world, hello world \xfe")
    monkeypatch.setattr(engine, "CORPUS", folder)
    return folder / "toy"


def when_bad(act: Callable[[], object]) -> Callable[[bytes], object]:
    return lambda data: act() if BAD in data else None


def refuse() -> None:
    raise ValueError("this is what it cannot read")


def sleep_for_ever() -> None:
    while True:
        try:
            time.sleep(60)
        except BaseException:  # whoever never returns may swallow what is raised in him
            continue


def work_for_ever() -> None:
    while True:
        with suppress(BaseException):
            sum(range(1_000_000))


@pytest.mark.parametrize(
    ("act", "text"),
    [
        pytest.param(refuse, "this is what it cannot read", id="raises"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV", id="crashes"),
        pytest.param(lambda: os._exit(3), "code 3", id="exits"),
        pytest.param(lambda: bytearray(50 * 2**20), "one input took 5", id="takes-memory"),
        pytest.param(lambda: bytearray(2**40), "MemoryError", id="takes-all-memory"),
    ],
)
def test_input_that_breaks_a_promise_is_made_short_and_kept(corpus: Path, act: Callable[[], object], text: str) -> None:
    with pytest.raises(Found, match=text) as failure:
        fuzz(Toy(when_bad(act)), 1, 60)
    (kept,) = corpus.glob("found-*")
    assert kept.read_bytes() == BAD
    assert f"tests/fuzz/corpus/toy/{kept.name}" in str(failure.value)


@pytest.mark.parametrize(
    ("act", "limit", "ended_by"), [(sleep_for_ever, "LIMIT_S", "SIGALRM"), (work_for_ever, "CPU_S", "SIGPROF")]
)
def test_input_that_never_returns_is_ended_and_kept(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], limit: str, ended_by: str
) -> None:
    monkeypatch.setattr(engine, limit, 1.0)
    monkeypatch.setattr(engine, "SHORTEN_S", 0.0)  # every try would take its time
    with pytest.raises(Found, match=rf"{ended_by}(?s:.*){act.__name__}"):
        fuzz(Toy(when_bad(act)), 1, 60)
    (kept,) = corpus.glob("found-*")
    assert BAD in kept.read_bytes()


def test_other_failures_do_not_pass_for_the_same(corpus: Path) -> None:
    def behave(data: bytes) -> None:
        assert data, "nothing at all"
        if b"\xfd\xfe" in data + b"\xfe":
            refuse()

    with pytest.raises(Found, match="this is what"):
        fuzz(Toy(lambda data: behave(data) if data else None), 1, 60)
    (kept,) = corpus.glob("found-*")
    assert kept.read_bytes() == BAD


class Remembers(Toy):
    """Like a server: the guilt shows at the end of a series, and here it takes two inputs to be guilty."""

    series = 10
    for_ever = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._seen: set[bytes] = set()
        yield

    def check(self, data: bytes) -> str:
        self._seen |= {mark for mark in (BAD, b"hello") if mark in data}
        return ""

    def settle(self) -> None:
        seen = self._seen
        if not self.for_ever:
            self._seen = set()
        assert len(seen) < 2, "it remembers"


class RemembersForEver(Remembers):
    """Like a database: one input of a series and one of a later one."""

    series = 2
    for_ever = True


@pytest.mark.parametrize("kind", [Remembers, RemembersForEver])
def test_series_is_kept_where_inputs_share_the_guilt(corpus: Path, kind: type[Remembers]) -> None:
    with pytest.raises(Found, match="it remembers"):
        fuzz(kind(refuse), 1, 60)  # type: ignore[arg-type]
    (kept,) = corpus.glob("found-*")
    series = unpacked(kept.read_bytes())
    assert len(series) == 2
    assert {mark for data in series for mark in (BAD, b"hello") if mark in data} == {BAD, b"hello"}


def test_next_run_begins_with_what_was_found(corpus: Path) -> None:
    with pytest.raises(Found):
        fuzz(Toy(when_bad(refuse)), 1, 60)
    with pytest.raises(Found, match="seed 2, after 0 inputs: an input of the corpus"):
        fuzz(Toy(when_bad(refuse)), 2, 60)
    assert len(list(corpus.glob("found-*"))) == 1


def test_failure_that_does_not_come_again_is_kept_whole_and_says_so(corpus: Path, tmp_path: Path) -> None:
    once = tmp_path / "once"

    def behave() -> None:
        if not once.exists():
            once.touch()
            refuse()

    with pytest.raises(Found, match="does not happen again on a fresh start"):
        fuzz(Toy(when_bad(behave)), 1, 60)
    assert len(list(corpus.glob("found-*"))) == 1


def test_run_without_one_tells_what_was_tried(corpus: Path) -> None:
    result = fuzz(Toy(lambda data: None), 1, 0.2)
    assert result["inputs"] > 1
    assert result["past_first_check"] == sum(result["reached"].values())
    assert list(corpus.glob("found-*")) == []


def test_run_tells_how_deep_its_inputs_got(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "check", lambda self, data: "far")
    result = fuzz(Toy(lambda data: None), 1, 0.2)
    assert (result["past_first_check"], result["reached"]) == (1, {"far": 1})


def test_growth_beyond_what_is_allowed_is_found(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = iter([{"tasks": 3.0}, {"tasks": 4.0}])
    monkeypatch.setattr(Toy, "vitals", lambda self: next(levels))
    with pytest.raises(Found, match="tasks: 3 to 4"):
        fuzz(Toy(lambda data: None), 1, 0.1)
    assert list(corpus.glob("found-*")) == []


def test_memory_that_comes_to_stay_is_found(corpus: Path) -> None:
    held: list[bytes] = []
    with pytest.raises(Found, match="rss_mib"):
        fuzz(Toy(lambda data: held.append(bytes(100_000))), 1, 2)


def test_inputs_depend_on_the_seed_alone() -> None:
    def first(number: int) -> list[bytes]:
        return list(itertools.islice(inputs([b"one", b"two"], st.binary(max_size=9), number, 3), 500))

    assert first(1) == first(1)
    assert first(1) != first(2)
