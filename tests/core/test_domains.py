"""The operator's list of webhook hosts."""

import pytest

from pushd.core.domains import host_allowed

LISTED = ("hooks.example.com", "*.EXAMPLE.org")


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        pytest.param("hooks.example.com", True, id="T045 exact"),
        pytest.param("HOOKS.EXAMPLE.COM", True, id="S071 other case"),
        pytest.param("a.example.org", True, id="S071 one label"),
        pytest.param("a.b.example.org", True, id="S071 two labels"),
        pytest.param("example.org", False, id="T045 no label before the suffix"),
        pytest.param("evilexample.org", False, id="T045 suffix inside a label"),
        pytest.param("a.example.org.evil", False, id="T045 suffix in the middle"),
        pytest.param("hooksxexample.com", False, id="B127 a dot is no wildcard"),
        pytest.param("xhooks.example.com", False, id="B127 no part of a name"),
        pytest.param("a.hooks.example.com", False, id="exact entries have no subdomains"),
        pytest.param("example.com", False, id="parent of an entry"),
        pytest.param("127.0.0.1", False, id="T042 address"),
        pytest.param("hooks.example.com.", False, id="S073 trailing dot"),
        pytest.param("a.example.org.", False, id="S073 trailing dot below a wildcard"),
        pytest.param("*.example.org", True, id="a star has no meaning in a host"),
        pytest.param("", False, id="empty"),
    ],
)
def test_list_decides_literally(host: str, allowed: bool) -> None:
    assert host_allowed(host, LISTED) is allowed


def test_empty_list_allows_every_host() -> None:
    assert host_allowed("anything.example", ())


def test_t042_entry_in_upper_case_matches() -> None:
    assert host_allowed("localhost", ("LOCALHOST",))
    assert not host_allowed("127.0.0.1", ("LOCALHOST",))
