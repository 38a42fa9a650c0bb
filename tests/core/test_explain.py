"""The answer to "why did it not arrive?" follows the dispatcher's conditions in their order."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from pushd.core.explain import EnvelopeFacts, Facts, Holds, SubscriptionFacts, explain
from pushd.core.hmac_keys import sender_hmac
from pushd.model import HMAC_EPOCH_NS, Channel
from tests.support.envelopes import group_envelope

KEY = b"k" * 42
MESSAGE = group_envelope()
PAYLOAD = MESSAGE.SerializeToString()
DATA = MESSAGE.group_message.data
OWN = sender_hmac(KEY, DATA)
ENVELOPE = EnvelopeFacts(9 * HMAC_EPOCH_NS, True, False, None, PAYLOAD)
SUBSCRIPTION = SubscriptionFacts(5, False, None, (None, None, None))
SENT = Facts(10, 20, 15, 30, False, ENVELOPE, Channel.FCM, SUBSCRIPTION, frozenset(Channel))


def with_envelope(**change: Any) -> Facts:
    return evolve(SENT, envelope=evolve(ENVELOPE, **change))


def with_subscription(**change: Any) -> Facts:
    return evolve(SENT, subscription=evolve(SUBSCRIPTION, **change))


def with_keys(base: int) -> Facts:
    return evolve(
        SENT,
        envelope=evolve(ENVELOPE, sender_hmac=OWN),
        subscription=evolve(SUBSCRIPTION, epoch_base=base, keys=(KEY, b"x" * 42, None)),
    )


@pytest.mark.parametrize(
    ("facts", "last", "holds", "text"),
    [
        (SENT, "dispatched", Holds.YES, "first attempt is over"),
        (evolve(SENT, cursor=9), "dispatched", Holds.SO_FAR, "above the cursor 9"),
        (evolve(SENT, cursor=10), "dispatched", Holds.YES, "at or below the cursor 10"),
        (evolve(SENT, envelope=None), "stored", Holds.NO, "no envelope has this sequence id"),
        (evolve(SENT, envelope=None, sequence_id=31), "stored", Holds.NO, "never handed out"),
        (evolve(SENT, envelope=None, sequence_id=0), "stored", Holds.NO, "never handed out"),
        (evolve(SENT, envelope=None, sequence_id=20), "stored", Holds.NO, "no envelope has this sequence id"),
        (evolve(SENT, envelope=None, sequence_id=21), "stored", Holds.SO_FAR, "is open, or was rolled back"),
        (evolve(SENT, skipped=True), "dispatched", Holds.NO, "an operator moved the cursor past it"),
        (evolve(SENT, skipped=True, cursor=9), "dispatched", Holds.SO_FAR, "above the cursor 9"),
        (with_envelope(push_eligible=False), "eligible", Holds.NO, "did not set should_push"),
        (evolve(SENT, closed_sequence_id=9), "settled", Holds.SO_FAR, "above the closed boundary 9"),
        (evolve(SENT, closed_sequence_id=10), "dispatched", Holds.YES, ""),
        (evolve(SENT, channel=None), "registered", Holds.NO, "never registered"),
        (evolve(SENT, subscription=None), "subscribed", Holds.NO, "does not have"),
        (with_subscription(since_sequence_id=10), "after the start", Holds.NO, "starts above 10"),
        (with_subscription(since_sequence_id=9), "dispatched", Holds.YES, ""),
        (with_envelope(is_commit_or_proposal=True), "wanted", Holds.NO, "does not include"),
        (with_keys(9), "from somebody else", Holds.NO, "sent by the recipient itself"),
        (with_keys(8), "dispatched", Holds.YES, ""),
        (with_keys(10), "dispatched", Holds.YES, ""),
        (evolve(SENT, configured=frozenset((Channel.APNS,))), "sendable", Holds.NO, "[push.fcm] is not configured"),
    ],
)
def test_first_condition_that_fails_ends_it(facts: Facts, last: str, holds: Holds, text: str) -> None:
    explanation = explain(facts)
    step = explanation.steps[-1]
    assert (step.name, step.holds) == (last, holds)
    assert text in step.text
    assert all(step.holds is Holds.YES for step in explanation.steps[:-1])


def test_commit_reaches_who_opted_in() -> None:
    facts = evolve(
        SENT,
        envelope=evolve(ENVELOPE, is_commit_or_proposal=True),
        subscription=evolve(SUBSCRIPTION, include_commits=True),
    )
    assert explain(facts).steps[-1].name == "dispatched"


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (SENT, "One delivery was attempted, if keys, flags and configuration were then as they are now."),
        (evolve(SENT, cursor=9), "One delivery is due, or was attempted just now"),
        (evolve(SENT, closed_sequence_id=9), "It was not pushed yet"),
        (evolve(SENT, closed_sequence_id=9, channel=None), "It was not pushed yet"),
        (with_envelope(push_eligible=False), "It was not pushed to this recipient, and will not be."),
        (evolve(SENT, envelope=None), "Nothing can be said"),
        (evolve(SENT, envelope=None, sequence_id=31), "There is no such envelope."),
        (evolve(SENT, envelope=None, sequence_id=21), "It was not pushed yet"),
        (evolve(SENT, skipped=True), "It was not pushed, unless an instance had loaded it"),
    ],
)
def test_verdict_says_what_follows(facts: Facts, verdict: str) -> None:
    assert explain(facts).verdict.startswith(verdict)


@pytest.mark.parametrize(
    "facts",
    [
        evolve(SENT, channel=None),
        evolve(SENT, subscription=None),
        with_subscription(since_sequence_id=10),
        with_envelope(is_commit_or_proposal=True),
        with_keys(9),
        evolve(SENT, configured=frozenset()),
    ],
    ids=["unregistered", "removed", "added again", "commits", "own", "not configured"],
)
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"cursor": 10}, "As things stand now it would not be pushed. It was dispatched before"),
        ({"cursor": 9}, "As things stand now it will not be pushed. An instance that has loaded it"),
        ({"cursor": 10, "skipped": True}, "It was not pushed, unless an instance had loaded it"),
        ({"cursor": 9, "skipped": True}, "As things stand now it will not be pushed."),
    ],
    ids=["dispatched", "above the cursor", "skipped", "above a cursor put back"],
)
def test_what_may_have_changed_since_is_not_taken_for_history(
    facts: Facts, change: dict[str, Any], verdict: str
) -> None:
    """The recipient may have had the push, and have unregistered, died or left the topic afterwards."""
    assert explain(evolve(facts, **change)).verdict.startswith(verdict)


def test_nothing_private_is_said() -> None:
    for facts in (SENT, with_keys(9), with_keys(8)):
        text = repr(explain(facts)) + repr(facts)
        assert KEY.hex() not in text
        assert repr(KEY)[2:-1] not in text
        assert repr(OWN)[2:-1] not in text
