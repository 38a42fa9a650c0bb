"""Enable, disable and what the client remembers (PUSH-080, PUSH-081, PUSH-084, PUSH-085, PUSH-089)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from pushd.client import (
    CallFailed,
    Consent,
    Disabled,
    Enabled,
    Failed,
    GroupKind,
    InvalidConfig,
    NotificationConfig,
    NotificationsDelayed,
    NotificationsStopped,
    Override,
    RunnerDisabled,
    Superseded,
    UnknownConversation,
    apns,
    fcm,
    webhook,
)
from pushd.errors import Code
from pushd.model import Channel
from tests.client.rig import CONFIG, HOUR_NS, ONLY_GROUPS, TOKEN, WELCOME, Pause, Rig, copied, gid, open_rig, topic
from tests.client.worlds import MemoryWorld, World

TERMINAL = (
    Code.PERMISSION_DENIED,
    Code.INVALID_ARGUMENT,
    Code.OUT_OF_RANGE,
    Code.UNIMPLEMENTED,
    Code.FAILED_PRECONDITION,
)


@pytest.mark.parametrize("size", [16, 64])
async def test_T164_webhook_key_within_bounds_registers_once(rig: Rig, world: World, size: int) -> None:
    state = await rig.client.enable_notifications(NotificationConfig(webhook("https://127.0.0.1/hook", bytes(size))))
    assert rig.faults.names == ["register"]
    assert (state.topic_count, state.channel) == (0, Channel.HTTP)
    assert await world.delivery(rig.recipient_id) == "https://127.0.0.1/hook"
    assert rig.client.notification_state() == Enabled(Channel.HTTP, True, state, repairing=False, limited=False)


@pytest.mark.parametrize(
    "delivery",
    [
        pytest.param(webhook("https://example.org/", bytes(15)), id="T164-15"),
        pytest.param(webhook("https://example.org/", bytes(65)), id="T164-65"),
        pytest.param(webhook("", bytes(16)), id="T165-url"),
        pytest.param(apns(""), id="T165-apns"),
        pytest.param(fcm(""), id="T165-fcm"),
        pytest.param(fcm("x" * 2_049), id="too-long"),
        pytest.param(fcm("a\0b"), id="nul"),
    ],
)
async def test_delivery_that_cannot_work_stores_nothing(memory_rig: Rig, delivery) -> None:
    before = memory_rig.settings
    with pytest.raises(InvalidConfig):
        await memory_rig.client.enable_notifications(NotificationConfig(delivery))
    assert memory_rig.settings == before
    assert memory_rig.client.notification_state() == Disabled()
    assert memory_rig.tasks == []
    assert memory_rig.faults.names == []


async def test_T166_enable_without_task_runner_stores_nothing(tmp_path: Path) -> None:
    with open_rig(tmp_path / "client.db", MemoryWorld(), runner=False) as rig:
        with pytest.raises(RunnerDisabled):
            await rig.client.enable_notifications(CONFIG)
        assert rig.settings.identity is None
        assert rig.settings.config is None
        assert rig.tasks == []
        assert rig.faults.names == []


@pytest.mark.parametrize(
    ("delivery", "channel"), [(apns("00ff" * 16), Channel.APNS), (fcm(TOKEN), Channel.FCM)], ids=["apns", "fcm"]
)
async def test_T167_rules_and_delivery_are_carried_and_survive_a_copy(
    rig: Rig, world: World, tmp_path: Path, delivery, channel: Channel
) -> None:
    client = rig.client
    client.create_group(gid(1))
    client.join_group(gid(2))
    client.set_consent(gid(2), Consent.DENIED)
    client.join_group(gid(3), GroupKind.SYNC)
    config = NotificationConfig(
        delivery,
        consent_states=frozenset({Consent.UNKNOWN, Consent.DENIED}),
        include_welcomes=False,
        include_sync_groups=True,
        include_commits=True,
    )
    await client.enable_notifications(config)
    await rig.settle()
    assert await world.delivery(rig.recipient_id) == delivery.target
    stored = await world.topics(rig.recipient_id)
    assert set(stored) == {topic(2), topic(3)}
    assert all(one.include_commits for one in stored.values())
    assert rig.settings.last_state is not None
    assert rig.settings.last_state.channel is channel
    with copied(rig, tmp_path / "copy.db") as other:
        assert other.settings == rig.settings
        assert other.settings.config == config
        assert other.client.notification_state() == client.notification_state()


async def test_T168_topic_limit_at_register_is_retried_by_the_task(rig: Rig) -> None:
    rig.faults.next("register", Code.RESOURCE_EXHAUSTED)
    with pytest.raises(NotificationsDelayed) as caught:
        await rig.client.enable_notifications(CONFIG)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    state = rig.client.notification_state()
    assert state == Enabled(Channel.FCM, False, None, repairing=False, limited=False)
    assert rig.tasks == [("pushd.notifications", 1, 60 * 10**9)]
    assert not await rig.step()
    rig.clock.advance(60 * 10**9)
    await rig.settle()
    assert rig.faults.names == ["register", "register", "update"]
    assert set(rig.uploaded) == {WELCOME}


async def test_T169_disable_keeps_identity_and_overrides(rig: Rig, world: World) -> None:
    client = rig.client
    rig.groups(1, 2)
    client.conversation(gid(2)).set_notifications(Override.DISABLED)
    await rig.enabled(ONLY_GROUPS)
    identity = rig.settings.identity
    assert set(rig.uploaded) == {topic(1)}

    await client.disable_notifications()
    assert client.notification_state() == Disabled()
    assert rig.settings.config is None
    assert rig.uploaded == {}
    assert await world.delivery(rig.recipient_id) is None
    client.wake()
    rig.clock.advance(8 * 24 * HOUR_NS)
    await rig.settle()
    assert rig.faults.take() == ["unregister"]

    await client.enable_notifications(ONLY_GROUPS)
    await rig.settle()
    assert rig.settings.identity == identity
    assert set(await world.topics(rig.recipient_id)) == {topic(1)}

    await world.forget(rig.recipient_id)
    await client.disable_notifications()  # NOT_FOUND is as good
    assert client.notification_state() == Disabled()


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.PERMISSION_DENIED])
async def test_T170_failed_unregister_leaves_the_client_disabled(rig: Rig, world: World, code: Code) -> None:
    await rig.enabled()
    identity = rig.settings.identity
    rig.faults.next("unregister", code)
    with pytest.raises(CallFailed) as caught:
        await rig.client.disable_notifications()
    assert caught.value.code is code
    assert rig.client.notification_state() == Disabled()
    assert rig.settings.identity == identity
    rig.clock.advance(30 * 24 * HOUR_NS)
    await rig.settle()
    assert rig.faults.take() == ["unregister"]  # nothing is tried in the background
    await rig.client.disable_notifications()
    assert rig.faults.names == ["unregister"]
    assert await world.delivery(rig.recipient_id) is None


async def test_disable_before_any_enable_makes_no_call(memory_rig: Rig) -> None:
    await memory_rig.client.disable_notifications()
    assert memory_rig.faults.names == []
    assert memory_rig.client.notification_state() == Disabled()


@pytest.mark.parametrize("code", TERMINAL)
async def test_T171_refusal_for_good_fails_the_state_until_the_next_enable(rig: Rig, code: Code) -> None:
    rig.faults.next("register", code, Code.UNAVAILABLE)
    with pytest.raises(NotificationsStopped) as caught:
        await rig.client.enable_notifications(CONFIG)
    assert caught.value.code is code
    assert rig.client.notification_state() == Failed(code)
    rig.client.wake()
    rig.clock.advance(HOUR_NS)
    await rig.settle()
    assert rig.faults.take() == ["register"]
    assert rig.tasks == []

    with pytest.raises(NotificationsDelayed):
        await rig.client.enable_notifications(CONFIG)
    assert isinstance(rig.client.notification_state(), Enabled)
    rig.clock.advance(60 * 10**9)
    await rig.settle()
    assert rig.faults.take() == ["register", "register", "update"]


@pytest.mark.parametrize("code", TERMINAL)
@pytest.mark.parametrize("method", ["register", "update"])
async def test_refusal_for_good_in_the_task_ends_it(rig: Rig, method: str, code: Code) -> None:
    await rig.enabled()
    uploaded = rig.uploaded
    rig.set("renewal_ns", 0 if method == "register" else rig.settings.renewal_ns)
    rig.groups(1)
    rig.faults.next(method, code)
    await rig.settle()
    assert rig.faults.take() == [method]
    assert rig.client.notification_state() == Failed(code)
    assert rig.tasks == []
    assert rig.uploaded == uploaded


async def test_real_server_refuses_a_stolen_id_for_good(rig: Rig) -> None:
    await rig.enabled()
    rig.set("recipient_secret", bytes(32))
    rig.groups(1)
    await rig.settle()
    assert rig.client.notification_state() == Failed(Code.PERMISSION_DENIED)


async def test_T172_effective_value_and_both_groups_of_one_dm(rig: Rig, world: World) -> None:
    client = rig.client
    for number, consent in ((1, Consent.ALLOWED), (2, Consent.DENIED), (3, Consent.ALLOWED), (4, Consent.ALLOWED)):
        client.join_group(gid(number), GroupKind.DM if number > 2 else GroupKind.GROUP)
        client.set_consent(gid(number), consent)
    denied = client.conversation(gid(2))
    assert not client.conversation(gid(1)).notifications_enabled()  # not while notifications are off
    await client.enable_notifications(ONLY_GROUPS)
    assert client.conversation(gid(1)).notifications_enabled()
    assert not denied.notifications_enabled()
    denied.set_notifications(Override.ENABLED)
    assert denied.notifications_enabled()
    denied.set_notifications(Override.NONE)
    assert not denied.notifications_enabled()
    await rig.settle()
    # Two groups with one peer are two topics, and a message may come on either.
    assert set(await world.topics(rig.recipient_id)) == {topic(1), topic(3), topic(4)}


async def test_T173_copy_that_never_synced_uploads_at_its_start(rig: Rig, world: World, tmp_path: Path) -> None:
    rig.groups(1)
    await rig.client.enable_notifications(CONFIG)
    with copied(rig, tmp_path / "copy.db") as other:
        await other.settle()
        assert other.recipient_id == rig.recipient_id
        assert set(await world.topics(other.recipient_id)) == {topic(1), WELCOME}


async def test_start_with_nothing_to_do_makes_no_call(rig: Rig, tmp_path: Path) -> None:
    rig.groups(1)
    await rig.enabled()
    with copied(rig, tmp_path / "copy.db") as other:
        await other.settle()
    assert rig.faults.take() == []


async def test_start_runs_the_task_even_if_it_was_waiting_out_a_failure(memory_rig: Rig, tmp_path: Path) -> None:
    memory_rig.faults.next("register", Code.UNAVAILABLE)
    with pytest.raises(NotificationsDelayed):
        await memory_rig.client.enable_notifications(CONFIG)
    with copied(memory_rig, tmp_path / "copy.db") as other:
        await other.settle()
        assert other.faults.names == ["register", "register", "update"]


async def test_second_enable_changes_the_delivery_and_keeps_what_is_uploaded(rig: Rig, world: World) -> None:
    rig.groups(1)
    await rig.enabled()
    await rig.client.enable_notifications(NotificationConfig(fcm("token-2"), include_commits=True))
    await rig.settle()
    assert await world.delivery(rig.recipient_id) == "token-2"
    # Only the rule about commits concerns a topic that is stored already; the welcome topic has none.
    (_, register), (_, update) = rig.faults.calls
    assert register.fcm.token == "token-2"
    assert [(add.topic, add.include_commits) for add in update.adds] == [(topic(1), True)]


async def test_T181_late_refusal_of_an_old_configuration_is_ignored(rig: Rig) -> None:
    await rig.enabled()
    rig.groups(1)
    pause = Pause(answer=Code.INVALID_ARGUMENT)
    rig.faults.next("update", pause)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.step)
        await pause.reached.wait()
        nursery.start_soon(rig.client.enable_notifications, NotificationConfig(fcm("token-2")))
        await trio.testing.wait_all_tasks_blocked()
        pause.released.set()
    await rig.settle()
    assert isinstance(rig.client.notification_state(), Enabled)
    assert topic(1) in rig.uploaded


async def test_T183_upload_that_ends_after_a_new_configuration_is_kept_and_then_removed(rig: Rig, world: World) -> None:
    await rig.enabled(ONLY_GROUPS)
    rig.groups(1)
    pause = Pause(after=True)
    rig.faults.next("update", pause)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.step)
        await pause.reached.wait()
        nursery.start_soon(
            rig.client.enable_notifications,
            NotificationConfig(fcm(TOKEN), consent_states=frozenset(), include_welcomes=False),
        )
        await trio.testing.wait_all_tasks_blocked()
        pause.released.set()
    assert set(rig.uploaded) == {topic(1)}
    await rig.settle()
    assert rig.uploaded == {}
    assert await world.topics(rig.recipient_id) == {}
    assert rig.faults.take() == ["update", "register", "update"]


async def test_late_upload_does_not_pass_for_the_registration_of_a_newer_configuration(rig: Rig, world: World) -> None:
    await rig.enabled(ONLY_GROUPS)
    rig.groups(1)
    pause = Pause(after=True)
    rig.faults.next("update", pause)
    rig.faults.next("register", Code.UNAVAILABLE)
    async with trio.open_nursery() as nursery:

        async def enable() -> None:
            with pytest.raises(NotificationsDelayed):
                await rig.client.enable_notifications(NotificationConfig(fcm("token-2"), include_welcomes=False))

        nursery.start_soon(rig.step)
        await pause.reached.wait()
        nursery.start_soon(enable)
        await trio.testing.wait_all_tasks_blocked()
        pause.released.set()
    state = rig.client.notification_state()
    assert isinstance(state, Enabled)
    assert not state.registered
    rig.clock.advance(60 * 10**9)
    await rig.settle()
    assert await world.delivery(rig.recipient_id) == "token-2"


@pytest.mark.parametrize("after", [True, False], ids=["done", "not-yet-sent"])
async def test_T184_upload_that_ends_after_disable_is_dropped(rig: Rig, world: World, after: bool) -> None:
    await rig.enabled(ONLY_GROUPS)
    rig.groups(1)
    pause = Pause(after=after)
    rig.faults.next("update", pause)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.step)
        await pause.reached.wait()
        nursery.start_soon(rig.client.disable_notifications)
        await trio.testing.wait_all_tasks_blocked()
        assert rig.client.notification_state() == Disabled()  # at once, whatever is under way
        pause.released.set()
    await rig.settle()
    assert rig.uploaded == {}
    assert rig.faults.take() == ["update", "unregister"]
    assert await world.delivery(rig.recipient_id) is None


async def test_T185_disable_that_waited_behind_a_newer_enable_unregisters_nothing(rig: Rig, world: World) -> None:
    await rig.enabled(ONLY_GROUPS)
    rig.groups(1)
    pause = Pause(after=True)
    rig.faults.next("update", pause)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.step)
        await pause.reached.wait()
        nursery.start_soon(rig.client.disable_notifications)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(rig.client.enable_notifications, NotificationConfig(fcm("token-2"), include_welcomes=False))
        await trio.testing.wait_all_tasks_blocked()
        pause.released.set()
    await rig.settle()
    assert "unregister" not in rig.faults.names
    assert await world.delivery(rig.recipient_id) == "token-2"
    assert set(await world.topics(rig.recipient_id)) == set(rig.uploaded) == {topic(1)}


async def test_register_answered_after_disable_does_not_enable_again(rig: Rig, world: World) -> None:
    pause = Pause(after=True)
    rig.faults.next("register", pause)
    async with trio.open_nursery() as nursery:

        async def enable() -> None:
            with pytest.raises(Superseded):
                await rig.client.enable_notifications(CONFIG)

        nursery.start_soon(enable)
        await pause.reached.wait()
        nursery.start_soon(rig.client.disable_notifications)
        await trio.testing.wait_all_tasks_blocked()
        pause.released.set()
    await rig.settle()
    assert rig.client.notification_state() == Disabled()
    assert rig.faults.names == ["register", "unregister"]
    assert await world.delivery(rig.recipient_id) is None


async def test_enable_that_waited_behind_a_disable_makes_no_call(memory_rig: Rig) -> None:
    rig = memory_rig
    await rig.enabled(ONLY_GROUPS)
    rig.groups(1)
    pause = Pause()
    rig.faults.next("update", pause)
    async with trio.open_nursery() as nursery:

        async def enable() -> None:
            with pytest.raises(Superseded):
                await rig.client.enable_notifications(CONFIG)

        nursery.start_soon(rig.step)
        await pause.reached.wait()
        nursery.start_soon(enable)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(rig.client.disable_notifications)
        await trio.testing.wait_all_tasks_blocked()
        pause.released.set()
    assert rig.faults.names == ["update", "unregister"]
    assert rig.client.notification_state() == Disabled()


async def test_cancelled_enable_is_registered_by_the_task(rig: Rig) -> None:
    pause = Pause()
    rig.faults.next("register", pause)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.client.enable_notifications, CONFIG)
        await pause.reached.wait()
        nursery.cancel_scope.cancel()
    assert isinstance(rig.client.notification_state(), Enabled)
    rig.clock.advance(60 * 10**9)
    await rig.settle()
    assert rig.faults.names == ["register", "register", "update"]


async def test_renewal_queued_before_disable_makes_no_call(memory_rig: Rig) -> None:
    await memory_rig.enabled()
    memory_rig.set("renewal_ns", 0)
    memory_rig.client.wake()
    await memory_rig.client.disable_notifications()
    await memory_rig.settle()
    assert memory_rig.faults.take() == ["unregister"]


def test_unknown_conversation_is_named_as_such(memory_rig: Rig) -> None:
    with pytest.raises(UnknownConversation):
        memory_rig.client.conversation(gid(1))
    with pytest.raises(UnknownConversation):
        memory_rig.client.conversation(INSTALLATION_GROUP)


INSTALLATION_GROUP = WELCOME[1:17]  # a group id that shares bytes with the welcome topic is still no group
