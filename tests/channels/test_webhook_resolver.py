"""Lookups in threads: shared while they run, kept by nobody, and unable to starve hosts that answer."""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import ip_address

import pytest
import trio
import trio.testing

from pushd.channels import resolver as module
from pushd.channels.resolver import ThreadResolver, check_webhook_url
from pushd.core.addresses import Address
from pushd.core.checks import Refusal

PUBLIC = (ip_address("1.1.1.1"),)


class Names:
    """A blocking lookup whose names under .hang answer only when released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls: Counter[str] = Counter()
        self.blocked = 0
        self._lock = threading.Lock()

    def __call__(self, host: str) -> tuple[Address, ...]:
        with self._lock:
            self.calls[host] += 1
        if host.endswith(".hang"):
            with self._lock:
                self.blocked += 1
            assert self.release.wait(60)
            with self._lock:
                self.blocked -= 1
        if host.endswith(".missing"):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return PUBLIC


@pytest.fixture
def names() -> Iterator[Names]:
    names = Names()
    yield names
    names.release.set()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():  # noqa: ASYNC110  # threads set what is waited for
            await trio.sleep(0.005)


async def abandon(resolver: ThreadResolver, names: Names, hosts: list[str]) -> None:
    """Ask for every host, wait until the lookups that get a thread have one, and give up on all of them."""
    async with trio.open_nursery() as asking:
        for host in hosts:
            asking.start_soon(resolver.resolve, host)
        await until(lambda: names.blocked == min(len(hosts), module.MAX_UNPROVEN_LOOKUPS))
        asking.cancel_scope.cancel()


async def test_concurrent_callers_share_one_lookup_and_later_ones_get_a_new_one(names: Names) -> None:
    resolver = ThreadResolver(names)
    answers = []

    async def ask() -> None:
        answers.append(await resolver.resolve("a.hang"))

    async with trio.open_nursery() as asking:
        for _ in range(20):
            asking.start_soon(ask)
        await until(lambda: names.blocked == 1)
        names.release.set()
    assert answers == [PUBLIC] * 20
    assert names.calls["a.hang"] == 1
    assert await resolver.resolve("a.hang") == PUBLIC
    assert names.calls["a.hang"] == 2


async def test_t151_unknown_name_has_no_address(names: Names) -> None:
    assert await ThreadResolver(names).resolve("a.missing") == ()


@pytest.mark.parametrize(
    ("failure", "answer"),
    [
        pytest.param(socket.gaierror(socket.EAI_NONAME, ""), (), id="no such name"),
        pytest.param(socket.gaierror(socket.EAI_NODATA, ""), (), id="no data"),
        pytest.param(socket.gaierror(socket.EAI_ADDRFAMILY, ""), (), id="no address of a family in use"),
        pytest.param(socket.gaierror(socket.EAI_AGAIN, ""), None, id="name servers fail"),
        pytest.param(socket.gaierror(socket.EAI_FAIL, ""), None, id="name servers refuse"),
        pytest.param(socket.gaierror(socket.EAI_MEMORY, ""), None, id="no memory"),
        pytest.param(socket.gaierror(socket.EAI_SYSTEM, ""), None, id="system error"),
        pytest.param(OSError(socket.EAI_NONAME, ""), None, id="a number of another table"),
        pytest.param(OSError(24, ""), None, id="no descriptor"),
    ],
)
async def test_only_what_is_said_of_the_name_means_that_it_has_no_address(
    failure: OSError, answer: tuple[Address, ...] | None
) -> None:
    def look_up(host: str) -> tuple[Address, ...]:
        raise failure

    assert await ThreadResolver(look_up).resolve("a.example") == answer


async def test_the_system_knows_localhost() -> None:
    assert ip_address("127.0.0.1") in await ThreadResolver().resolve("localhost")


@pytest.mark.parametrize("host", ["a..b", ".example.com", f"{'a' * 64}.example"])
async def test_s068_odd_names_have_no_address_and_raise_nothing(host: str) -> None:
    assert await ThreadResolver().resolve(host) == ()


async def test_abandoned_lookup_keeps_its_slot_until_the_thread_ends(names: Names) -> None:
    resolver = ThreadResolver(names)
    await abandon(resolver, names, ["a.hang"])
    assert "threads=1," in repr(resolver)
    with trio.move_on_after(0.05) as second:
        await resolver.resolve("a.hang")
    assert second.cancelled_caught
    assert names.calls["a.hang"] == 1, "a hanging host got a second thread"
    names.release.set()
    await until(lambda: "threads=0," in repr(resolver))
    assert await resolver.resolve("a.hang") == PUBLIC


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a container has as many processes as it is allowed."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", refuse)


async def test_lookup_without_a_thread_tells_nothing_and_the_next_one_gets_one(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = ThreadResolver(names, max_lookups=1)
    with monkeypatch.context() as patch, trio.fail_after(30):
        refuse_threads(patch)
        assert await resolver.resolve("a.good") is None
    assert "threads=0, unproven=0, waiting=0" in repr(resolver)
    with trio.fail_after(30):
        assert await resolver.resolve("a.good") == PUBLIC


async def test_lookups_that_waited_for_a_thread_tell_nothing_when_there_is_none_after_all(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = ThreadResolver(names, max_lookups=1)
    answers: dict[str, tuple[Address, ...] | None] = {}

    async def ask(host: str) -> None:
        answers[host] = await resolver.resolve(host)

    with monkeypatch.context() as patch, trio.fail_after(30):
        async with trio.open_nursery() as asking:
            asking.start_soon(ask, "a.hang")
            await until(lambda: names.blocked == 1)
            asking.start_soon(ask, "b.good")
            asking.start_soon(ask, "c.good")
            await trio.testing.wait_all_tasks_blocked()
            refuse_threads(patch)
            names.release.set()
    assert answers == {"a.hang": PUBLIC, "b.good": None, "c.good": None}
    assert "threads=0, unproven=0, waiting=0" in repr(resolver)


async def test_s041_names_that_hang_leave_hosts_that_answer_alone(names: Names) -> None:
    resolver = ThreadResolver(names)
    good = [f"{n}.good" for n in range(64)]
    for host in good:
        assert await resolver.resolve(host) == PUBLIC
    await abandon(resolver, names, [f"{n}.hang" for n in range(module.MAX_LOOKUPS)])
    assert names.blocked == module.MAX_UNPROVEN_LOOKUPS, "all slots for unproven hosts are held by dead lookups"
    with trio.fail_after(30):
        async with trio.open_nursery() as asking:
            for host in good:
                asking.start_soon(resolver.resolve, host)
    assert names.blocked == module.MAX_UNPROVEN_LOOKUPS
    assert all(names.calls[host] == 2 for host in good)


async def test_no_more_names_are_looked_up_at_once_than_was_said(names: Names) -> None:
    resolver = ThreadResolver(names, max_lookups=3, max_unproven=2)
    await resolver.resolve("a.good")
    async with trio.open_nursery() as asking:
        for n in range(5):
            asking.start_soon(resolver.resolve, f"{n}.hang")
        await until(lambda: names.blocked == 2)
        assert "threads=2, unproven=2, waiting=3" in repr(resolver)
        assert await resolver.resolve("a.good") == PUBLIC
        names.release.set()
    assert sum(names.calls[f"{n}.hang"] for n in range(5)) == 5


async def test_host_that_was_left_behind_is_no_longer_proven(names: Names) -> None:
    resolver = ThreadResolver(names)
    names.release.set()
    await resolver.resolve("a.hang")
    names.release.clear()
    await abandon(resolver, names, ["a.hang"])
    assert "unproven=0," in repr(resolver), "it was proven when it started"
    names.release.set()
    await until(lambda: "threads=0," in repr(resolver))
    names.release.clear()
    await abandon(resolver, names, ["a.hang"])
    assert "unproven=1," in repr(resolver)


async def test_lookup_given_up_before_its_turn_never_runs(names: Names) -> None:
    resolver = ThreadResolver(names, max_unproven=1)
    async with trio.open_nursery() as asking:
        asking.start_soon(resolver.resolve, "first.hang")
        await until(lambda: names.blocked == 1)
        with trio.move_on_after(0.02):
            await resolver.resolve("second.hang")
        assert "waiting=0" in repr(resolver)
        names.release.set()
    assert names.calls["second.hang"] == 0


async def test_waiting_lookups_run_in_order_when_slots_come_free(names: Names) -> None:
    resolver = ThreadResolver(names, max_unproven=1)
    finished: list[str] = []

    async def ask(host: str) -> None:
        await resolver.resolve(host)
        finished.append(host)

    async with trio.open_nursery() as asking:
        for host in ("first.hang", "second.good", "third.good"):
            asking.start_soon(ask, host)
            await trio.testing.wait_all_tasks_blocked()
        names.release.set()
    assert finished == ["first.hang", "second.good", "third.good"]


class Script:
    """Answers without threads; `down` knows nothing."""

    def __init__(self, *addresses: str, hang: bool = False, down: bool = False) -> None:
        self.answer = None if down else tuple(map(ip_address, addresses))
        self.hang = hang
        self.asked: list[str] = []

    async def resolve(self, host: str) -> tuple[Address, ...] | None:
        self.asked.append(host)
        if self.hang:
            await trio.sleep_forever()
        return self.answer


@pytest.mark.parametrize(
    ("url", "answer", "domains", "private", "allowed"),
    [
        pytest.param("https://localhost/", ["127.0.0.1", "::1"], [], False, False, id="T040 localhost"),
        pytest.param("https://LOCALHOST/", ["127.0.0.1"], [], False, False, id="S010 LOCALHOST"),
        pytest.param("https://a.localhost/", [], [], False, False, id="S010 a.localhost"),
        pytest.param("https://localhost/hook", ["127.0.0.1"], ["LOCALHOST"], True, True, id="T042 listed"),
        pytest.param("https://h.example/", ["1.1.1.1"], [], False, True, id="public"),
        pytest.param("https://h.example/", ["1.1.1.1", "169.254.169.254"], [], False, False, id="S035 public first"),
        pytest.param("https://h.example/", ["169.254.169.254", "1.1.1.1"], [], False, False, id="S035 private first"),
        pytest.param("https://h.example/", ["1.1.1.1", "169.254.169.254"], [], True, True, id="table switched off"),
        pytest.param("https://h.example/", [], [], False, False, id="S040 no address"),
        pytest.param("https://h.example/", [], [], True, False, id="S040 no address, private allowed"),
        pytest.param("https://xn--a.attacker.com/", ["127.0.0.1"], [], False, False, id="S065"),
        pytest.param("https://a.example.org/", ["10.0.0.1"], ["*.example.org"], False, False, id="S074"),
        pytest.param("https://a.example.org/", ["1.1.1.1"], ["*.example.org"], False, True, id="listed and public"),
    ],
)
async def test_names_are_judged_by_all_their_addresses(
    url: str, answer: list[str], domains: list[str], private: bool, allowed: bool
) -> None:
    script = Script(*answer)
    verdict = await check_webhook_url(url, allowed_domains=domains, allow_private_addresses=private, resolver=script)
    assert verdict is (None if allowed else Refusal.WEBHOOK_URL)
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    ("url", "domains", "private", "allowed"),
    [
        pytest.param("https://8.8.8.8/hook", [], False, True, id="T040 public literal"),
        pytest.param("https://[::1]/hook", [], False, False, id="T040 loopback literal"),
        pytest.param("https://127.0.0.1/hook", [], True, True, id="private allowed"),
        pytest.param("https://127.0.0.1/hook", ["LOCALHOST"], True, False, id="T042 literal outside of the list"),
        pytest.param("http://8.8.8.8/", [], True, False, id="T041 scheme"),
        pytest.param("https://user:password@8.8.8.8/", [], True, False, id="T041 password"),
        pytest.param("https://other.example/", ["hooks.example.com"], False, False, id="list comes before DNS"),
        pytest.param("https://hooks.example.com./", ["hooks.example.com"], False, False, id="S073"),
    ],
)
async def test_nothing_is_looked_up_for_literals_and_hosts_outside_of_the_list(
    url: str, domains: list[str], private: bool, allowed: bool
) -> None:
    script = Script("1.1.1.1")
    verdict = await check_webhook_url(url, allowed_domains=domains, allow_private_addresses=private, resolver=script)
    assert verdict is (None if allowed else Refusal.WEBHOOK_URL)
    assert script.asked == []


async def test_s041_register_refuses_a_name_that_hangs_within_ten_seconds(
    autojump_clock: trio.testing.MockClock,
) -> None:
    started = trio.current_time()
    verdict = await check_webhook_url(
        "https://h.example/", allowed_domains=(), allow_private_addresses=True, resolver=Script(hang=True)
    )
    assert verdict is Refusal.WEBHOOK_UNRESOLVED
    assert trio.current_time() - started == pytest.approx(10)


@pytest.mark.parametrize("private", [False, True])
async def test_name_nobody_knows_of_now_may_be_tried_again(private: bool) -> None:
    verdict = await check_webhook_url(
        "https://h.example/", allowed_domains=(), allow_private_addresses=private, resolver=Script(down=True)
    )
    assert verdict is Refusal.WEBHOOK_UNRESOLVED


async def test_names_that_hold_every_thread_make_others_wait_and_refuse_none_for_good(
    autojump_clock: trio.testing.MockClock, names: Names
) -> None:
    resolver = ThreadResolver(names, max_lookups=1, max_unproven=1)
    with trio.CancelScope() as giving_up:
        giving_up.cancel()
        await resolver.resolve("a.hang")
    verdicts = [
        await check_webhook_url(
            f"https://{host}/", allowed_domains=(), allow_private_addresses=False, resolver=resolver
        )
        for host in ("a.hang", "honest.good")
    ]
    assert verdicts == [Refusal.WEBHOOK_UNRESOLVED] * 2
    assert names.calls["honest.good"] == 0
