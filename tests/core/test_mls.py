"""Reading where a message goes and what kind it is, from messages of another implementation and from broken ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.key_package import encode_vector, read_key_package
from pushd.core.mls import ContentType, Framing, Malformed, Reader, read_framing
from tests.support.envelopes import GROUP, key_package, private_message, public_message, vector

# Messages made by an independent implementation: the RFC's message-protection vectors, cipher suite 7.
VECTOR_GROUP = bytes.fromhex(
    "43657459e5f4857836be510ab963de501e47976c59fe18ffc9a2ee420d87d14239a688d23ea4a6a9958aaa580bf6a8e3"
)
VECTORS = {
    "proposal_priv": (
        "000100023043657459e5f4857836be510ab963de501e47976c59fe18ffc9a2ee420d87d14239a688d23ea4a6a9958aaa580bf6a8e300"
        "0000000012121202001c19d75a8f04a261a710cc9b2b5c16524dcae42fbc79b48a97740e9074407fa99224719826feff6aed001c0709"
        "163478c96fdbd627d0d2d10806ad5d0122a71bc855afac3a83006dc3b022348ac8e84f06d3ab82ad5fa8ca06a41f918e6110c06cbe1f"
        "4f9d7529915075eb285b5fe82b349926538410b986cbf65a79a9afd060ba51e12631c9886d9d5a306c4a44983571282f2889ab5d2c33"
        "987d8d5e37",
        ContentType.PROPOSAL,
    ),
    "proposal_pub": (
        "000100013043657459e5f4857836be510ab963de501e47976c59fe18ffc9a2ee420d87d14239a688d23ea4a6a9958aaa580bf6a8e300"
        "0000000012121201000000010002000300000002406730650230742734540235f4b80ed09e72f19295709c426a0c5bafe836beddb011"
        "f670081374734c7179715cf28d31a36d385bc8de023100b981a236e7759b944636df4e7c174a74f1107c0413a429aa29994a89bcdb86"
        "8eb4f31687bb3b22b126875af5f5aec01430affd805c9adab619ba6d2cba91ab6b9b2b0a5da2cc3ecfad0917101a5d98336c05dfb3dc"
        "9ca0eaf998bef9720d0292d9",
        ContentType.PROPOSAL,
    ),
    "commit_priv": (
        "000100023043657459e5f4857836be510ab963de501e47976c59fe18ffc9a2ee420d87d14239a688d23ea4a6a9958aaa580bf6a8e300"
        "0000000012121203001c2105ba7e7454dc0a2d9ea6a518650087ccda1469df410aa67ebe2e3840ab4f8c92e3e6c1fb19b6003662e907"
        "d3034e81b1439f0cc968c78bd23ff489eee1342ced811885be8b44d450fbf8ea81cc57d38072d3789715abd34674a97deac438a8fd98"
        "e0fcc994e5f439a4216872bbd13f5bd86424ef3d15240332bb5c1cd8e0072a0c02e22e628440ff8aee2bcf632beb70b69b924a82a2b8"
        "b480395c434266381f2194569aa75bfe4a29dea9db0bbc0463de41d6c17c3e1cbcf60c80eea97a7d2c5387242bafa88030",
        ContentType.COMMIT,
    ),
    "commit_pub": (
        "000100013043657459e5f4857836be510ab963de501e47976c59fe18ffc9a2ee420d87d14239a688d23ea4a6a9958aaa580bf6a8e300"
        "0000000012121201000000010003000040683066023100a116003590cda454d87bce491dac693d55ada6f252e4e3b682075783067cf5"
        "75116452d630de291738a5f444c2683a810231009e57e6b8766c97af3d76a0eea8e6b477dc80b03b31d6ed3397fa60083116012506f2"
        "ed47b7f502f78458ad6176f46e2c304980bf65cec32aae7cbe5cbc11cc9d3496859e8a56c8aab65221e984e52161ac9dd44f7dc9ca84"
        "1702f34cf8a9217fb53029c048cfe0a354989898372d0d4db6eeafdee13592b9ddfa2e5e00d74892ae0af3f634e36867c7934734135f"
        "25e62b4b",
        ContentType.COMMIT,
    ),
    "application_priv": (
        "000100023043657459e5f4857836be510ab963de501e47976c59fe18ffc9a2ee420d87d14239a688d23ea4a6a9958aaa580bf6a8e300"
        "0000000012121201001c3c600bcc16ffc87575cdcb9a34ef1de0404a65f46675704c678d471740a4e4bdf2c45dba7055a6a960417c20"
        "ecd704f3ae47e50b8e0e7c25b802287db52fbcd04dfd518a234386050254cd5294cc03322f5da8d3163d7bb3fd6c6cb9e4167227ef18"
        "9d0c0cba800de217666e5f4059446c6b8dd886c34814a7c4ae83fa2ef79d57d095c89eab198f7527ccd506a929841b7901280a13b486"
        "be1c302b0af755acf4a09ea71f4cf13cb36c9195cff628d857941e90fdc347e2985f8dcca8912e89c559",
        ContentType.APPLICATION,
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_messages_of_another_implementation_are_read(name: str) -> None:
    encoded, content_type = VECTORS[name]
    assert read_framing(bytes.fromhex(encoded)) == Framing(VECTOR_GROUP, content_type)


@pytest.mark.parametrize(
    ("header", "length"),  # the vectors for variable-size lengths that accompany the RFC
    [
        ("00", 0),
        ("0d", 13),
        ("36", 54),
        ("3f", 63),
        ("4040", 64),
        ("40ff", 255),
        ("4185", 389),
        ("4aaa", 2730),
        ("7fff", 16383),
        ("80004000", 16384),
        ("8000beef", 48879),
    ],
)
def test_vector_lengths(header: str, length: int) -> None:
    encoded = bytes.fromhex(header) + bytes(length)
    assert Reader(encoded).vector() == bytes(length)
    assert encode_vector(bytes(length)) == encoded
    with pytest.raises(Malformed):
        Reader(encoded[:-1]).vector()


def test_the_longest_vector_does_not_fit() -> None:
    with pytest.raises(Malformed):
        Reader(bytes.fromhex("bfffffff")).vector()


@pytest.mark.parametrize(
    "prefix",
    ["4000", "400d", "403f", "80000000", "8000003f", "80000040", "80003fff", "c0", "c000000000000000", "ff", ""],
)
def test_a_length_in_more_bytes_than_needed_is_refused(prefix: str) -> None:
    with pytest.raises(Malformed):
        Reader(bytes.fromhex(prefix) + bytes(20_000)).vector() if prefix else Reader(b"").vector()


@pytest.mark.parametrize("content_type", [1, 2, 3])
@pytest.mark.parametrize("sender_type", [1, 2, 3, 4])
def test_content_type_is_behind_the_sender_in_public_framing(content_type: int, sender_type: int) -> None:
    framing = read_framing(public_message(GROUP, content_type, sender_type=sender_type))
    assert framing == Framing(GROUP, ContentType(content_type))
    assert framing.is_commit_or_proposal == (content_type != 1)


@pytest.mark.parametrize("make", [private_message, public_message])
@pytest.mark.parametrize("content_type", [0, 4, 255])
def test_unknown_content_types_are_refused(make, content_type: int) -> None:
    with pytest.raises(Malformed):
        read_framing(make(GROUP, content_type))


@pytest.mark.parametrize("sender_type", [0, 5, 255])
def test_unknown_senders_are_refused(sender_type: int) -> None:
    with pytest.raises(Malformed):
        read_framing(public_message(sender_type=sender_type))


@pytest.mark.parametrize("head", ["0000", "0002", "0100"])
def test_other_versions_are_refused(head: str) -> None:
    with pytest.raises(Malformed):
        read_framing(bytes.fromhex(head) + private_message()[2:])


@pytest.mark.parametrize("wire_format", [0, 3, 4, 5, 0x0100, 0xFFFF])
def test_messages_that_are_not_for_a_group_are_refused(wire_format: int) -> None:
    with pytest.raises(Malformed):
        read_framing(b"\x00\x01" + wire_format.to_bytes(2, "big") + private_message()[4:])


def test_every_cut_of_a_private_message_is_refused() -> None:
    message = private_message()
    for end in range(len(message)):
        with pytest.raises(Malformed):
            read_framing(message[:end])


def test_every_cut_of_a_public_message_up_to_its_content_type_is_refused() -> None:
    message = public_message()
    head = len(message) - len(b"filler")
    for end in range(head):
        with pytest.raises(Malformed):
            read_framing(message[:end])
    assert read_framing(message[:head]).content_type is ContentType.COMMIT


def test_bytes_behind_a_message_are_ignored() -> None:
    assert read_framing(private_message() + b"padding") == read_framing(private_message())


@given(st.binary(max_size=80))
def test_a_vector_survives_encoding(content: bytes) -> None:
    assert vector(content) == encode_vector(content)
    reader = Reader(encode_vector(content) + b"rest")
    assert reader.vector() == content
    assert reader.take(4) == b"rest"
    assert reader.at_end


SEEDS = st.sampled_from([private_message(), public_message(), key_package().serialized()])


@given(
    st.one_of(st.binary(max_size=200), SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)
)
def test_anything_is_either_read_or_malformed(data: bytes, changes: list[tuple[int, int]]) -> None:
    mutated = bytearray(data)
    for position, value in changes:
        if position < len(mutated):
            mutated[position] = value
    for read in (read_framing, read_key_package):
        try:
            read(bytes(mutated))
        except Malformed as error:
            assert error.args == ()  # noqa: PT017 - that nothing of the input is in it is the point


@given(st.integers(0, 60), st.integers(0, 255))
def test_the_group_id_is_never_taken_from_elsewhere(position: int, value: int) -> None:
    """Whatever one changed byte does, a message that is still read names the bytes behind its group id's prefix."""
    mutated = bytearray(private_message())
    if position < len(mutated):
        mutated[position] = value
    try:
        framing = read_framing(bytes(mutated))
    except Malformed:
        return
    assert framing.group_id == bytes(mutated[5 : 5 + mutated[4]])
