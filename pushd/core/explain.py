"""Why one envelope was, or was not, pushed to one recipient: the dispatcher's own conditions, one after the other.

The answer is for an operator with an id and a sequence id in hand. It names no id, token, URL, key or topic.

A row never changes, and what is settled stays so. Recipient, subscription and configuration do change, and what they
were when the row was dispatched is not stored: a verdict that rests on them says how things stand now.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from attrs import field, frozen

from pushd.core.suppression import key_in_window, message_data, own_keys
from pushd.model import Channel


@frozen
class EnvelopeFacts:
    """What the row says."""

    server_ns: int
    push_eligible: bool
    is_commit_or_proposal: bool
    sender_hmac: bytes | None = field(repr=False)
    payload: bytes = field(repr=False)


@frozen
class SubscriptionFacts:
    """What the subscription to the row's topic says."""

    since_sequence_id: int
    include_commits: bool
    epoch_base: int | None
    keys: Sequence[bytes | None] = field(repr=False)


@frozen
class Facts:
    """Everything the conditions look at. None for what is not stored."""

    sequence_id: int
    closed_sequence_id: int
    cursor: int
    last_sequence_id: int
    """The greatest sequence id handed out so far."""
    skipped: bool
    """Whether an operator ever moved the cursor past it."""
    envelope: EnvelopeFacts | None
    channel: Channel | None
    """The recipient's channel, None for an unknown recipient."""
    subscription: SubscriptionFacts | None
    configured: frozenset[Channel]


class Holds(enum.Enum):
    """Whether a condition holds; `SO_FAR` is for what may still change by itself."""

    YES = "yes"
    NO = "no"
    SO_FAR = "not yet"


@frozen
class Step:
    """One condition."""

    name: str
    holds: Holds
    text: str


@frozen
class Explanation:
    """The conditions in the dispatcher's order, as far as they could be judged, and what follows."""

    steps: tuple[Step, ...]
    verdict: str


_UNKNOWN = "There is no such envelope."
_PRUNED = "Nothing can be said: the row is gone, so it was pruned, or its transaction was rolled back."
_OPEN = "It was not pushed yet, and will be looked at once that holds."
_NEVER = "It was not pushed to this recipient, and will not be."
_SKIPPED = "It was not pushed, unless an instance had loaded it when an operator moved the cursor past it."
_WOULD_NOT = (
    "As things stand now it would not be pushed. It was dispatched before, and what held for this recipient then is "
    "not stored."
)
_WILL_NOT = "As things stand now it will not be pushed. An instance that has loaded it already goes by what held then."
_ATTEMPTED = (
    "One delivery was attempted, if keys, flags and configuration were then as they are now. What came of it is not "
    "stored: see xmtp_push_deliveries_total and the device."
)
_DUE = (
    "One delivery is due, or was attempted just now: the cursor follows later. `pushd status` says whether an instance "
    "dispatches and how far it is."
)


def explain(facts: Facts) -> Explanation:
    """Judge the conditions in order; the first that does not hold ends it."""
    steps: list[Step] = []
    for judge in (*_LASTING, *_PRESENT):
        step = judge(facts)
        steps.append(step)
        if step.holds is not Holds.YES:
            return Explanation(tuple(steps), _verdict(facts, step, is_lasting=judge in _LASTING))
    if _is_skipped(facts):
        steps.append(Step("dispatched", Holds.NO, "an operator moved the cursor past it (`pushd cursor skip`)"))
        return Explanation(tuple(steps), _SKIPPED)
    if _is_dispatched(facts):
        text = f"at or below the cursor {facts.cursor}: every first attempt is over"
        steps.append(Step("dispatched", Holds.YES, text))
        return Explanation(tuple(steps), _ATTEMPTED)
    text = f"above the cursor {facts.cursor}: being sent, waiting to be loaded, or no instance dispatches"
    steps.append(Step("dispatched", Holds.SO_FAR, text))
    return Explanation(tuple(steps), _DUE)


def _verdict(facts: Facts, step: Step, *, is_lasting: bool) -> str:
    """What follows from a condition that does not hold."""
    if step.holds is Holds.SO_FAR:
        return _OPEN
    if facts.envelope is None:
        return _PRUNED if _was_handed_out(facts) else _UNKNOWN
    if is_lasting:
        return _NEVER
    if _is_skipped(facts):
        return _SKIPPED
    return _WOULD_NOT if _is_dispatched(facts) else _WILL_NOT


def _is_dispatched(facts: Facts) -> bool:
    return facts.sequence_id <= facts.cursor


def _is_skipped(facts: Facts) -> bool:
    return facts.skipped and _is_dispatched(facts)


def _stored(facts: Facts) -> Step:
    if facts.envelope is not None:
        return Step("stored", Holds.YES, "there is such an envelope")
    if not _was_handed_out(facts):
        return Step("stored", Holds.NO, "this sequence id was never handed out")
    if facts.sequence_id > facts.closed_sequence_id:
        return Step("stored", Holds.SO_FAR, "its publish is open, or was rolled back")
    return Step("stored", Holds.NO, "no envelope has this sequence id")


def _was_handed_out(facts: Facts) -> bool:
    return 0 < facts.sequence_id <= facts.last_sequence_id


def _eligible(facts: Facts) -> Step:
    assert facts.envelope is not None
    if facts.envelope.push_eligible:
        return Step("eligible", Holds.YES, "a welcome, a message sent with should_push, or a commit or proposal")
    return Step("eligible", Holds.NO, "its kind is never pushed, or its sender did not set should_push")


def _settled(facts: Facts) -> Step:
    if facts.sequence_id <= facts.closed_sequence_id:
        return Step("settled", Holds.YES, f"at or below the closed boundary {facts.closed_sequence_id}")
    return Step("settled", Holds.SO_FAR, f"above the closed boundary {facts.closed_sequence_id}: a publish is open")


def _known(facts: Facts) -> Step:
    if facts.channel is not None:
        return Step("registered", Holds.YES, f"on the {facts.channel.label} channel")
    return Step("registered", Holds.NO, "the recipient never registered, unregistered, expired, or its token was dead")


def _subscribed(facts: Facts) -> Step:
    if facts.subscription is not None:
        return Step("subscribed", Holds.YES, "the recipient has the envelope's topic")
    return Step("subscribed", Holds.NO, "the recipient does not have the envelope's topic")


def _above_start(facts: Facts) -> Step:
    assert facts.subscription is not None
    since = facts.subscription.since_sequence_id
    if facts.sequence_id > since:
        return Step("after the start", Holds.YES, f"above the subscription's start position {since}")
    return Step("after the start", Holds.NO, f"the subscription starts above {since}: it was stored later")


def _wants_commits(facts: Facts) -> Step:
    assert facts.envelope is not None
    assert facts.subscription is not None
    if not facts.envelope.is_commit_or_proposal:
        return Step("wanted", Holds.YES, "neither a commit nor a proposal")
    if facts.subscription.include_commits:
        return Step("wanted", Holds.YES, "a commit or proposal, and the subscription includes them")
    return Step("wanted", Holds.NO, "a commit or proposal, and the subscription does not include them")


def _not_own(facts: Facts) -> Step:
    assert facts.envelope is not None
    assert facts.subscription is not None
    name = "from somebody else"
    tag = facts.envelope.sender_hmac
    if tag is None:
        return Step(name, Holds.YES, "the message carries no sender HMAC, so nothing is compared")
    if facts.subscription.epoch_base is None:
        return Step(name, Holds.YES, "the subscription has no keys, so nothing is compared")
    key = key_in_window(facts.envelope.server_ns, facts.subscription.epoch_base, facts.subscription.keys)
    if key is None:
        return Step(name, Holds.YES, "the subscription's keys are for other 30-day epochs, so nothing is compared")
    data = message_data(facts.envelope.payload)
    if data is not None and own_keys(data, [key], tag):
        return Step(name, Holds.NO, "the HMAC under the recipient's key matches: sent by the recipient itself")
    return Step(name, Holds.YES, "the HMAC under the recipient's key does not match")


def _sendable(facts: Facts) -> Step:
    assert facts.channel is not None
    label = facts.channel.label
    if facts.channel in facts.configured:
        return Step("sendable", Holds.YES, f"[push.{label}] is configured here")
    return Step("sendable", Holds.NO, f"[push.{label}] is not configured: such deliveries count as failed")


_LASTING = (_stored, _eligible, _settled)
"""Conditions on the row alone: what they say now they said at its dispatch too."""
_PRESENT = (_known, _subscribed, _above_start, _wants_commits, _not_own, _sendable)
"""Conditions on what may have changed since."""
