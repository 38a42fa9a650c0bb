"""What a run came to, and whether the fakes, the counters and the logs agree with each other."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from attrs import define

from pushd.model import Channel
from tests.faults.instance import Instance, Outcome
from tests.faults.ledger import Arrival, Ledger, Push


@define
class Report:
    """What a run came to."""

    rows: int
    pushes: int
    received: int
    repeats: int
    terms: int
    outcomes: dict[str, int]
    """Without those suppressed."""
    suppressed: int = 0
    late: int = 0
    """Pushes to APNs that arrived when their term had ended, because it was lost or its instance killed."""

    def line(self) -> str:
        """For people."""
        counted = {**self.outcomes, "suppressed": self.suppressed}
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counted.items() if count)
        return (
            f"{self.rows} rows, {self.pushes} pushes due, {self.received} arrived, {self.repeats} repeats, "
            f"{self.terms} terms, {self.late} late; counted by whoever lives: {outcomes or 'nothing'}"
        )


Tell = Callable[[Report], None]


def arrival_of(channel: Channel, request: Mapping[str, Any]) -> Arrival:
    """The three channels carry the same fields in different places."""
    body, headers = json.loads(request["body"]), request["headers"]
    match channel:
        case Channel.APNS:
            device = headers[":path"].removeprefix("/3/device/")
        case Channel.FCM:
            device, body = body["message"]["token"], body["message"]["data"]
        case Channel.HTTP:
            device = body["recipient_id"]
    topic = base64.b64decode(body["topic"], validate=True)
    return Arrival(device, int(body["sequence_id"]), topic, channel, request["wall_s"], headers.get("apns-topic"))


def miscounted(
    ledger: Ledger,
    counted: Mapping[str, Counter[Outcome]],
    own: Collection[Push],
    channels: Mapping[str, Channel],
    *,
    nobody_ended: bool,
    nobody_left: bool,
) -> list[str]:
    """Where the counters of those who live do not say what arrived.

    Args:
        counted: by bundle id.
        own: pushes suppressed because they would tell somebody of their own message.
        channels: by device.
        nobody_ended: no instance ended, so that nothing counted is gone.
        nobody_left: no recipient was deleted.
    """
    found = []
    last = ledger.terms[-1]
    if nobody_left and last.instance in counted and [each.instance for each in ledger.terms].count(last.instance) == 1:
        # All that is due above the cursor was the last holder's, and it counted each delivery once.
        suppressed = Counter(channels[device] for device, row in own if row > last.start)
        due = Counter(channels[device] for device, row in ledger.expected if row > last.start)
        for channel in Channel:
            outcomes = _of_channel(counted[last.instance], channel)
            if outcomes.pop("suppressed", 0) != suppressed[channel]:
                found.append(f"{channel.name}: the last holder had {suppressed[channel]} own messages to suppress")
            if outcomes.total() != due[channel]:
                found.append(f"{channel.name}: {due[channel]} were due from the last holder, counted {outcomes}")
    if ledger.refused:  # whoever tries again counts once what arrives twice
        return found
    for name, counters in counted.items():
        sent = sum(each.sender == name for each in ledger.arrivals)
        found += _unequal(f"APNS of {name}", sent, _of_channel(counters, Channel.APNS))
    if nobody_ended:
        arrived = Counter(each.channel for each in ledger.arrivals)
        for channel in Channel:
            outcomes = sum((_of_channel(counters, channel) for counters in counted.values()), Counter[str]())
            found += _unequal(channel.name, arrived[channel], outcomes)
    return found


def by_outcome(counters: Counter[Outcome]) -> Counter[str]:
    """All channels together."""
    found: Counter[str] = Counter()
    for (_, outcome), count in counters.items():
        found[outcome] += count
    return +found


def _of_channel(counters: Counter[Outcome], wanted: Channel) -> Counter[str]:
    return +Counter({outcome: count for (channel, outcome), count in counters.items() if channel is wanted})


def _unequal(what: str, sent: int, outcomes: Counter[str]) -> list[str]:
    """An attempt that failed may have arrived or not; all others have."""
    delivered, failed = outcomes["delivered"], outcomes["failed"]
    if delivered <= sent <= delivered + failed:
        return []
    return [f"{what}: {sent} arrived, {delivered} counted as delivered and {failed} as failed"]


def complaints(instance: Instance, private: Iterable[str]) -> list[str]:
    """What an instance logged that it should not: no fault from outside is a defect to it, and none makes it tell what
    is private."""
    found = [line for line in instance.server.lines if not line.startswith("{")]
    found += [str(x) for x in instance.server.events if x.get("level") not in ("debug", "info", "warning")]
    text = "\n".join(instance.server.lines)
    return [*found, *(["something private"] if any(value in text for value in private) else [])]
