"""What one stream follows and how far it has come in each topic.

A registration is *live* when it has handed over everything known of its topic; then a new envelope is handed over as
soon as it is seen. Otherwise it is *behind*: new envelopes are only noted, and pages are fetched in turns until it has
caught up with what was noted. The two never overlap, which is why nothing is skipped and nothing comes twice:

- `known` is at least the topic's head as read after the registration was made, and while it is behind it grows with
  everything noted;
- whatever lies above `known` has therefore not been seen by anybody yet, and will be noted when it is;
- so a registration whose position has reached `known` may go live.

Registrations that are behind wait in one line. A turn takes the front of it, gives each of its topics one page, and
sends those that still owe something to the end, so that none gets a second page before every other had its first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from attrs import frozen

TURN_TOPICS = 256
TURN_ROWS = 64  # of one topic


class Registration:
    """One followed topic of one stream. Compared by identity: a topic removed and added again is another one.

    Attributes:
        owner: whose registration it is; not looked at here.
        position: everything up to this id was handed over, or was not asked for.
        known: the highest id that the topic is known to have.
        is_live: see the module.
    """

    __slots__ = ("is_live", "known", "owner", "position", "topic")

    def __init__(self, owner: Any, topic: bytes, cursor: int) -> None:
        self.owner = owner
        self.topic = topic
        self.position = cursor
        self.known = cursor
        self.is_live = False

    def __repr__(self) -> str:
        return f"<Registration position={self.position} known={self.known} is_live={self.is_live}>"


@frozen
class Asked:
    """One topic of a turn, as it was when the turn began."""

    registration: Registration
    position: int
    known: int


class Interest:
    """The registrations of one stream, their `owner`."""

    def __init__(self, owner: Any = None) -> None:
        self._owner = owner
        self._registrations: dict[bytes, Registration] = {}
        self._behind: deque[Registration] = deque()

    def __repr__(self) -> str:
        return f"<Interest topics={len(self)} behind={len(self._behind)}>"

    def __len__(self) -> int:
        return len(self._registrations)

    def __contains__(self, topic: object) -> bool:
        return topic in self._registrations

    @property
    def is_behind(self) -> bool:
        """Whether a turn is due."""
        return bool(self._behind)

    def add(self, topic: bytes, cursor: int) -> Registration:
        """Follow a topic from above `cursor`. It is neither live nor behind before its head is known."""
        registration = Registration(self._owner, topic, cursor)
        self._registrations[topic] = registration
        return registration

    def remove(self, topic: bytes) -> Registration | None:
        """Stop following a topic; None when it was not followed."""
        return self._registrations.pop(topic, None)

    def clear(self) -> list[Registration]:
        """Follow nothing any more; returns what was followed."""
        followed = list(self._registrations.values())
        self._registrations.clear()
        self._behind.clear()
        return followed

    def found_heads(self, registrations: Sequence[Registration], heads: Sequence[int]) -> None:
        """The newest ids of these topics, 0 for an empty one, read after the registrations were made."""
        for registration, head in zip(registrations, heads, strict=True):
            registration.known = max(registration.known, head)
            self._place(registration)

    def is_due(self, registration: Registration, sequence_id: int) -> bool:
        """An envelope of the topic was seen: whether it is to be handed over now, or else deferred."""
        if not registration.is_live:
            registration.known = max(registration.known, sequence_id)
            return False
        return sequence_id > registration.position

    def hand_over(self, registration: Registration, sequence_id: int) -> None:
        """A due envelope was handed over."""
        registration.position = sequence_id

    def defer(self, registration: Registration, sequence_id: int) -> None:
        """A due envelope cannot be handed over now: fetch it later."""
        registration.known = sequence_id
        registration.is_live = False
        self._behind.append(registration)

    def next_turn(self) -> list[Asked]:
        """The topics to fetch next, each from above its position; they leave the line until `end_turn`."""
        turn: list[Asked] = []
        while self._behind and len(turn) < TURN_TOPICS:
            registration = self._behind.popleft()
            if self._is_current(registration):
                turn.append(Asked(registration, registration.position, registration.known))
        return turn

    def end_turn(self, turn: Sequence[Asked], found: Sequence[tuple[int, int]], *, is_cut: bool) -> list[bool]:
        """What a turn found; returns which of it is to be handed over.

        Args:
            turn: from `next_turn`.
            found: (place in the turn, sequence id), ascending, at most TURN_ROWS for a place.
            is_cut: whether the page was full before every place had its rows; the last place of `found` may then lack
                some, and those behind it had no turn. There is at least one row then.
        """
        counts = [0] * len(turn)
        wanted: list[bool] = []
        for place, sequence_id in found:
            registration = turn[place].registration
            counts[place] += 1
            wanted.append(self._is_current(registration))
            registration.position = sequence_id
        cut_at = found[-1][0] if is_cut else len(turn)
        for place, asked in enumerate(turn[: cut_at + 1]):
            registration = asked.registration
            if counts[place] < TURN_ROWS and place < cut_at:
                # Read to its end: what was known and did not come is there no more.
                registration.position = max(registration.position, asked.known)
            if self._is_current(registration):
                self._place(registration)
        self._behind.extendleft(asked.registration for asked in reversed(turn[cut_at + 1 :]))
        return wanted

    def _place(self, registration: Registration) -> None:
        if registration.position >= registration.known:
            registration.is_live = True
        else:
            self._behind.append(registration)

    def _is_current(self, registration: Registration) -> bool:
        return self._registrations.get(registration.topic) is registration
