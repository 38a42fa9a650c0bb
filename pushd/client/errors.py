"""What can go wrong for an app that uses the SDK.

    PushdError
    └─ ClientError
       ├─ RunnerDisabled        notifications need the task runner, and this client was opened without it
       ├─ InvalidConfig         the delivery cannot work: empty token or URL, wrong length of the signing key, ...
       ├─ UnknownConversation   no group of this id in the local file
       ├─ UnusableFile          the local file is another installation's or of a newer version
       ├─ MalformedMessage      the bytes to publish are not an MLS message to a group
       ├─ MalformedPush         the received body is not a push of this backend
       ├─ WebhookRefused        the webhook is not signed with the recipient's key, or is too old
       ├─ UnusableToken         what the app gave as bearer token cannot be one; nothing was sent
       ├─ Superseded            a newer enable or disable took over while this call was waiting
       └─ CallFailed            the backend, or the way to it, answered with a gRPC status
          ├─ NotificationsStopped   a status that will not go away by itself; the state is failed now (PUSH-089)
          └─ NotificationsDelayed   the state stays enabled and the task registers later (PUSH-080)

No text here holds anything of a request or of the backend's answer: a backend, or a proxy in front of it, may put an
id, a token or a secret into a status message, and these errors end up in crash reports (PUSH-096).
"""

from __future__ import annotations

from pushd.errors import Code, PushdError


class ClientError(PushdError):
    """Base of everything the SDK raises on purpose."""


class RunnerDisabled(ClientError):
    """Notifications are kept in step by the task runner; retrying without it is no use (PUSH-080)."""

    def __init__(self) -> None:
        super().__init__("notifications need the task runner, which this client was opened without")


class InvalidConfig(ClientError):
    """The configuration cannot work. The text says which rule it breaks, never the value."""


class UnknownConversation(ClientError):
    """No such group in the local file."""

    def __init__(self) -> None:
        super().__init__("no such conversation in the local file")


class UnusableFile(ClientError):
    """The local file cannot be used by this client; the text says why."""


class MalformedMessage(ClientError):
    """What was to be published is not an MLS message to a group; nothing was sent."""

    def __init__(self) -> None:
        super().__init__("not an MLS message to a group")


class MalformedPush(ClientError):
    """What was received is not a push of this backend."""


class WebhookRefused(ClientError):
    """The signature or the timestamp of a webhook does not stand; the text says which."""


class UnusableToken(ClientError):
    """The app's `token` has returned what no header can carry: nothing, a blank, a line end, or beyond ASCII."""

    def __init__(self) -> None:
        super().__init__("a bearer token is one or more visible ASCII characters")


class Superseded(ClientError):
    """Another enable or disable was called meanwhile and decides now."""

    def __init__(self) -> None:
        super().__init__("a newer call decides about notifications now")


class CallFailed(ClientError):
    """A call to the backend failed.

    Attributes:
        code: the gRPC status; the only part of the answer that is kept.
    """

    def __init__(self, code: Code) -> None:
        super().__init__(f"the backend call ended with {code.name}")
        self.code = code


class NotificationsStopped(CallFailed):
    """The backend refuses for good; `notification_state()` is failed until the next enable (PUSH-089)."""


class NotificationsDelayed(CallFailed):
    """Not registered yet; the task tries again (PUSH-080)."""
