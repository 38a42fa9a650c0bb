"""Register, Unregister and UpdateSubscriptions, one call at a time, on a real database."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any

import pytest
import trio

from pushd.channels.resolver import check_webhook_url
from pushd.core import checks
from pushd.core.addresses import Address
from pushd.errors import StoreUnavailable
from pushd.model import Channel
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire
from pushd.store import recipients
from pushd.store.database import Database, DatabaseSettings, open_database
from pushd.telemetry import Metrics
from tests.support.registration import (
    APNS,
    CHANNEL_NOT_CONFIGURED,
    FCM,
    ID,
    KEY,
    MALFORMED,
    NOT_REGISTERED,
    OTHER_SECRET,
    SECRET,
    SIGNING_KEY,
    SUBSCRIPTION,
    TOPIC_LIMIT,
    WEBHOOK_UNRESOLVED,
    WEBHOOK_URL,
    WRONG_SECRET,
    Api,
    Refused,
    Rows,
    UrlVerdicts,
    add,
    counts,
    group,
    http,
    welcome,
)

TTL_NS = 2_592_000 * 10**9
DAY_NS = 86_400 * 10**9


@pytest.fixture
def api(database: Database, metrics: Metrics) -> Api:
    return Api(database, metrics)


@pytest.fixture
def rows(database: Database) -> Rows:
    return Rows(database)


async def test_first_register_stores_the_hash_and_answers_from_the_row(api: Api, rows: Rows) -> None:
    """T001"""
    state = await api.register(FCM)
    [(recipient_id, secret_hash, channel, delivery, signing_key, topic_count, renewed_ns)] = await rows.recipients()
    assert secret_hash == hashlib.sha256(SECRET).digest() != SECRET
    assert (recipient_id, channel, delivery, signing_key, topic_count) == (ID, 2, "token", None, 0)
    assert state == wire.RecipientState(topic_count=0, channel="CHANNEL_FCM", expires_at_ns=renewed_ns + TTL_NS)


async def test_second_register_replaces_the_channel_and_keeps_the_subscription(api: Api, rows: Rows) -> None:
    """T002"""
    await api.register(http(key=b"s" * 20))
    await rows.set_boundary(7)
    updated = await api.update([add(group(1), KEY, KEY, KEY, base=3, commits=True)])
    before = await rows.subscriptions()
    await rows.set_boundary(9)
    state = await api.register(APNS)
    [row] = await rows.recipients()
    assert row[2:6] == (1, "abcd", None, 1)
    assert state == wire.RecipientState(topic_count=1, channel="CHANNEL_APNS", expires_at_ns=row[6] + TTL_NS)
    assert state.expires_at_ns > updated.expires_at_ns
    assert await rows.subscriptions() == before == [(ID, group(1), 7, 3, KEY, KEY, KEY, True)]


@pytest.mark.parametrize(
    ("delivery", "stored"),
    [
        pytest.param(APNS, (1, "abcd", None), id="apns"),
        pytest.param(FCM, (2, "token", None), id="fcm"),
        pytest.param(http(key=b"s" * 64), (3, "https://hooks.example.com/", b"s" * 64), id="http"),
    ],
)
async def test_every_channel_is_stored_as_named(
    api: Api, rows: Rows, delivery: dict[str, Any], stored: tuple[Any, ...]
) -> None:
    state = await api.register(delivery)
    assert state.channel == stored[0]
    assert [row[2:5] for row in await rows.recipients()] == [stored]


async def test_stored_hash_is_refused_as_a_secret(api: Api, rows: Rows) -> None:
    """T003 and S097"""
    await api.register(FCM)
    await api.update([add(group(1))])
    before = await rows.everything()
    stolen = before[0][0][1]
    assert await api.register(APNS, secret=stolen) == WRONG_SECRET
    assert await api.update([add(group(2))], secret=stolen) == WRONG_SECRET
    assert await api.unregister(secret=stolen) == WRONG_SECRET
    assert await rows.everything() == before


async def test_unregister_works_without_the_channel_and_succeeds_once(
    api: Api, rows: Rows, database: Database, metrics: Metrics
) -> None:
    """T005"""
    await api.register(FCM)
    await api.update([add(group(1))])
    later = Api(database, metrics, channels=[Channel.APNS])
    assert (await later.update([add(group(2))])).topic_count == 2
    assert await later.unregister() == wire.UnregisterResponse()
    assert await rows.everything() == ([], [])
    assert await later.unregister() == NOT_REGISTERED
    assert await later.update() == NOT_REGISTERED


@pytest.mark.parametrize("sizes", [(0, 32), (32, 0), (33, 32), (32, 33)], ids=str)
async def test_sizes_of_the_identity_come_before_everything_else(api: Api, rows: Rows, sizes: tuple[int, int]) -> None:
    """T010"""
    who = {"recipient_id": bytes(sizes[0]), "secret": bytes(sizes[1])}
    assert await api.register({}, **who) == MALFORMED
    assert await api.update([add(b"")], [b""], **who) == MALFORMED
    assert await api.unregister(**who) == MALFORMED
    assert await rows.recipients() == []


async def test_unknown_recipient_comes_before_the_payload(api: Api) -> None:
    """T011"""
    assert await api.unregister() == NOT_REGISTERED
    assert await api.update([wire.Subscription()]) == NOT_REGISTERED


async def test_wrong_secret_comes_before_the_payload(
    api: Api, rows: Rows, database: Database, metrics: Metrics
) -> None:
    """T012"""
    await api.register(FCM)
    before = await rows.everything()
    verdicts = UrlVerdicts()
    bare = Api(database, metrics, channels=[], check_webhook_url=verdicts)
    for either in (api, bare):
        assert await either.register(APNS, secret=OTHER_SECRET) == WRONG_SECRET
        assert await either.register({}, secret=OTHER_SECRET) == WRONG_SECRET
        assert await either.register(http("http://localhost", b""), secret=OTHER_SECRET) == WRONG_SECRET
        assert await either.unregister(secret=OTHER_SECRET) == WRONG_SECRET
        assert await either.update([wire.Subscription()], secret=OTHER_SECRET) == WRONG_SECRET
    assert await rows.everything() == before
    assert verdicts.asked == []


@pytest.mark.parametrize(
    "delivery", [APNS, FCM, http("http://localhost", b""), {}], ids=["apns", "fcm", "http", "none"]
)
async def test_without_channels_every_register_is_refused(
    database: Database, metrics: Metrics, rows: Rows, delivery: dict[str, Any]
) -> None:
    """T013"""
    verdicts = UrlVerdicts()
    api = Api(database, metrics, channels=[], check_webhook_url=verdicts)
    assert await api.register(delivery) == CHANNEL_NOT_CONFIGURED
    assert await rows.recipients() == []
    assert verdicts.asked == []


@pytest.mark.parametrize("channel", list(Channel))
async def test_only_the_configured_channel_is_accepted(
    database: Database, metrics: Metrics, rows: Rows, channel: Channel
) -> None:
    api = Api(database, metrics, channels=[channel])
    for offered, delivery in ((Channel.APNS, APNS), (Channel.FCM, FCM), (Channel.HTTP, http())):
        answer = await api.register(delivery)
        assert (answer == CHANNEL_NOT_CONFIGURED) == (offered is not channel)
    assert [row[2] for row in await rows.recipients()] == [channel]


async def test_register_without_a_delivery_is_malformed_where_channels_exist(api: Api, rows: Rows) -> None:
    """T017"""
    assert await api.register({}) == MALFORMED
    assert await rows.recipients() == []


class Addresses:
    """A scripted resolver: names it does not know have no address; while it is `down`, nobody knows of any."""

    def __init__(self, **hosts: list[str]) -> None:
        self.hosts = {name.replace("_", "."): [ip_address(text) for text in texts] for name, texts in hosts.items()}
        self.asked: list[str] = []
        self.down = False

    async def resolve(self, host: str) -> tuple[Address, ...] | None:
        self.asked.append(host)
        await trio.lowlevel.checkpoint()
        return None if self.down else tuple(self.hosts.get(host, ()))


def real_check(resolver: Addresses, allowed: list[str] | None = None, private: bool = False) -> Callable[[str], Any]:
    return partial(check_webhook_url, allowed_domains=allowed or [], allow_private_addresses=private, resolver=resolver)


@pytest.mark.parametrize(
    "url", ["", "invalid", "http://127.0.0.1", "https:///", "https://user:secret@127.0.0.1", "a\0"]
)
@pytest.mark.parametrize("key_bytes", [0, 16])
async def test_url_comes_before_the_signing_key(database: Database, metrics: Metrics, url: str, key_bytes: int) -> None:
    """T014"""
    api = Api(database, metrics, check_webhook_url=real_check(Addresses()))
    assert await api.register(http(url, bytes(key_bytes))) == WEBHOOK_URL


@pytest.mark.parametrize(("size", "fits"), [(0, False), (15, False), (16, True), (64, True), (65, False)])
async def test_signing_key_bounds(api: Api, rows: Rows, size: int, fits: bool) -> None:
    """T015"""
    answer = await api.register(http(key=bytes(size)))
    if fits:
        assert answer.channel == wire.CHANNEL_HTTP
        assert [row[4] for row in await rows.recipients()] == [bytes(size)]
    else:
        assert answer == SIGNING_KEY
        assert await rows.recipients() == []


LONG_URL = "https://hooks.example.com/"


@pytest.mark.parametrize(
    ("delivery", "answer"),
    [
        pytest.param({"fcm": wire.FcmDelivery()}, MALFORMED, id="empty FCM token"),
        pytest.param({"apns": wire.ApnsDelivery()}, MALFORMED, id="empty APNs token"),
        pytest.param({"fcm": wire.FcmDelivery(token="t" * 2049)}, MALFORMED, id="long token"),
        pytest.param({"fcm": wire.FcmDelivery(token="a\0b")}, MALFORMED, id="NUL in a token"),
        pytest.param({"apns": wire.ApnsDelivery(token="a\0b")}, MALFORMED, id="NUL in a device token"),
        pytest.param({"fcm": wire.FcmDelivery(token="é" * 2048)}, None, id="longest token, in characters"),
        pytest.param(http(LONG_URL + "x" * (2049 - len(LONG_URL))), MALFORMED, id="long URL"),
        pytest.param(http(LONG_URL + "x" * (2049 - len(LONG_URL)), b""), SIGNING_KEY, id="long URL after its key"),
        pytest.param(http(LONG_URL + "x" * (2048 - len(LONG_URL))), None, id="longest URL"),
    ],
)
async def test_target_shapes(api: Api, rows: Rows, delivery: dict[str, Any], answer: Refused | None) -> None:
    """T016"""
    got = await api.register(delivery)
    if answer is None:
        assert got.topic_count == 0
        assert len(await rows.recipients()) == 1
    else:
        assert got == answer
        assert await rows.recipients() == []


async def test_url_is_judged_with_list_and_addresses(database: Database, metrics: Metrics, rows: Rows) -> None:
    """T040 to T042 and S074, as far as Register asks the question and takes the answer."""
    resolver = Addresses(
        localhost=["127.0.0.1"],
        good_example_org=["8.8.8.8"],
        inside_example_org=["10.0.0.1"],
        mixed_example_org=["8.8.8.8", "10.0.0.1"],
    )

    async def ask(url: str, allowed: list[str] | None = None, private: bool = False) -> bool:
        api = Api(database, metrics, check_webhook_url=real_check(resolver, allowed, private))
        answer = await api.register(http(url))
        assert answer == WEBHOOK_URL or answer.channel == wire.CHANNEL_HTTP
        return answer != WEBHOOK_URL

    assert await ask("https://8.8.8.8/hook")
    assert await ask("https://good.example.org/hook")
    for url in (
        "https://localhost/hook", "https://127.0.0.1/", "https://[::1]/", "https://inside.example.org/",
        "https://mixed.example.org/", "https://unknown.example.org/", "http://8.8.8.8/", "https://u:p@8.8.8.8/",
    ):  # fmt: skip
        assert not await ask(url), url
    assert await ask("https://localhost/hook", ["LOCALHOST"], private=True)
    assert not await ask("https://127.0.0.1/hook", ["LOCALHOST"], private=True)
    assert await ask("https://good.example.org/", ["*.EXAMPLE.org"])
    assert not await ask("https://inside.example.org/", ["*.example.org"])
    assert not await ask("https://evilexample.org/", ["*.example.org"])
    assert "evilexample.org" not in resolver.asked  # the list is asked before any name server
    assert len(await rows.recipients()) == 1


async def test_recipient_keeps_its_url_when_the_list_changes_until_it_registers(
    database: Database, metrics: Metrics, rows: Rows
) -> None:
    resolver = Addresses(old_example_org=["8.8.8.8"])
    wide = Api(database, metrics, check_webhook_url=real_check(resolver))
    narrow = Api(database, metrics, check_webhook_url=real_check(resolver, ["new.example.org"]))
    await wide.register(http("https://old.example.org/"))
    before = await rows.recipients()
    assert (await narrow.update([add(group(1))])).topic_count == 1
    assert await narrow.register(http("https://old.example.org/")) == WEBHOOK_URL
    assert [row[2:5] for row in await rows.recipients()] == [row[2:5] for row in before]


async def test_renewal_while_name_servers_are_down_may_be_tried_again_and_changes_nothing(
    database: Database, metrics: Metrics, rows: Rows
) -> None:
    """INVALID_ARGUMENT would switch the client off for good."""
    resolver = Addresses(hooks_example_org=["8.8.8.8"])
    api = Api(database, metrics, check_webhook_url=real_check(resolver))
    hook = http("https://hooks.example.org/")
    await api.register(hook)
    before = await rows.everything()
    resolver.down = True
    assert await api.register(hook) == WEBHOOK_UNRESOLVED
    assert await rows.everything() == before
    resolver.down = False
    assert (await api.register(hook)).channel == wire.CHANNEL_HTTP


async def test_no_session_is_held_while_a_name_is_resolved(database_url: str, metrics: Metrics) -> None:
    """A pool of one session serves another caller while the first waits for its name server."""
    asked, answered = trio.Event(), trio.Event()

    async def slow(url: str) -> None:
        asked.set()
        await answered.wait()

    async with open_database(DatabaseSettings(database_url, max_connections=1), metrics) as database:
        api = Api(database, metrics, check_webhook_url=slow)
        answers = []

        async def register_webhook() -> None:
            answers.append(await api.register(http()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(register_webhook)
            with trio.fail_after(20):
                await asked.wait()
                assert (await api.register(FCM, recipient_id=bytes(32))).channel == wire.CHANNEL_FCM
                async with database.primary() as connection:
                    assert await connection.fetch_one(
                        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                        "AND xact_start IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
                    ) == (0,)
            answered.set()
        assert answers[0].channel == wire.CHANNEL_HTTP


async def test_start_positions_and_key_slots(api: Api, rows: Rows) -> None:
    """T020"""
    await api.register(FCM)
    await rows.set_boundary(12)
    keys = [bytes([number]) * 42 for number in (1, 2, 3)]
    state = await api.update(
        [
            add(group(1), base=7, commits=True),
            add(group(2), keys[0], base=7, commits=True),
            add(welcome(3), *keys, base=7, commits=True),
        ]
    )
    assert state.topic_count == 3
    assert await rows.subscriptions() == [
        (ID, group(1), 12, None, None, None, None, True),
        (ID, group(2), 12, 7, keys[0], None, None, True),
        (ID, welcome(3), 12, 7, *keys, True),
    ]


async def test_omitted_commit_flag_is_stored_as_false(api: Api, rows: Rows) -> None:
    await api.register(FCM)
    await api.update([wire.Subscription(topic=group(1))])
    assert [row[-1] for row in await rows.subscriptions()] == [False]


async def test_update_answers_with_the_row_and_renews_it(api: Api, rows: Rows) -> None:
    """T036: an update of nothing renews as well."""
    first = await api.register(FCM)
    second = await api.update([add(group(1)), add(group(2))], [group(9)])
    third = await api.update()
    [row] = await rows.recipients()
    assert first.expires_at_ns < second.expires_at_ns < third.expires_at_ns
    assert third == wire.RecipientState(topic_count=2, channel="CHANNEL_FCM", expires_at_ns=row[6] + TTL_NS)


async def test_expiry_follows_the_configured_period(database: Database, metrics: Metrics, rows: Rows) -> None:
    state = await Api(database, metrics, ttl_s=86_400).register(FCM)
    assert state.expires_at_ns == (await rows.recipients())[0][6] + DAY_NS


async def test_response_needs_no_subscription_row(api: Api, rows: Rows, database: Database) -> None:
    """PUSH-023: the count comes from the recipient's row, even where the two disagree."""
    await api.register(FCM)
    async with database.primary() as connection:
        await connection.execute("UPDATE push_recipient SET topic_count = 41")
    assert (await api.register(FCM)).topic_count == 41
    assert (await api.update()).topic_count == 41


@pytest.mark.parametrize(
    ("adds", "removes"),
    [
        *[
            pytest.param([add(topic)], [], id=f"T030 {len(topic)} bytes of kind {topic[:1].hex() or 'none'}")
            for topic in (
                b"", b"\x00", bytes(16), bytes(18), b"\x01" * 32, b"\x01" * 34, b"\x02" * 33, b"\xff" * 33
            )
        ],
        pytest.param([add(group(1), KEY, KEY, KEY, KEY)], [], id="T031"),
        *[pytest.param([add(group(1), bytes(size))], [], id=f"T032 {size}") for size in (0, 41, 43)],
        pytest.param([add(group(1), KEY, base=-1)], [], id="T033"),
        pytest.param([add(group(1)), add(group(1))], [], id="T034 added twice"),
        pytest.param([], [group(1), group(1)], id="T034 removed twice"),
        pytest.param([add(group(1))], [group(1)], id="T034 both"),
        pytest.param([], [b"\x02" * 33], id="T035"),
        pytest.param([add(group(7)), add(group(8)), add(b"")], [group(5)], id="last of several"),
    ],
)  # fmt: skip
async def test_malformed_update_changes_nothing(
    api: Api, rows: Rows, adds: list[wire.Subscription], removes: list[bytes]
) -> None:
    """T018 for every row of T030 to T035: not even the renewal is left."""
    await api.register(FCM)
    await api.update([add(group(5))])
    before = await rows.everything()
    assert await api.update(adds, removes) == SUBSCRIPTION
    assert await rows.everything() == before


async def test_refused_register_changes_nothing(api: Api, rows: Rows, database: Database, metrics: Metrics) -> None:
    await api.register(FCM)
    await api.update([add(group(5))])
    before = await rows.everything()
    strict = Api(database, metrics, channels=[Channel.FCM, Channel.HTTP], check_webhook_url=UrlVerdicts({"bad"}))
    assert await strict.register(APNS) == CHANNEL_NOT_CONFIGURED
    assert await strict.register({}) == MALFORMED
    assert await strict.register(http("bad")) == WEBHOOK_URL
    assert await strict.register(http(key=bytes(15))) == SIGNING_KEY
    assert await strict.register({"fcm": wire.FcmDelivery(token="")}) == MALFORMED
    assert await rows.everything() == before


async def test_topic_limit_undoes_the_whole_update(database: Database, metrics: Metrics, rows: Rows) -> None:
    """T023 and T025"""
    api = Api(database, metrics, max_topics=2)
    await api.register(FCM)
    await api.update([add(group(1)), add(group(2))])
    before = await rows.everything()
    assert await api.update([add(group(3)), add(group(4))], [group(1)]) == TOPIC_LIMIT
    assert await rows.everything() == before
    assert (await api.update([add(welcome(3))], [group(1)])).topic_count == 2
    assert counts(metrics)["removed"] == 1


async def test_shape_comes_before_the_limit(database: Database, metrics: Metrics) -> None:
    api = Api(database, metrics, max_topics=1)
    await api.register(FCM)
    assert await api.update([add(group(1)), add(group(2)), add(b"")]) == SUBSCRIPTION
    assert await api.update([add(group(1)), add(group(2))]) == TOPIC_LIMIT


async def test_update_of_very_many_topics_gives_others_their_turns(
    api: Api, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S086: 100,001 adds keep a processor busy for most of a second, and are one too many."""
    await api.register(FCM)
    before = await rows.everything()
    begun_at: dict[str, int] = {}
    turns = 0

    def note(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            begun_at[what] = turns
            return function(*args, **kwargs)

        return noted

    monkeypatch.setattr(checks, "UpdateCheck", note("check", checks.UpdateCheck))
    monkeypatch.setattr(recipients, "update_subscriptions", note("store", recipients.update_subscriptions))
    monkeypatch.setattr(Database, "fetch_one", note("statement", Database.fetch_one))

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count_turns)
        refused = await api.update([add(group(number), KEY, KEY, KEY) for number in range(100_001)])
        nursery.cancel_scope.cancel(reason="counted")
    assert refused == TOPIC_LIMIT
    assert begun_at["store"] - begun_at["check"] >= 10
    assert begun_at["statement"] - begun_at["store"] >= 3
    assert await rows.everything() == before


async def test_counters_start_at_zero_and_count_rows(api: Api, metrics: Metrics) -> None:
    zero = {"registered": 0, "unregistered": 0, "expired": 0, "dead": 0, "added": 0, "removed": 0}
    assert counts(metrics) == zero
    await api.register(FCM)
    await api.register(APNS)  # a renewal counts too
    await api.update([add(group(1)), add(group(2)), add(group(3))])
    await api.update([add(group(1), KEY), add(group(4))], [group(2), group(9)])  # one replaced, one absent
    assert counts(metrics) == zero | {"registered": 2, "added": 4, "removed": 1}
    await api.unregister()  # takes the three that are left along
    await api.unregister()
    await api.update([add(group(1))])
    await api.register({}, recipient_id=bytes(32))
    assert counts(metrics) == zero | {"registered": 2, "added": 4, "removed": 4, "unregistered": 1}


async def test_closed_pool_is_unavailable_on_every_method(database_url: str, metrics: Metrics) -> None:
    """T008: the boundary answers `str()` of what is raised here, and that is a constant."""
    async with open_database(DatabaseSettings(database_url), metrics) as database:
        api = Api(database, metrics)
        await api.register(FCM)
        database.close()
        for call in (api.register(FCM), api.update([add(group(1))]), api.unregister()):
            with pytest.raises(StoreUnavailable) as raised:
                await call
            assert str(raised.value) == "database operation failed"
