"""Lines of keys, whatever stands in the values around them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pushd.config.positions import KeyPath, dotted, key_lines

TRICKY = """\
# [not.a.table]
top = 1 # x = 2
"quoted [name]" = "] = # \\" [x]"
'it is' = 'C:\\'
day = 1979-05-27 07:32:00 # a date with a space
a.b . "c" = true
multi = \"\"\"
fake = 1
[fake]
\"\"quoted\\\"\"\"\"\"
raw = '''
other = ''1''
'''''
empty = ""
list = [ # [
  "x,]", [1, 2],
  { p = 1, q = [ '}' ] }, # }
]
last = -1e5

[server] # comment
  listen = "x"
[push . "apns"]
key_id=''
[[auth.keys]]
kid = "a"
[auth.keys.extra]
more = 1
[[auth.keys]]

kid = "b"
"""


def _leaves(node: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from _leaves(value, (*path, name))


def test_every_key_of_a_tricky_document_has_its_line():
    lines = key_lines(TRICKY)
    assert set(lines) == set(_leaves(tomllib.loads(TRICKY)))
    assert {
        ("top",): 2,
        ("quoted [name]",): 3,
        ("it is",): 4,
        ("day",): 5,
        ("a", "b", "c"): 6,
        ("multi",): 7,
        ("raw",): 11,
        ("empty",): 14,
        ("list", 0): 16,
        ("list", 1, 1): 16,
        ("list", 2, "q", 0): 17,
        ("last",): 19,
        ("server",): 21,
        ("server", "listen"): 22,
        ("push", "apns"): 23,
        ("push", "apns", "key_id"): 24,
        ("auth", "keys", 0, "kid"): 26,
        ("auth", "keys", 0, "extra", "more"): 28,
        ("auth", "keys", 1): 29,
        ("auth", "keys", 1, "kid"): 31,
    }.items() <= lines.items()


VALUES = st.sampled_from(
    [
        "1",
        "true",
        '"[t0]"',
        "'\"'",
        "[\n 1, # ]\n 2,\n]",
        '"""\nk0 = 1\n\\"""""',
        "'''\n\n'''",
        "{ k0 = '}', k1 = [1] }",
        "1979-05-27 07:32:00Z",
        "[[], [[\n]]]",
    ]
)


@given(st.lists(st.lists(st.tuples(VALUES, st.sampled_from(["", " # k = [", "\n", "\r\n#"])), max_size=4), max_size=4))
def test_lines_are_those_the_keys_were_written_on(tables):
    text, expected = "", {}
    for number, pairs in enumerate(tables):
        expected[(f"t{number}",)] = text.count("\n") + 1
        text += f"[t{number}]\n"
        for index, (value, tail) in enumerate(pairs):
            expected[(f"t{number}", f"k{index}")] = text.count("\n") + 1
            text += f"k{index} = {value}{tail}\n"
    lines = key_lines(text)
    assert set(lines) == set(_leaves(tomllib.loads(text)))
    assert expected.items() <= lines.items()


@given(st.text(alphabet="[]{}=.,\"'\\#\n ab1", max_size=30))
def test_scan_ends_on_anything(text):
    lines = key_lines(text)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(lines) == set(_leaves(document))


def test_names_that_would_break_a_line_are_quoted():
    assert dotted(("auth", "keys", 0, "a\nb.c")) == 'auth.keys.0."a\\nb.c"'
