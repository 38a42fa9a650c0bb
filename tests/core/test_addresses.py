"""The address table, row by row, and the properties that hold for every address in disguise."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.core.addresses import in_connect_order, is_blocked

BLOCKED = {
    "S001": "127.0.0.1 127.254.254.254 127.255.255.255",
    "S007": "0.0.0.0",
    "S008": "169.254.169.254 169.254.45.1 169.254.0.0 169.254.255.255",
    "S011": "10.0.0.0 10.0.0.1 10.255.255.255 172.16.0.0 172.16.0.1 172.31.255.255 192.168.0.0 192.168.255.255",
    "S013": "::ffff:127.0.0.1 ::ffff:7f00:1 ::FFFF:a9fe:a9fe ::ffff:a00:1",
    "S016": "::ffff:0:7f00:1",
    "S017": "64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b::c0a8:1",
    "S019": "64:ff9b:1::a9fe:a9fe 64:ff9b:1:: 64:ff9b:1:ffff:ffff:ffff:ffff:ffff 64:ff9b:1::808:808",
    "S020": "2002:7f00:1:: 2002:a9fe:a9fe::1 2002:c0a8:1::1",
    "S022": "2001:0:7f00:1:: 2001:: 2001:0:ffff:ffff:ffff:ffff:ffff:ffff 2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "S023": "fe80:: fe80::1 fe81::1 feab::1 febf::1 FE8F::1",
    "S025": "::1 :: ::1%lo",
    "S026": "fc00::1 fd7a:115c:a1e0::1 fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    "S028": "224.0.0.1 239.255.255.255 ff02::1",
    "S029": "255.255.255.255 240.0.0.1 254.255.255.255",
    "S031": "0.1.2.3 0.255.255.255",
    "S032": "192.0.0.1 192.0.0.9 192.88.99.1 198.18.0.1 198.19.255.255 192.0.2.1 198.51.100.1 203.0.113.6",
    "documentation and special use": "2001:db8::1 3fff::1 100::1 2001:2::1 2001:20::1 5f00::1 4000::1 1fff::1",
    "T043": "100.64.0.0 100.127.255.255 ::ffff:100.64.0.0 ::ffff:100.127.255.255 100.100.100.100",
    "T044": "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff fec0:: feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff ff00::",
}
ALLOWED = {
    "S011": "172.15.255.255 172.32.0.1 192.167.0.1 9.255.255.255 11.0.0.0 192.169.0.0",
    "S014": "::ffff:8.8.8.8",
    "S034": "8.8.8.8 1.1.1.1 2001:4860:4860::8888",
    "edges": "1.0.0.0 126.255.255.255 128.0.0.0 169.253.255.255 169.255.0.0 198.17.255.255 198.20.0.0 223.255.255.255",
    "edges of 2000::/3": "2000:: 2001:200::1 2003::1 3ffe::1 2a00::1",
    "public in disguise": "64:ff9b::808:808 2002:808:808::1 ::ffff:0:808:808",
    "T043": "100.63.255.255 100.128.0.0 ::ffff:100.63.255.255 ::ffff:100.128.0.0",
}


def _rows(table: dict[str, str]) -> list[object]:
    return [pytest.param(text, id=f"{name} {text}") for name, texts in table.items() for text in texts.split()]


@pytest.mark.parametrize("text", _rows(BLOCKED))
def test_no_webhook_goes_there(text: str) -> None:
    assert is_blocked(ip_address(text))


@pytest.mark.parametrize("text", _rows(ALLOWED))
def test_webhook_may_go_there(text: str) -> None:
    assert not is_blocked(ip_address(text))


@given(st.ip_addresses(v=4))
def test_disguise_changes_no_verdict(plain: IPv4Address) -> None:
    number = int(plain)
    verdict = is_blocked(plain)
    for disguised in (
        IPv6Address(0xFFFF << 32 | number),  # mapped
        IPv6Address(number),  # compatible
        IPv6Address(0xFFFF << 48 | number),  # translated
        IPv6Address(0x64FF9B << 96 | number),  # NAT64
        IPv6Address(0x2002 << 112 | number << 80 | 0xABCD),  # 6to4
    ):
        assert is_blocked(disguised) == verdict


@given(st.ip_addresses(v=6))
def test_nothing_native_outside_of_global_unicast_is_allowed(address: IPv6Address) -> None:
    if int(address) >> 125 != 0b001 and int(address) >> 32 not in (0, 0xFFFF, 0xFFFF << 16, 0x64FF9B << 64):
        assert is_blocked(address)


@pytest.mark.parametrize(
    ("given_order", "connect_order"),
    [
        ("", ""),
        ("1.1.1.1", "1.1.1.1"),
        ("1.1.1.1 1.1.1.1 8.8.8.8", "1.1.1.1 8.8.8.8"),
        ("2a00::1 2a00::2 2a00::3 1.1.1.1 8.8.8.8", "2a00::1 1.1.1.1 2a00::2 8.8.8.8 2a00::3"),
        ("1.1.1.1 8.8.8.8 2a00::1", "1.1.1.1 2a00::1 8.8.8.8"),
    ],
)
def test_families_alternate_from_the_first_answer(given_order: str, connect_order: str) -> None:
    addresses = [ip_address(text) for text in given_order.split()]
    assert [str(address) for address in in_connect_order(addresses)] == connect_order.split()


@given(st.lists(st.ip_addresses(), max_size=8))
def test_connect_order_keeps_every_address_once(addresses: list[IPv4Address | IPv6Address]) -> None:
    ordered = in_connect_order(addresses)
    assert set(ordered) == set(addresses)
    assert len(ordered) == len(set(addresses))
    assert ordered[:1] == addresses[:1]
