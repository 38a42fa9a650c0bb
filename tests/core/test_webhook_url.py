"""The strict URL reader: what is refused, what is read, and that no library ever sees another host than we did."""

from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pushd.core.addresses import is_blocked
from pushd.core.webhook_url import WebhookUrl, parse_webhook_url

REFUSED = {
    "S056": [
        "http://h/",
        "ftp://h/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "//host/",
        "https:host",
        "https:///x",
        "https:/h/",
        "",
        "invalid",
        "not a URL",
        "https://",
        "https:///",
        "https://?x",
        "https://#x",
        "https:\\\\h\\",
        "xhttps://h/",
    ],
    "S058": [
        "https://user@h/",
        "https://u:p@h/",
        "https://:p@h/",
        "https://@h/",
        "https://:@h/",
        "https://h@evil/",
        "https://h%2f@evil/",
        "https://user:secret@127.0.0.1",
        "https://h:443@evil/",
        "https://[::1]@h/",
    ],
    "S061": [f"https://h{c}.evil.com/" for c in "\t\r\n\0\x7f \x1f"]
    + [
        " https://h/",
        "https://h/ ",
        "https://h/\n",
        "https://h/a\tb",
        "\thttps://h/",
        "https://h/\x7f",
        "ht\ttps://h/",
    ],
    "S062": ["https://%31%32%37.0.0.1/", "https://h%00.example/", "https://h%2eexample/"],
    "S064": [
        "https://bücher.example/",
        "https://h/ü",
        "https://ⓛocalhost/",
        "https://h。example/",
        "https://127。0。0。1/",
    ],
    "S067": [
        "https://[::1",
        "https://[zz]/",
        "https://[v1.fe]/",
        "https://[::1]x/",
        "https://[]/",
        "https://::1/",
        "https://[127.0.0.1]/",
        "https://[::1]]/",
        "https://[[::1]]/",
    ],
    "S068": [
        f"https://{'a' * 64}.example/",
        "https://a..b/",
        "https://.example.com/",
        f"https://{'.'.join(['a' * 49] * 5)}.abcd/",
        "https://-a.example/",
        "https://a-.example/",
    ],
    "S070": ["https://h/a\r\nX-Injected: 1", "https://h/?a\r\nb", "https://h/a\nb"],
    "S073": ["https://hooks.example.com./", "https://127.0.0.1./"],
    "S002": ["https://127.1/", "https://127.0.1/", "https://127/"],
    "S004": ["https://0x7f000001/", "https://0x7f.1/", "https://0X7F.0.0.0X1/", "https://127.0.0.0x1/", "https://0x/"],
    "S005": [
        "https://0177.0.0.1/",
        "https://017700000001/",
        "https://2130706433/",
        "https://1.2.3.4.5/",
        "https://1.1.1.256/",
    ],
    "S007": ["https://0/", "https://00.00.00.00/"],
    "S025": ["https://[::1%25lo]/", "https://[::1%lo]/", "https://[fe80::1%eth0]/"],
    "ports": [
        f"https://h:{port}/" for port in ("", "0", "65536", "99999", "080", "-1", "+1", "1e3", "443x", "100000", "1_0")
    ],
    "other": ["https://h\\.evil/", "https://h\\@evil/", "https://h|/", "https://*.example.org/", "https://h,evil/"],
}


@pytest.mark.parametrize("text", [pytest.param(t, id=f"{k} {t!a}") for k, ts in REFUSED.items() for t in ts])
def test_unusual_text_is_refused(text: str) -> None:
    assert parse_webhook_url(text) is None


@pytest.mark.parametrize(
    ("text", "host", "port", "target", "host_header"),
    [
        ("https://example.com", "example.com", 443, "/", "example.com"),
        ("HTTPS://EXAMPLE.com/Path?Q=1", "example.com", 443, "/Path?Q=1", "example.com"),
        ("https://example.com:8443/x", "example.com", 8443, "/x", "example.com:8443"),
        ("https://example.com:443/x", "example.com", 443, "/x", "example.com"),
        ("https://h?", "h", 443, "/?", "h"),
        ("https://h/a@b:c//d?e=@", "h", 443, "/a@b:c//d?e=@", "h"),
        ("https://8.8.8.8/hook", "8.8.8.8", 443, "/hook", "8.8.8.8"),
        ("https://[2001:4860:4860:0::8888]:444/", "2001:4860:4860::8888", 444, "/", "[2001:4860:4860::8888]:444"),
        ("https://[::FFFF:8.8.8.8]/", "::ffff:808:808", 443, "/", "[::ffff:808:808]"),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443, "/", "xn--bcher-kva.example"),
        ("https://xn--a.attacker.com/", "xn--a.attacker.com", 443, "/", "xn--a.attacker.com"),
        ("https://my_hook.internal/", "my_hook.internal", 443, "/", "my_hook.internal"),
        ("https://123.example/", "123.example", 443, "/", "123.example"),
        ("https://a.0xg/", "a.0xg", 443, "/", "a.0xg"),
        pytest.param("https://h#@evil/", "h", 443, "/", "h", id="S059 fragment"),
        pytest.param("https://h?@evil/", "h", 443, "/?@evil/", "h", id="S059 query"),
        pytest.param("https://h/p#f", "h", 443, "/p", "h", id="S059 a fragment is never sent"),
        pytest.param(f"https://{'a' * 63}.example/", f"{'a' * 63}.example", 443, "/", f"{'a' * 63}.example", id="S068"),
    ],
)
def test_plain_urls_are_read(text: str, host: str, port: int, target: str, host_header: str) -> None:
    url = parse_webhook_url(text)
    assert url is not None
    assert (url.host, url.port, url.target, url.host_header) == (host, port, target, host_header)


T040_HOSTS = (
    "127.0.0.1 10.0.0.1 100.64.0.0 100.100.100.100 100.127.255.255 [::ffff:100.100.100.100] 172.16.0.1 192.168.0.1 "
    "169.254.169.254 0.0.0.0 [::1] [::] [fc00::1] [fe80::1] [fec0::1] [::ffff:127.0.0.1]"
)


@pytest.mark.parametrize("host", T040_HOSTS.split())
def test_t040_address_urls_are_recognised_as_addresses_and_blocked(host: str) -> None:
    url = parse_webhook_url(f"https://{host}/hook")
    assert url is not None
    assert url.address == ip_address(host.strip("[]"))
    assert is_blocked(url.address)


def test_a_name_is_no_address() -> None:
    url = parse_webhook_url("https://localhost/hook")
    assert url is not None
    assert url.address is None


def test_repr_shows_nothing_of_the_url() -> None:
    url = parse_webhook_url("https://private.example:8443/secret")
    assert repr(url) == "WebhookUrl()"


URL_WORDS = "https:// h example.com evil . : @ / ? # \\ [ ] ::1 % %2f 443 0x7f 127.0.0.1 - _ \t \n \0 ü 。"
URL_PIECES = st.lists(st.sampled_from(URL_WORDS.split(" ")), max_size=8).map("".join)


@given(st.one_of(URL_PIECES, URL_PIECES.map("https://".__add__), st.text(max_size=40)))
@example("https://[::1]x/")
@example("https://h\t.evil.com/")
def test_what_we_read_is_what_the_standard_library_reads(text: str) -> None:
    url = parse_webhook_url(text)
    if url is None:
        return
    parts = urlsplit(text)  # the independent reader: both must see one host, port and user
    assert parts.scheme == "https"
    assert parts.username is None
    assert parts.password is None
    assert (parts.port or 443) == url.port
    assert parts.hostname is not None
    assert url.host == (str(ip_address(parts.hostname)) if url.address else parts.hostname)
    assert url.target.isascii()
    assert url.target.isprintable()
    assert " " not in url.target
    assert "#" not in url.target


@given(st.text(alphabet=st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=30))
def test_what_is_read_reads_the_same_again(tail: str) -> None:
    url = parse_webhook_url(f"https://h{tail}")
    if url is not None:
        assert parse_webhook_url(f"https://{url.host_header}{url.target}") == url


def test_very_long_text_is_read_in_linear_time() -> None:
    # Length is judged elsewhere, after this reader has run: it must not be a way to burn a core.
    assert isinstance(parse_webhook_url("https://h/" + "a?" * 500_000), WebhookUrl)
    assert parse_webhook_url("https://" + "a." * 500_000 + "/") is None
    assert parse_webhook_url("https://[" + ":" * 1_000_000 + "]/") is None
