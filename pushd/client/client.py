"""The surface of the SDK: one client per installation and local file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

from pushd.client import groups, settings, uploads
from pushd.client.backend import Backend
from pushd.client.background import background_tasks
from pushd.client.database import open_database
from pushd.client.errors import MalformedMessage, UnknownConversation
from pushd.client.grpc_backend import open_backend, read_address
from pushd.client.notifications import TASK, Notifications
from pushd.client.tasks import Tasks
from pushd.client.values import Consent, GroupKind, NotificationConfig, NotificationState, Override, RecipientState
from pushd.core.hmac_keys import ROOT_KEY_BYTES, derive_key, epoch_at, sender_hmac
from pushd.core.mls import Malformed, read_framing
from pushd.core.topics import GROUP_ID_BYTES
from pushd.rpc.gen.xmtp.backend.v1 import publish_pb2, query_pb2, types_pb2

ConsentListener = Callable[[bytes, Consent], None]


@frozen
class Page:
    """One page of a query.

    Attributes:
        envelopes: in ascending order of their sequence ids.
        has_more: whether another query from the last of them would bring more.
    """

    envelopes: Sequence[types_pb2.ServerEnvelope] = field(repr=False)
    has_more: bool


@contextlib.asynccontextmanager
async def open_client(
    path: str | os.PathLike[str],
    address: str,
    *,
    installation_key: bytes,
    runner: bool = True,
    token: Callable[[], Awaitable[str]] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    allow_plaintext: bool = False,
) -> AsyncIterator[Client]:
    """Open the local file, making it on first use, and run the client for as long as the block lasts.

    Works under Trio and under asyncio. Opening makes no call by itself: the first one is made when there is something
    to say.

    Args:
        path: the local file; one per installation, used by one process at a time.
        address: `https://host:port`, or `http://host:port` in clear.
        installation_key: the installation's 32-byte public key; it names the topic its invitations arrive on.
        runner: run the task runner; without it notifications cannot be enabled.
        token: called before each call for the value of `authorization: Bearer`, where the backend wants one. Calls end
            with `UnusableToken` while it returns anything but visible ASCII.
        ssl_context: what to trust; the system's authorities when None. It is made to offer HTTP/2 and nothing else, so
            give one that serves no other connections.
        allow_plaintext: permit `http` beyond this machine. The recipient's secret then travels in clear.

    Raises:
        ValueError: the address is none of the above, or in clear without permission.
        UnusableFile: the file is another installation's, or a newer version's.
    """
    where = read_address(address, ssl_context, allow_plaintext=allow_plaintext)
    async with open_backend(where, token) as backend:
        async with open_with_backend(path, backend, installation_key=installation_key, runner=runner) as client:
            yield client


@contextlib.asynccontextmanager
async def open_with_backend(
    path: str | os.PathLike[str],
    backend: Backend,
    *,
    installation_key: bytes,
    runner: bool = True,
    now_ns: Callable[[], int] = time.time_ns,
) -> AsyncIterator[Client]:
    """`open_client` over any implementation of `Backend` and any wall clock: for tests of an app."""
    with open_database(Path(path), installation_key) as db:
        client = Client(db, backend, now_ns, runner=runner)
        async with background_tasks() as running:
            if runner:
                running.start_soon(client.tasks.run)
            yield client


class Client:
    """One installation. Made by `open_client`.

    Methods that only change the local file are plain functions: they commit, tell listeners, and wake the task runner.
    Nothing about notifications can make them wait or fail (PUSH-105).

    Attributes:
        tasks: the durable tasks; an app may add kinds of its own.
    """

    def __init__(self, db: sqlite3.Connection, backend: Backend, now_ns: Callable[[], int], *, runner: bool) -> None:
        self._db = db
        self._backend = backend
        self._now_ns = now_ns
        self._listeners: list[ConsentListener] = []
        self.tasks = Tasks(db, now_ns)
        self._notifications = Notifications(db, backend, self.tasks, now_ns, runner=runner)

    # Notifications

    async def enable_notifications(self, config: NotificationConfig) -> RecipientState:
        """Turn notifications on, or change how they arrive or which ones do, and register at once (PUSH-080).

        Everything else happens by itself from now on, across restarts: topics are uploaded and removed as consent,
        membership and overrides change, keys are renewed, and the registration is kept alive.

        Returns:
            The backend's view.

        Raises:
            RunnerDisabled: the client was opened without the task runner; nothing was stored.
            InvalidConfig: the delivery cannot work; nothing was stored.
            NotificationsStopped: the backend refuses for good; the state is failed.
            NotificationsDelayed: not registered yet, within 30 seconds; the state is enabled and the task goes on.
            Superseded: another enable or disable was called meanwhile.
        """
        return await self._notifications.enable(config)

    async def disable_notifications(self) -> None:
        """Turn notifications off. Locally that is so at once, whatever the backend says (PUSH-081).

        Overrides and the recipient's identity are kept for another enable.

        Raises:
            CallFailed: the backend was not told within 30 seconds; it deletes the recipient when it expires. Calling
                again tries again.
        """
        await self._notifications.disable()

    def notification_state(self) -> NotificationState:
        """Disabled, enabled or failed, from the local file alone."""
        return self._notifications.state()

    def wake(self) -> None:
        """Look for differences now, for instance when the app comes to the foreground; costs nothing if there are none.

        Not needed after any call of this class. A machine that slept does not count the hour in between.
        """
        self.tasks.wake(TASK)

    # What the messenger tells

    def conversation(self, group_id: bytes) -> Conversation:
        """One conversation.

        Raises:
            UnknownConversation: there is no such group.
        """
        if groups.get_group(self._db, group_id) is None:
            raise UnknownConversation
        return Conversation(self, self._db, group_id)

    def create_group(self, group_id: bytes, kind: GroupKind = GroupKind.GROUP) -> None:
        """The installation has created a group, which the user thereby allows."""
        groups.put_group(self._db, group_id, kind, Consent.ALLOWED)
        self.wake()

    def join_group(self, group_id: bytes, kind: GroupKind = GroupKind.GROUP) -> None:
        """The installation has joined a group from a welcome, or has returned; consent stays as recorded."""
        groups.put_group(self._db, group_id, kind, None)
        self.wake()

    def leave_group(self, group_id: bytes) -> None:
        """The installation is no longer an active member."""
        groups.end_membership(self._db, group_id)
        self.wake()

    def set_consent(self, group_id: bytes, consent: Consent) -> None:
        """The user, here or on another device, has decided about a conversation. It may come before the group does."""
        groups.put_consent(self._db, group_id, consent)
        try:
            for listener in self._listeners:
                listener(group_id, consent)
        finally:
            self.wake()

    def on_consent(self, listener: ConsentListener) -> None:
        """Call `listener(group_id, consent)` after each consent change has been committed."""
        self._listeners.append(listener)

    def set_root_key(self, key: bytes) -> None:
        """Device sync has brought the inbox's 42-byte root key; every key derived from it is uploaded anew."""
        groups.put_root_key(self._db, key)
        self.wake()

    def cycle_root_key(self) -> bytes:
        """Make and return a new root key, for device sync to spread: the set of installations has changed."""
        key = os.urandom(ROOT_KEY_BYTES)
        self.set_root_key(key)
        return key

    # Messages

    async def publish_message(self, data: bytes, *, should_push: bool | None = None) -> types_pb2.EnvelopeMeta:
        """Publish one group message, marked so that the sender's own devices are not woken (PUSH-102).

        Args:
            data: a serialized MLSMessage; names its group.
            should_push: whether it is worth a push. None decides: an application message is, except in a sync group;
                commits and proposals reach those who asked for commits anyway.

        Returns:
            Where the backend has put it.

        Raises:
            MalformedMessage: `data` is not a message to a group.
            CallFailed: the backend refused it or was not reached. UNAVAILABLE and DEADLINE_EXCEEDED leave open
                whether it was stored; publishing the same bytes again is safe.
        """
        try:
            framing = read_framing(data)
        except Malformed:
            raise MalformedMessage from None
        if len(framing.group_id) != GROUP_ID_BYTES:
            raise MalformedMessage
        if should_push is None:
            group = groups.get_group(self._db, framing.group_id)
            in_sync_group = group is not None and group.kind is GroupKind.SYNC
            should_push = not framing.is_commit_or_proposal and not in_sync_group
        key = derive_key(groups.root_key(self._db), framing.group_id, epoch_at(self._now_ns()))
        message = types_pb2.GroupMessage(data=data, sender_hmac=sender_hmac(key, data), should_push=should_push)
        return (await self.publish(types_pb2.ClientEnvelope(group_message=message)))[0]

    async def publish(self, *envelopes: types_pb2.ClientEnvelope) -> Sequence[types_pb2.EnvelopeMeta]:
        """Publish envelopes of any kind, all of them or none.

        Raises:
            CallFailed: as `publish_message`.
        """
        response = await self._backend.publish(publish_pb2.PublishRequest(envelopes=envelopes))
        return tuple(response.envelope_metas)

    async def query(self, after: Mapping[bytes, int], *, limit: int = 0) -> Page:
        """What is new on some topics, typically after a push.

        Args:
            after: per topic the sequence id up to which everything is known; 0 from the start.
            limit: envelopes a page at most; 0 leaves it to the backend.

        Raises:
            CallFailed: the backend refused or was not reached.
        """
        request = query_pb2.QueryRequest(limit=limit)
        for topic, sequence_id in after.items():
            query = request.queries.add()
            query.topic.topic = topic
            query.cursor.sequence_id = sequence_id
        response = await self._backend.query(request)
        return Page(tuple(response.envelopes), response.continuation.has_more)


class Conversation:
    """One group or DM. Made by `Client.conversation`."""

    def __init__(self, client: Client, db: sqlite3.Connection, group_id: bytes) -> None:
        self._client = client
        self._db = db
        self._group_id = group_id

    def set_notifications(self, override: Override) -> None:
        """Say for this conversation alone whether it sends notifications; NONE returns it to the rules (PUSH-084).

        Sync groups follow the rule for sync groups, whatever is set here. Kept when notifications are turned off.
        """
        groups.put_override(self._db, self._group_id, override)
        self._client.wake()

    def notifications_enabled(self) -> bool:
        """Whether this conversation is to send notifications, with override, rules and membership; False while off."""
        config = settings.load(self._db).config
        return config is not None and uploads.is_wanted(self._db, groups.group_topic(self._group_id), config)
