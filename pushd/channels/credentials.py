"""The one failure that the provider credentials of APNs and FCM share."""

from pushd.errors import PushdError


class CredentialsFailed(PushdError):
    """There is no credential to send with at the moment; the attempt is transient."""
