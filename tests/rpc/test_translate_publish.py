"""The bytes of a refused publish's details, field by field."""

import pytest

from pushd.core.admission import PublishRefusal, Reason
from pushd.errors import Code
from pushd.rpc.translate_publish import error_from

URL = b"type.googleapis.com/xmtp.backend.v1.PublishError"


def field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field, shorter than 128 bytes."""
    return bytes((number << 3 | 2, len(content))) + content


@pytest.mark.parametrize("index", [None, 0, 7])
@pytest.mark.parametrize("reason", Reason)
def test_details_are_a_status_around_one_publish_error(reason: Reason, index: int | None) -> None:
    error = error_from(PublishRefusal(Code.INVALID_ARGUMENT, "no", reason, index))
    indexed = b"" if index is None else bytes((0x08, index))  # an index of 0 is there all the same
    inner = indexed + bytes((0x10, reason)) + field(3, b"no")
    assert error.details == b"\x08\x03" + field(2, b"no") + field(3, field(1, URL) + field(2, inner))
    assert (error.code, error.message) == (Code.INVALID_ARGUMENT, "no")


def test_a_refusal_without_a_reason_has_no_details() -> None:
    error = error_from(PublishRefusal(Code.UNIMPLEMENTED, "not here"))
    assert (error.code, error.message, error.details) == (Code.UNIMPLEMENTED, "not here", None)
