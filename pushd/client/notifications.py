"""Keeping the backend in step: enable, disable, and the one durable task that registers, renews and uploads.

Requests never overlap: an inline call and the task take turns under one lock. The local file is written at once,
though, so an answer may find that the user has decided otherwise meanwhile. Every enable and disable therefore starts a
new generation. A late answer never changes the state of a newer one; what it says about uploaded topics is still true.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeVar, assert_never

import anyio

from pushd.client import groups, settings, uploads
from pushd.client.backend import Backend
from pushd.client.database import transaction
from pushd.client.decisions import (
    REQUEST_S,
    Limit,
    Settings,
    State,
    Verdict,
    compare_counts,
    judge_register,
    judge_update,
    next_look_ns,
    registration_is_due,
    renewal_deadline_ns,
)
from pushd.client.errors import (
    CallFailed,
    InvalidConfig,
    NotificationsDelayed,
    NotificationsStopped,
    RunnerDisabled,
    Superseded,
)
from pushd.client.requests import (
    config_of,
    recipient_state,
    register_request,
    unregister_request,
    update_request,
)
from pushd.client.tasks import Tasks, TryAgain
from pushd.client.uploads import Difference, Wanted
from pushd.client.values import (
    Disabled,
    Enabled,
    Failed,
    NotificationConfig,
    NotificationState,
    RecipientState,
)
from pushd.core.checks import MAX_SIGNING_KEY_BYTES, MIN_SIGNING_KEY_BYTES, Refusal, check_delivery
from pushd.errors import Code
from pushd.model import MAX_TARGET_CHARACTERS, Channel, DeliveryConfig
from pushd.rpc.gen.xmtp.backend.v1 import notification_pb2 as wire

LOG = logging.getLogger("pushd.client")

T = TypeVar("T")

TASK = "pushd.notifications"
INLINE_GRACE_NS = 60_000_000_000
"""How long the task stands back after an enable: longer than the inline Register can take, and as long as a first
retry (PUSH-091), so that a process that dies in between registers then."""


class Notifications:
    """The notification work of one local file.

    Args:
        db: the file.
        backend: makes the calls.
        tasks: runs the task; its handler is registered here.
        now_ns: the wall clock.
        runner: whether somebody runs `tasks`.
    """

    def __init__(
        self, db: sqlite3.Connection, backend: Backend, tasks: Tasks, now_ns: Callable[[], int], *, runner: bool
    ) -> None:
        self._db = db
        self._backend = backend
        self._tasks = tasks
        self._now_ns = now_ns
        self._runner = runner
        self._requests = anyio.Lock()
        self._lost_ns: int | None = None
        tasks.handle(TASK, self.run)
        if runner and settings.load(db).state is State.ENABLED:
            tasks.start_now(TASK)

    def state(self) -> NotificationState:
        """The local state; no call is made."""
        current = settings.load(self._db)
        match current.state:
            case State.DISABLED:
                return Disabled()
            case State.FAILED:
                return Failed(current.failure or Code.UNKNOWN)
            case State.ENABLED:
                return Enabled(
                    channel=config_of(current).delivery.channel,
                    registered=not current.registration_owed,
                    last_state=current.last_state,
                    repairing=current.repairing,
                    limited=current.withheld is not Limit.NONE,
                )
        assert_never(current.state)

    async def enable(self, config: NotificationConfig) -> RecipientState:
        """Store the configuration, then register. See `Client.enable_notifications`."""
        if not self._runner:
            raise RunnerDisabled
        _check(config.delivery)
        with transaction(self._db):
            generation = settings.enable(self._db, config)
            self._tasks.restart(TASK, self._now_ns() + INLINE_GRACE_NS)
        try:
            with anyio.fail_after(REQUEST_S):
                async with self._requests:
                    return await self._register_inline(generation)
        except TimeoutError:
            pass
        # Outside of the handler, so that nothing of the call hangs on to the error.
        if settings.load(self._db).generation != generation:
            raise Superseded
        self._tasks.record_failure(TASK, 1)
        raise NotificationsDelayed(Code.DEADLINE_EXCEEDED)

    async def _register_inline(self, generation: int) -> RecipientState:
        current = settings.load(self._db)
        if current.generation != generation:
            raise Superseded
        answer = await _answer(self._backend.register(register_request(current)))
        newest = settings.load(self._db)
        if newest.generation != generation:
            raise Superseded
        if isinstance(answer, Code):
            if self._registration_refused(answer):
                raise NotificationsStopped(answer)
            self._tasks.record_failure(TASK, 1)
            raise NotificationsDelayed(answer)
        state = self._registered(newest, answer)
        self._tasks.wake(TASK)
        return state

    async def disable(self) -> None:
        """Clear the local state, then unregister. See `Client.disable_notifications`."""
        with transaction(self._db):
            generation = settings.disable(self._db)
            uploads.clear(self._db)
        answer: Code | None = Code.DEADLINE_EXCEEDED
        # Whatever is under way began earlier and so ends before this time is up: the Unregister comes last.
        with anyio.move_on_after(REQUEST_S):
            async with self._requests:
                current = settings.load(self._db)
                # A newer enable wants the recipient to stay; a file without an identity has nothing to take back.
                if current.generation != generation or current.identity is None:
                    return
                answer = await _answer(self._backend.unregister(unregister_request(current)))
        if isinstance(answer, Code) and answer is not Code.NOT_FOUND:
            raise CallFailed(answer)

    async def run(self, _payload: bytes) -> int | None:
        """One run of the task: at most one request; returns when to run again (PUSH-082, PUSH-091).

        Raises:
            TryAgain: the request failed in a way that may pass.
        """
        try:
            with anyio.fail_after(REQUEST_S):
                async with self._requests:
                    return await self._run_locked()
        except TimeoutError:
            pass
        raise TryAgain

    async def _run_locked(self) -> int | None:
        current = settings.load(self._db)
        now = self._now_ns()
        if current.state is not State.ENABLED:
            return None
        if registration_is_due(current, now):
            answer = await _answer(self._backend.register(register_request(current)))
            return self._after_register(current, answer)
        current = self._lift_withholding(current)
        wanted = Wanted.at(now, config_of(current), groups.root_key(self._db))
        change = uploads.difference(self._db, wanted, current.withheld)
        if not change:
            return next_look_ns(current, now)
        request = update_request(current, wanted, change, groups.root_key(self._db))
        answer = await _answer(self._backend.update_subscriptions(request))
        return self._after_update(current, wanted, change, answer)

    def _after_register(self, asked: Settings, answer: wire.RecipientState | Code) -> int | None:
        newest = settings.load(self._db)
        if newest.state is not State.ENABLED:
            return None
        if newest.generation != asked.generation:
            return self._now_ns()  # a late answer decides nothing; the newer configuration has its own turn
        if not isinstance(answer, Code):
            self._registered(newest, answer)
            return self._now_ns()
        if self._registration_refused(answer):
            return None
        raise TryAgain

    def _after_update(
        self, asked: Settings, wanted: Wanted, change: Difference, answer: wire.RecipientState | Code
    ) -> int | None:
        newest = settings.load(self._db)
        if newest.state is not State.ENABLED:
            return None
        late = newest.generation != asked.generation
        if not isinstance(answer, Code):
            with transaction(self._db):
                # True even if notifications went off and on meanwhile: no Unregister can have come in between.
                uploads.confirm(self._db, wanted, change)
                if not late:
                    self._record(newest, recipient_state(answer))
            return self._now_ns()
        if late:
            return self._now_ns()
        return self._after_refused_update(newest, change, answer)

    def _after_refused_update(self, current: Settings, change: Difference, code: Code) -> int | None:
        now = self._now_ns()
        since_last_loss_ns = None if self._lost_ns is None else now - self._lost_ns
        verdict = judge_update(code, had_adds=bool(change.adds), since_last_loss_ns=since_last_loss_ns)
        match verdict:
            case Verdict.STOP:
                self._stop(code)
                return None
            case Verdict.RECREATE:
                self._lost_ns = now
                LOG.warning("the backend does not know the recipient; registering again and uploading every topic")
                self._forget_registration()
                return now
            case Verdict.WITHHOLD:
                self._withhold(current, change)
                return now
            case Verdict.RETRY:
                if code is Code.NOT_FOUND:
                    self._forget_registration()
                raise TryAgain
        assert_never(verdict)

    def _registration_refused(self, code: Code) -> bool:
        """Record what a failed Register means; whether notifications have stopped."""
        match judge_register(code):
            case Verdict.STOP:
                self._stop(code)
                return True
            case Verdict.RECREATE:
                self._forget_registration()
        return False

    def _registered(self, current: Settings, answer: wire.RecipientState) -> RecipientState:
        state = recipient_state(answer)
        with transaction(self._db):
            self._record(current, state)
        return state

    def _record(self, current: Settings, state: RecipientState) -> None:
        """Keep the backend's view and compare it with the uploaded set (PUSH-087, PUSH-088). Inside a transaction."""
        now = self._now_ns()
        settings.record_answer(self._db, state, renewal_deadline_ns(now, state.expires_at_ns))
        if state.channel is not config_of(current).delivery.channel:
            LOG.warning("the backend reaches this recipient through another channel than configured")
        if current.repairing:
            if not uploads.any_stale(self._db):
                settings.record_agreement(self._db, repairing=False, known_excess=None)
            return
        agreement = compare_counts(state.topic_count, uploads.count(self._db), current.known_excess)
        # A pass over no rows ends where it starts, and has repaired nothing.
        repairing = agreement.start_repair and uploads.mark_all_stale(self._db)
        if agreement.warn:
            LOG.warning("the backend's topic count differs%s", "; uploading every topic again" if repairing else "")
        settings.record_agreement(self._db, repairing=repairing, known_excess=agreement.known_excess)

    def _stop(self, code: Code) -> None:
        with transaction(self._db):
            settings.fail(self._db, code)
        LOG.warning("notifications have stopped: the backend answered %s", code.name)

    def _forget_registration(self) -> None:
        with transaction(self._db):
            uploads.clear(self._db)
            settings.owe_registration(self._db)

    def _withhold(self, current: Settings, change: Difference) -> None:
        """The topic limit is reached: keep adds back until other topics are wanted (PUSH-089)."""
        limit = Limit.GROWTH if any(add.missing for add in change.adds) else Limit.ALL
        LOG.warning("the backend's topic limit is reached; some conversations get no pushes")
        with transaction(self._db):
            settings.withhold(self._db, limit, uploads.wanted_set_fingerprint(self._db, config_of(current)))

    def _lift_withholding(self, current: Settings) -> Settings:
        if current.withheld is Limit.NONE:
            return current
        if uploads.wanted_set_fingerprint(self._db, config_of(current)) == current.withheld_set:
            return current
        with transaction(self._db):
            settings.withhold(self._db, Limit.NONE, None)
        return settings.load(self._db)


async def _answer(call: Awaitable[T]) -> T | Code:
    """The answer, or the status as a value: what the backend may legitimately say is not an exception here."""
    try:
        return await call
    except CallFailed as exc:
        return exc.code


def _check(delivery: DeliveryConfig) -> None:
    """Refuse what cannot work before anything is stored; the backend refuses the same, but for good."""
    if delivery.channel is Channel.HTTP and delivery.signing_key is None:
        raise InvalidConfig("a webhook needs a signing key")
    match check_delivery(delivery):
        case None:
            return
        case Refusal.SIGNING_KEY:
            raise InvalidConfig(f"a signing key has {MIN_SIGNING_KEY_BYTES} to {MAX_SIGNING_KEY_BYTES} bytes")
        case _:
            raise InvalidConfig(f"a token or URL has 1 to {MAX_TARGET_CHARACTERS} characters and no NUL")
