"""The judgement of a soak, with series made up here: it must find the leaks it is there to find, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from pushd.model import RETAINED_DELIVERIES, Channel
from tests.faults import soak
from tests.faults.ledger import Row, Subscriber
from tests.faults.soak import Rest, Vitals, Work, judge_levels, judge_memory, judge_totals, judge_work
from tests.faults.world import Device

LOADS = 4  # of ten minutes; the first of them warms up
# What one load means to one instance: calls are shared by both, what comes of pushes is the holder's.
RECIPIENTS, DEAD, STREAMS = 1_460, 1_460, 730
HOLDER = Vitals(35, 17, 1, {"dispatcher": 1, "tailer": 1, "loader": 1, "primary": 8}, 80.0, 400_000, 20_000)
OTHER = Vitals(23, 15, 1, {"dispatcher": 1, "tailer": 1, "primary": 8}, 77.0, 350_000, 17_000)
PROVIDERS = {"apns": 1.0, "fcm": 1.0, "http": 0.0}


def rests(leak: Callable[[int, Vitals], Vitals] = lambda turn, vitals: vitals, *, of: int = 0) -> list[Rest]:
    """A run whose instance number `of` is changed by `leak` at each rest."""
    made = []
    for turn in range(LOADS):
        instances = [HOLDER, OTHER]
        instances[of] = leak(turn, instances[of])
        made.append(Rest(instances, PROVIDERS))
    return made


def judge(series: Sequence[Rest]) -> list[str]:
    return judge_levels(series) + judge_memory(series)


def test_rests_that_are_alike_are_in_order() -> None:
    assert judge(rests()) == []


def test_rests_may_differ_by_what_equal_rests_differ_by() -> None:
    noise = [0.0, 0.0, -300.0, 300.0]

    def wobble(turn: int, vitals: Vitals) -> Vitals:
        return evolve(vitals, blocks=vitals.blocks + noise[turn], malloc_kib=vitals.malloc_kib + noise[turn] / 3)

    assert judge(rests(wobble)) == []


def test_what_is_made_during_the_first_load_is_no_leak() -> None:
    def lazy(turn: int, vitals: Vitals) -> Vitals:
        return vitals if turn else evolve(vitals, blocks=vitals.blocks - 50_000, rss_mib=vitals.rss_mib - 20)

    assert judge(rests(lazy)) == []


def test_a_run_that_ended_early_is_judged_by_what_there_is() -> None:
    assert judge(rests()[:1]) == []


@pytest.mark.parametrize("of", [0, 1], ids=["holder", "other"])
@pytest.mark.parametrize(
    ("name", "a_load"),
    [
        pytest.param("tasks", STREAMS, id="a task a stream"),
        pytest.param("tasks", 1, id="a task every few minutes"),
        pytest.param("descriptors", RECIPIENTS, id="a descriptor a recipient"),
        pytest.param("descriptors", 1, id="a descriptor every few minutes"),
        pytest.param("connections", STREAMS // 4, id="connections that were cut"),
        pytest.param("connections", 1, id="a connection every few minutes"),
        pytest.param("calls", 1, id="a call every few minutes"),
        pytest.param("topics", STREAMS, id="a topic a stream"),
        pytest.param("blocks", RECIPIENTS, id="an object a recipient"),
        pytest.param("blocks", DEAD, id="an object a dead token"),
        pytest.param("blocks", STREAMS, id="an object a stream"),
        pytest.param("malloc_kib", RECIPIENTS * 600 / 1_024, id="600 bytes a recipient"),
        pytest.param("malloc_kib", DEAD * 600 / 1_024, id="600 bytes a dead token"),
        pytest.param("malloc_kib", STREAMS * 600 / 1_024, id="600 bytes a stream"),
        pytest.param("rss_mib", 5.0, id="pages nobody accounts for"),
    ],
)
def test_leaks_are_found(name: str, a_load: float, of: int) -> None:
    def leak(turn: int, vitals: Vitals) -> Vitals:
        return evolve(vitals, **{name: getattr(vitals, name) + a_load * turn})

    (found,) = judge(rests(leak, of=of))
    assert f"instance {of + 1}" in found


def test_the_objects_that_became_more_are_named() -> None:
    def leak(turn: int, vitals: Vitals) -> Vitals:
        types = {"pushd.rpc.Call": 4 + 1_500 * turn, "builtins.dict": 900}
        return evolve(vitals, blocks=vitals.blocks + 6_000 * turn, types=types)

    assert judge(rests(leak)) == ["instance 1: 12000 more blocks; of objects 3000 pushd.rpc.Call"]


@pytest.mark.parametrize(
    ("sessions", "word"),
    [
        ({"primary": soak.MAX_SESSIONS + 1}, "9 sessions of a pool of 8"),
        ({"dispatcher": 2}, "instead of a dispatcher's and a tailer's"),
        ({"check": 1}, "instead of a dispatcher's and a tailer's"),
        ({"loader": 2}, "2 sessions load pages"),
        ({"loader": 0}, "0 sessions load pages"),
    ],
)
def test_sessions_are_known_by_what_they_are_for(sessions: dict[str, int], word: str) -> None:
    def leak(turn: int, vitals: Vitals) -> Vitals:
        return evolve(vitals, sessions={**vitals.sessions, **sessions}) if turn == 2 else vitals

    (found,) = judge(rests(leak))
    assert word in found


def test_connections_that_stay_at_a_provider_are_found() -> None:
    series = rests()
    series[-1] = evolve(series[-1], providers={**PROVIDERS, "apns": 2.0})
    assert judge(series) == ["2 connections to apns at rest instead of 1"]


def test_connections_to_webhooks_are_not_kept_from_the_start() -> None:
    series = [evolve(rest, providers={**PROVIDERS, "http": 9.0}) for rest in rests()]
    assert judge(series) == ["9 connections to http at rest instead of 0"]


def test_the_first_rest_is_when_nothing_moves_and_later_ones_when_all_is_as_then() -> None:
    busy = Rest([HOLDER, OTHER], {**PROVIDERS, "http": 2.0})
    still = Rest([HOLDER, OTHER], PROVIDERS)
    other = Rest([evolve(HOLDER, tasks=36), OTHER], PROVIDERS)
    assert not soak._is_level([], None)
    assert not soak._is_level([busy] * 4, None)
    assert not soak._is_level([still] * 3, None)
    assert not soak._is_level([still, still, other, still], None)
    assert soak._is_level([busy, *[still] * 4], None)
    assert not soak._is_level([], still)
    assert not soak._is_level([still, other], still)
    assert soak._is_level([other, still], still)


# The account


def device(name: str, *, commits: bool = False) -> Device:
    return Device(name, Channel.APNS, name.encode(), b"", commits)


TOPIC = b"\0" * 17
ROWS = {1: Row(TOPIC), 2: Row(TOPIC, commit=True), 3: Row(TOPIC, eligible=False), 4: Row(TOPIC)}


def work(**changes: Any) -> Work:
    """A load of 0.1 s in which everything went right."""
    arrived = {("well", 1): 1, ("well", 4): 1, ("slow", 1): 3, ("slow", 4): 1, ("guest", 4): 1, ("gone", 1): 2}
    made = Work(
        seconds=0.1,
        due=ROWS,
        healthy=[Subscriber("well", TOPIC)],
        limited=[Subscriber("slow", TOPIC)],
        passing=[device("guest")],
        dead=[device("gone")],
        arrived=Counter(arrived),
        stored={b"well", b"slow"},
        living={b"well", b"slow"},
        streams=1,
    )
    return evolve(made, **changes)


def with_arrivals(*pushes: tuple[str, int]) -> Counter[tuple[str, int]]:
    return work().arrived + Counter(pushes)


def without(device: str) -> Counter[tuple[str, int]]:
    return Counter({push: count for push, count in work().arrived.items() if push[0] != device})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({}, [], id="all in order"),
        pytest.param({"arrived": without("well")}, ["2 pushes lost, rows [1, 4]"], id="healthy lost"),
        pytest.param({"arrived": without("slow")}, ["2 pushes lost, rows [1, 4]"], id="limited lost"),
        pytest.param({"arrived": without("gone")}, ["1 dead tokens never tried"], id="dead not tried"),
        pytest.param({"arrived": with_arrivals(("well", 1))}, ["1 pushes repeated"], id="repeat"),
        pytest.param({"arrived": with_arrivals(("guest", 4))}, ["1 pushes repeated"], id="repeat to one passing"),
        pytest.param({"arrived": with_arrivals(("slow", 1))}, ["1 pushes repeated"], id="attempt too many"),
        pytest.param({"arrived": with_arrivals(("well", 2))}, ["1 pushes that nobody asked for"], id="a commit"),
        pytest.param(
            {"arrived": with_arrivals(("guest", 2))}, ["1 pushes that nobody asked for"], id="passing, commit"
        ),
        pytest.param({"arrived": with_arrivals(("guest", 3))}, ["1 pushes that nobody asked for"], id="not eligible"),
        pytest.param({"arrived": with_arrivals(("guest", 9))}, ["1 pushes that nobody asked for"], id="no such row"),
        pytest.param({"arrived": with_arrivals(("who", 1))}, ["1 pushes that nobody asked for"], id="no such device"),
        pytest.param({"stored": {b"well"}}, ["1 recipients are gone that nobody deleted"], id="gone"),
        pytest.param(
            {"stored": {b"well", b"slow", b"guest"}}, ["1 recipients are left over, 0 of them with"], id="left over"
        ),
        pytest.param({"stored": {b"well", b"slow", b"gone"}}, ["left over, 1 of them with dead tokens"], id="not dead"),
        pytest.param({"retained": RETAINED_DELIVERIES + 1.0}, ["10001 deliveries were retained"], id="retained"),
        pytest.param({"waiting": 3.0}, ["3 deliveries still wait or are in flight"], id="not settled"),
        pytest.param({"streams": 0}, ["0 streams in 0 s"], id="no streams"),
        pytest.param({"passing": [], "arrived": without("guest")}, ["0 recipients in 0 s"], id="no churn"),
        pytest.param({"dead": [], "arrived": without("gone")}, ["0 dead tokens in 0 s"], id="no dead tokens"),
        pytest.param({"seconds": 1.0}, ["4 rows", "1 recipients", "1 dead tokens", "1 streams"], id="too little"),
    ],
)
def test_the_account_of_a_load(changes: dict[str, Any], words: list[str]) -> None:
    found = judge_work(work(**changes))
    assert len(found) == len(words), found
    assert all(word in each for word, each in zip(words, found, strict=True)), found


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ({}, []),
        ({"failed": 7}, []),
        ({"delivered": 99}, ["99 deliveries counted, 100 taken by the fakes"]),
        ({"failed": 11}, ["11 deliveries failed, 10 were refused"]),
        ({"suppressed": 4}, ["4 deliveries suppressed, 5 were of one's own messages"]),
        ({"rejected": 1}, ["deliveries ended otherwise: {'rejected': 1}"]),
    ],
)
def test_the_counters(outcomes: dict[str, int], words: list[str]) -> None:
    counted = {"delivered": 100, "failed": 10, "dead": 40, "suppressed": 5, **outcomes}
    assert judge_totals(counted, taken=100, refused=10, own=5, deleted=4, dead=4) == words


def test_every_dead_token_is_counted_once() -> None:
    assert judge_totals({}, taken=0, refused=0, own=0, deleted=3, dead=4) == [
        "3 recipients deleted as dead, 4 tokens were"
    ]


# What looks from inside

_ASKED = """
import os, signal, sys
import trio
from pushd.channels.http2.engine import Wire
from pushd.ops.history import History
from pushd.rpc.machine.http2 import Http2
from pushd.store.dispatch_pages import PageReader

history, reader, connection, wire = History(None), PageReader(None), Http2.__new__(Http2), Wire()
connection._closed_streams = {}
wire.initiate_connection()
kept = []
answer = os.path.join(os.environ["PUSHD_SOAK_INSIDE"], str(os.getpid()))

def do(order):
    match order:
        case "leak":
            kept.extend(f"{number} of some length" for number in range(5_000))
        case "mistake":
            del reader._configs
        case "fill":
            reader._configs.update((number, str(number)) for number in range(5_000))
            connection._closed_streams.update((1_000 + number, str(number)) for number in range(4_000))
            for number in range(100):
                wire.send_request(2 * number + 1, bytes([0x83]))
                wire.reset_stream(2 * number + 1)
                history.add([str(each) for each in range(200)])

async def main():
    async with trio.lowlevel.FdStream(0) as orders:
        async for line in orders:
            order = line.decode().strip()
            do(order)
            if order == "fill":
                for _ in range(500):
                    with trio.fail_after(1_000):
                        await trio.lowlevel.checkpoint()
            os.kill(os.getpid(), signal.SIGUSR1)
            while not os.path.exists(answer):
                await trio.sleep(0.01)
            print(order, flush=True)

trio.run(main)
"""


def test_what_is_kept_is_seen_from_inside_and_what_is_bounded_is_not(tmp_path: Path) -> None:
    environ = {**os.environ, "PUSHD_SOAK_INSIDE": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(soak._INSIDE), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-c", _ASKED], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(line: str) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            process.stdout.readline()
            path = tmp_path / str(process.pid)
            told: dict[str, Any] = json.loads(path.read_text())
            path.unlink()
            return told

        ask("first")
        before = ask("again")
        filled = ask("fill")
        leaked = ask("leak")
        mistaken = ask("mistake")
        process.stdin.close()
        process.kill()
    assert abs(filled["blocks"] - before["blocks"]) < 1_000
    assert 5_000 <= leaked["blocks"] - filled["blocks"] < 6_000
    assert "AttributeError" in mistaken["error"]
    assert "pushd.channels.http2.engine.Wire" in filled["types"]
    assert "h2.stream.H2Stream" not in filled["types"]
    assert before["types"]["pushd.ops.history.History"] == 1
    assert before["malloc_bytes"] == 0 or before["malloc_bytes"] > 2**20
