"""Uploading, renewing and repairing (PUSH-082 to PUSH-089, PUSH-092)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from pushd.client import Consent, Enabled, GroupKind, NotificationConfig, NotificationsDelayed, Override, fcm
from pushd.client.decisions import BATCH_TOPICS, Limit
from pushd.core.hmac_keys import derive_key, epoch_at, root_key_fingerprint
from pushd.errors import Code
from tests.client.rig import (
    CONFIG,
    EPOCH_NS,
    HOUR_NS,
    ONLY_GROUPS,
    TOKEN,
    WELCOME,
    Pause,
    Rig,
    copied,
    gid,
    topic,
)
from tests.client.worlds import MemoryWorld, World

MINUTE_NS = 60 * 10**9


def one_more(state) -> None:
    state.topic_count += 1


@pytest.mark.parametrize("count_differs", [True, False], ids=["every-count", "updates-only"])
async def test_T174_count_that_never_agrees_does_not_restart_the_pass(
    rig: Rig, world: World, count_differs: bool
) -> None:
    rig.groups(*range(2_500))
    if count_differs:
        rig.faults.edit_state = one_more
    await rig.client.enable_notifications(ONLY_GROUPS)
    rig.faults.edit_state = one_more
    assert await rig.step()
    assert (len(rig.uploaded), rig.stale, rig.settings.repairing) == (1_000, 1_000, True)
    assert await rig.step()
    assert await rig.step()
    assert (len(rig.uploaded), rig.stale, rig.settings.repairing) == (2_500, 500, True)
    assert set(await world.topics(rig.recipient_id)) == set(rig.uploaded)
    await rig.settle()
    assert (rig.stale, rig.settings.repairing) == (0, False)
    assert rig.faults.names == ["register", "update", "update", "update", "update"]
    assert max(len(request.adds) for name, request in rig.faults.calls if name == "update") == BATCH_TOPICS


async def test_count_that_stays_high_after_a_pass_is_warned_about_once(rig: Rig, caplog) -> None:
    rig.groups(1, 2)
    await rig.enabled(ONLY_GROUPS)
    rig.faults.edit_state = one_more
    await _renew(rig)
    assert rig.faults.take() == ["register", "update"]  # one pass
    for _ in range(3):
        caplog.clear()
        await _renew(rig)
        assert rig.faults.take() == ["register"]
        assert rig.stale == 0
        assert len(caplog.records) == (1 if _ == 0 else 0)

    rig.faults.edit_state = lambda state: None  # agreement, then news
    await _renew(rig)
    rig.faults.take()
    rig.faults.edit_state = one_more
    await _renew(rig)
    assert rig.faults.take() == ["register", "update"]


async def _renew(rig: Rig) -> None:
    rig.set("renewal_ns", 0)
    rig.client.wake()
    await rig.settle()


async def test_T175_repair_survives_a_copy(rig: Rig, world: World, tmp_path: Path) -> None:
    rig.groups(*range(2_500))
    await rig.enabled(ONLY_GROUPS)
    rig.faults.edit_state = one_more
    rig.set("renewal_ns", 0)
    rig.client.wake()
    await rig.step()
    assert rig.stale == 2_500
    await rig.step()
    assert rig.stale == 1_500
    rig.faults.take()
    with copied(rig, tmp_path / "copy.db") as other:
        assert (other.stale, other.settings.repairing) == (1_500, True)
        stale = {name for name, row in other.uploaded.items() if row.stale}
        await other.step()
        assert len(rig.faults.calls[0][1].adds) == 1_000
        assert {add.topic for add in rig.faults.calls[0][1].adds} <= stale
        await other.settle()
        assert (other.stale, other.settings.repairing) == (0, False)


async def test_T176_desired_set(rig: Rig, world: World) -> None:
    client = rig.client
    rig.groups(1)
    rig.groups(2, consent=Consent.DENIED)
    rig.groups(3, consent=Consent.DENIED)
    client.conversation(gid(3)).set_notifications(Override.ENABLED)
    rig.groups(4)
    client.conversation(gid(4)).set_notifications(Override.DISABLED)
    client.join_group(gid(5), GroupKind.SYNC)
    client.set_consent(gid(5), Consent.ALLOWED)
    client.conversation(gid(5)).set_notifications(Override.ENABLED)
    rig.groups(6)
    client.conversation(gid(6)).set_notifications(Override.ENABLED)
    client.leave_group(gid(6))
    client.set_consent(gid(7), Consent.ALLOWED)  # decided on another device, before the group is here
    await rig.enabled()
    assert set(await world.topics(rig.recipient_id)) == {topic(1), topic(3), WELCOME}

    client.conversation(gid(5)).set_notifications(Override.DISABLED)
    client.join_group(gid(7))
    await client.enable_notifications(NotificationConfig(fcm(TOKEN), include_welcomes=False, include_sync_groups=True))
    await rig.settle()
    assert set(await world.topics(rig.recipient_id)) == {topic(1), topic(3), topic(5), topic(7)}


async def test_uploaded_keys_are_those_of_the_epoch_before_this_one_and_the_next(rig: Rig, world: World) -> None:
    key = os.urandom(42)
    rig.client.set_root_key(key)
    rig.groups(1)
    await rig.enabled()
    stored = await world.topics(rig.recipient_id)
    epoch = epoch_at(rig.clock.now_ns())
    assert stored[topic(1)].epoch_base == epoch - 1
    assert stored[topic(1)].keys == tuple(derive_key(key, gid(1), epoch + n) for n in (-1, 0, 1))
    assert (stored[WELCOME].epoch_base, stored[WELCOME].keys) == (None, ())
    assert rig.uploaded[topic(1)].fingerprint == root_key_fingerprint(key)


@pytest.mark.parametrize("reason", ["epoch", "root-key", "commits"])
async def test_T177_reasons_to_upload_again(rig: Rig, world: World, reason: str) -> None:
    rig.groups(1)
    await rig.enabled()
    before = (await world.topics(rig.recipient_id))[topic(1)]
    match reason:
        case "epoch":
            with rig.db:
                rig.db.execute("UPDATE uploaded SET hmac_epoch_base = hmac_epoch_base - 2 WHERE topic = ?", (topic(1),))
            rig.client.wake()
        case "root-key":
            rig.client.cycle_root_key()
        case "commits":
            await rig.client.enable_notifications(NotificationConfig(fcm(TOKEN), include_commits=True))
            rig.faults.take()
    await rig.settle()
    (call,) = rig.faults.calls
    assert [add.topic for add in call[1].adds] == [topic(1)]
    stored = (await world.topics(rig.recipient_id))[topic(1)]
    epoch = epoch_at(rig.clock.now_ns())
    assert stored.epoch_base == epoch - 1
    assert len(stored.keys) == 3
    assert (stored.keys != before.keys) == (reason == "root-key")
    assert stored.include_commits == (reason == "commits")


@pytest.mark.parametrize(("epochs", "uploads"), [(0, 0), (1, 1), (2, 1), (12, 1), (-2, 0), (-3, 1)])
async def test_window_is_uploaded_again_once_it_does_not_cover_the_next_epoch(
    memory_rig: Rig, epochs: int, uploads: int
) -> None:
    rig = memory_rig
    rig.groups(1)
    await rig.enabled()
    rig.set("renewal_ns", 2**62)
    rig.clock.advance(epochs * EPOCH_NS)
    rig.client.wake()
    await rig.settle()
    assert rig.faults.names == ["update"] * uploads


@pytest.fixture
def max_topics(request: pytest.FixtureRequest) -> int:
    return 1 if "limit" in request.node.name else 100_000


async def test_T178_topic_limit_withholds_adds_until_other_topics_are_wanted(rig: Rig, world: World) -> None:
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    rig.groups(2)
    await rig.settle()
    assert rig.faults.take() == ["update"]
    assert rig.client.notification_state().limited
    rig.client.wake()
    rig.clock.advance(HOUR_NS)
    await rig.settle()
    assert rig.faults.take() == []
    rig.client.conversation(gid(1)).set_notifications(Override.DISABLED)
    await rig.settle()
    assert set(await world.topics(rig.recipient_id)) == {topic(2)} == set(rig.uploaded)
    assert not rig.client.notification_state().limited


async def test_T179_removal_is_sent_alone_while_the_limit_withholds_adds(rig: Rig, world: World) -> None:
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    rig.client.leave_group(gid(1))
    rig.groups(2, 3)
    await rig.step()  # refused as a whole
    assert set(rig.uploaded) == {topic(1)}
    await rig.step()
    assert [(list(call.adds), list(call.removes)) for _, call in rig.faults.calls[1:]] == [([], [topic(1)])]
    assert rig.uploaded == {}
    await rig.settle()
    assert len(rig.faults.calls) == 2
    rig.client.leave_group(gid(3))
    await rig.settle()
    assert set(await world.topics(rig.recipient_id)) == {topic(2)}


async def test_topic_limit_does_not_keep_keys_from_being_renewed(rig: Rig, world: World) -> None:
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    before = await world.topics(rig.recipient_id)
    rig.groups(2)
    await rig.settle()
    assert rig.settings.withheld is Limit.GROWTH
    rig.client.cycle_root_key()
    await rig.settle()
    assert rig.faults.take() == ["update", "update"]
    after = await world.topics(rig.recipient_id)
    assert set(after) == set(before)
    assert after[topic(1)].keys != before[topic(1)].keys


async def test_backend_that_refuses_even_renewed_keys_is_not_asked_again(memory_rig: Rig) -> None:
    rig = memory_rig
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    rig.faults.always["update"] = Code.RESOURCE_EXHAUSTED
    rig.client.cycle_root_key()
    rig.groups(2)
    await rig.settle()
    assert rig.faults.take() == ["update", "update"]
    assert rig.settings.withheld is Limit.ALL
    rig.client.wake()
    await rig.settle()
    assert rig.faults.take() == []
    rig.client.leave_group(gid(1))
    await rig.settle()
    # The wanted set has changed: adds are tried again, then the removal alone, whose refusal is trouble like any other.
    assert [(len(call.adds), len(call.removes)) for _, call in rig.faults.calls] == [(1, 1), (0, 1)]
    assert rig.tasks == [("pushd.notifications", 1, MINUTE_NS)]


async def test_T180_renewal_finds_an_emptied_backend_and_repairs_it(rig: Rig, world: World) -> None:
    rig.groups(1, 2)
    await rig.enabled(ONLY_GROUPS)
    await world.forget(rig.recipient_id)
    rig.set("renewal_ns", 0)
    rig.client.wake()
    await rig.step()
    assert rig.faults.take() == ["register"]
    assert rig.stale == 2
    await rig.settle()
    assert rig.faults.take() == ["update"]
    assert set(await world.topics(rig.recipient_id)) == {topic(1), topic(2)}
    assert rig.stale == 0


async def test_T180_lost_recipient_is_registered_before_the_next_difference(rig: Rig, world: World) -> None:
    rig.groups(1, 2)
    await rig.enabled(ONLY_GROUPS)
    await world.forget(rig.recipient_id)
    rig.groups(3)
    await rig.step()
    assert rig.faults.take() == ["update"]
    assert rig.uploaded == {}
    assert rig.settings.repairing
    await rig.step()
    assert rig.faults.take() == ["register"]
    await rig.settle()
    assert rig.faults.take() == ["update"]
    assert set(await world.topics(rig.recipient_id)) == set(rig.uploaded) == {topic(1), topic(2), topic(3)}
    assert not rig.settings.repairing


async def test_lost_recipient_gets_back_what_it_had_although_the_limit_was_reached(memory_rig: Rig) -> None:
    rig = memory_rig
    backend = rig.faults._backend
    assert isinstance(backend, MemoryWorld)
    backend.max_topics = BATCH_TOPICS
    rig.groups(*range(BATCH_TOPICS))
    await rig.enabled(ONLY_GROUPS)
    rig.groups(BATCH_TOPICS)
    await rig.settle()
    assert rig.settings.withheld is Limit.GROWTH
    await backend.forget(rig.recipient_id)
    rig.client.cycle_root_key()
    await rig.settle()
    # Every topic is a new one for the backend now; withholding them would leave the user with none at all.
    assert len(await backend.topics(rig.recipient_id)) == len(rig.uploaded) == BATCH_TOPICS
    assert rig.settings.withheld is Limit.GROWTH


async def test_register_that_does_not_find_the_recipient_starts_over(memory_rig: Rig) -> None:
    rig = memory_rig
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    for register in (lambda: _renew(rig), lambda: rig.client.enable_notifications(ONLY_GROUPS)):
        rig.faults.next("register", Code.NOT_FOUND)
        with contextlib.suppress(NotificationsDelayed):
            await register()
        assert rig.faults.take() == ["register"]
        assert rig.uploaded == {}
        assert (rig.settings.registration_owed, rig.settings.repairing) == (True, True)
        assert rig.tasks == [("pushd.notifications", 1, MINUTE_NS)]
        rig.clock.advance(MINUTE_NS)
        await rig.settle()
        assert rig.faults.take() == ["register", "update"]
        assert set(rig.uploaded) == {topic(1)}


async def test_backend_that_forgets_at_once_is_not_asked_in_a_loop(memory_rig: Rig) -> None:
    rig = memory_rig
    await rig.enabled()
    rig.faults.always["update"] = Code.NOT_FOUND
    rig.groups(1)
    await rig.settle()
    assert rig.faults.take() == ["update", "register", "update"]
    assert rig.tasks == [("pushd.notifications", 1, MINUTE_NS)]
    rig.faults.always.clear()
    rig.clock.advance(MINUTE_NS)
    await rig.settle()
    assert rig.faults.take() == ["register", "update"]


async def test_T182_failures_are_retried_after_a_minute_whatever_wakes(rig: Rig) -> None:
    await rig.enabled()
    rig.groups(1)
    rig.faults.next("update", Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.UNAUTHENTICATED)
    waits = []
    for _ in range(3):
        await rig.settle()
        for _ in range(20):
            rig.client.wake()
        await rig.settle()
        ((_, _, wait),) = rig.tasks
        waits.append(wait)
        rig.clock.advance(wait)
    assert waits == [MINUTE_NS, 2 * MINUTE_NS, 4 * MINUTE_NS]
    await rig.settle()
    assert rig.faults.take() == ["update"] * 4
    assert rig.tasks == [("pushd.notifications", 0, HOUR_NS)]
    assert rig.db.execute("SELECT expires_ns FROM task").fetchall() == [(None,)]
    rig.groups(2)  # wakes, and so cuts the hour short
    await rig.settle()
    assert rig.faults.take() == ["update"]


async def test_lost_wake_costs_an_hour(rig: Rig) -> None:
    await rig.enabled()
    with rig.db:
        rig.db.execute("INSERT INTO topic (topic, kind, member, consent) VALUES (?, 1, 1, 2)", (topic(1),))
    rig.clock.advance(HOUR_NS - 1)
    assert not await rig.step()
    rig.clock.advance(1)
    await rig.settle()
    assert rig.faults.take() == ["update"]


async def test_T186_root_key_that_changes_during_an_upload_is_uploaded_next(rig: Rig, world: World) -> None:
    await rig.enabled(ONLY_GROUPS)
    rig.groups(1)
    old = root_key_fingerprint(rig.db.execute("SELECT root_key FROM settings").fetchone()[0])
    pause = Pause(after=True)
    rig.faults.next("update", pause)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.step)
        await pause.reached.wait()
        new = rig.client.cycle_root_key()
        pause.released.set()
    assert rig.uploaded[topic(1)].fingerprint == old
    await rig.settle()
    assert rig.uploaded[topic(1)].fingerprint == root_key_fingerprint(new)
    assert rig.faults.take() == ["update", "update"]


async def test_renewal_is_due_after_a_quarter_of_the_time_left(rig: Rig) -> None:
    await rig.enabled()
    current = rig.settings
    assert current.last_state is not None
    quarter = (current.last_state.expires_at_ns - rig.clock.now_ns()) // 4
    assert current.renewal_ns == rig.clock.now_ns() + quarter
    assert quarter == pytest.approx(7.5 * 24 * HOUR_NS, rel=0.01)
    due = current.renewal_ns - 1
    while rig.clock.now_ns() < due:
        rig.clock.advance(min(HOUR_NS, due - rig.clock.now_ns()))
        await rig.settle()
    assert rig.faults.take() == []
    rig.clock.advance(1)
    await rig.settle()
    assert rig.faults.take() == ["register"]


async def test_clock_far_ahead_of_the_backend_does_not_register_in_a_loop(rig: Rig) -> None:
    rig.clock.advance(10 * 365 * 24 * HOUR_NS)
    await rig.enabled()
    rig.clock.advance(HOUR_NS)
    await rig.settle()
    assert rig.faults.take() == ["register"]


async def test_answer_that_is_lost_is_made_up_for(rig: Rig, world: World) -> None:
    rig.groups(1)
    await rig.enabled()
    rig.groups(2)
    rig.client.leave_group(gid(1))
    rig.faults.next("update", "cut")
    await rig.settle()
    assert set(rig.uploaded) == {WELCOME, topic(1)}
    rig.clock.advance(MINUTE_NS)
    await rig.settle()
    assert rig.faults.take() == ["update", "update"]
    assert set(rig.uploaded) == set(await world.topics(rig.recipient_id)) == {WELCOME, topic(2)}
    assert rig.stale == 0


async def test_restored_file_finds_its_way_back(rig: Rig, world: World, tmp_path: Path) -> None:
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    with copied(rig, tmp_path / "backup.db") as restored:
        rig.groups(2, 3)
        await rig.settle()
        rig.faults.take()
        restored.groups(2)
        await restored.settle()
        assert set(restored.uploaded) == {topic(1), topic(2)}
        assert restored.stale == 0
        # Topic 3 is the backend's alone. Nothing removes it, and nothing keeps trying.
        assert set(await world.topics(rig.recipient_id)) == {topic(1), topic(2), topic(3)}
        rig.faults.take()
        await _renew(restored)
        await _renew(restored)
        assert rig.faults.take() == ["register", "register"]
        assert isinstance(restored.client.notification_state(), Enabled)


async def test_removes_have_a_batch_of_their_own(rig: Rig, world: World) -> None:
    rig.groups(*range(1_500))
    await rig.enabled(ONLY_GROUPS)
    with rig.db:
        rig.db.execute("UPDATE topic SET consent = 3")
    rig.groups(*range(2_000, 3_200))
    await rig.settle()
    sizes = [(len(call.adds), len(call.removes)) for _, call in rig.faults.calls]
    assert sizes == [(1_000, 1_000), (200, 500)]
    assert len(await world.topics(rig.recipient_id)) == 1_200


async def test_other_channel_in_the_answer_is_warned_about(memory_rig: Rig, caplog) -> None:
    memory_rig.faults.edit_state = lambda state: setattr(state, "channel", 3)
    await memory_rig.enabled()
    assert any("channel" in record.getMessage() for record in caplog.records)
    assert isinstance(memory_rig.client.notification_state(), Enabled)


async def test_unheard_of_numbers_in_the_answer_are_survived(memory_rig: Rig) -> None:
    def strange(state) -> None:
        state.topic_count, state.channel, state.expires_at_ns = 2**64 - 1, 17, -(2**63)

    memory_rig.faults.edit_state = strange
    await memory_rig.enabled()
    state = memory_rig.client.notification_state()
    assert isinstance(state, Enabled)
    assert state.last_state is not None
    assert state.last_state.channel is None


async def test_consent_change_is_committed_and_told_before_the_wake(memory_rig: Rig) -> None:
    rig = memory_rig
    rig.groups(1)
    await rig.enabled(ONLY_GROUPS)
    seen = []

    def listener(group_id: bytes, consent: Consent) -> None:
        assert not rig.db.in_transaction
        seen.append((group_id, consent, set(rig.uploaded)))
        raise RuntimeError("a listener of the app")

    rig.client.on_consent(listener)
    with pytest.raises(RuntimeError):
        rig.client.set_consent(gid(1), Consent.DENIED)
    assert seen == [(gid(1), Consent.DENIED, {topic(1)})]
    await rig.settle()  # the wake came all the same
    assert rig.uploaded == {}


async def test_changes_write_no_notification_record(memory_rig: Rig) -> None:
    rig = memory_rig
    rig.groups(1)
    await rig.enabled()
    watched = ("uploaded", "task")
    before = [rig.db.execute(f"SELECT * FROM {table}").fetchall() for table in watched], rig.settings
    client = rig.client
    client.create_group(gid(2))
    client.join_group(gid(3), GroupKind.DM)
    client.set_consent(gid(1), Consent.DENIED)
    client.leave_group(gid(2))
    client.conversation(gid(1)).set_notifications(Override.ENABLED)
    client.cycle_root_key()
    assert before == ([rig.db.execute(f"SELECT * FROM {table}").fetchall() for table in watched], rig.settings)
    await rig.step()
    assert rig.faults.take() == ["update"]


async def test_nothing_is_called_while_disabled(memory_rig: Rig) -> None:
    rig = memory_rig
    rig.groups(1)
    for _ in range(3):
        rig.client.wake()
        rig.clock.advance(30 * 24 * HOUR_NS)
        await rig.settle()
    assert rig.faults.names == []
    assert rig.tasks == []


@pytest.mark.parametrize("topics", [0, 1, 999, 1_000, 1_001, 2_000, 2_001])
async def test_every_topic_is_subscribed_within_its_share_of_runs(tmp_path, memory_rig: Rig, topics: int) -> None:
    rig = memory_rig
    rig.groups(*range(topics))
    rig.faults.edit_state = one_more
    await rig.client.enable_notifications(ONLY_GROUPS)
    for _ in range(-(-topics // BATCH_TOPICS)):
        await rig.step()
    assert len(rig.uploaded) == topics


async def test_memory_model_agrees_with_itself(memory_rig: Rig) -> None:
    backend = memory_rig.faults._backend
    assert isinstance(backend, MemoryWorld)
    memory_rig.groups(1)
    await memory_rig.enabled(CONFIG)
    assert set(await backend.topics(memory_rig.recipient_id)) == {topic(1), WELCOME}
