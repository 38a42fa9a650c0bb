"""No value of the configuration, secret or not, reaches a text anybody prints (PUSH-072)."""

from __future__ import annotations

import copy
import json
import pickle
import tempfile
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushd.config import InvalidConfig, load_config
from pushd.config.shape import KEYS, SECRET_KEYS, TABLES
from pushd.ops.check_config import as_json, as_text, check_config
from pushd.ops.show_config import settings
from pushd.secret import REDACTED, Secret
from tests.config.support import apns_block, environ, service_account, write

# Long enough never to be a part of pushd's own words by chance.
TOKENS = st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789", min_size=16, max_size=24)

# Where the text around the secret decides how far a value gets before it is refused or taken.
DISGUISES = [
    "{}",
    "postgresql://user:{}@host/db",
    "postgresql://host:{}/db",
    "postgresql://user:{}@host/db?no_such_option={}",
    "https://issuer.example/{}",
    "https://{}@issuer.example",
    "https://[{}",
    "http://127.0.0.1/{}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n",
    "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
    '{{"project_id": "{}", "client_email": "{}", "private_key": "{}", "token_uri": "{}"}}',
    '{{"{}": ',
    "*.{}",
    "127.0.0.1:{}",
]


def _document(values: dict[str, str]) -> str:
    """A file that gives each key of `values`, by dotted path, that text."""
    text = ""
    for table in TABLES.values():
        inside = {key: value for key, value in values.items() if key.rpartition(".")[0] == table.path}
        if inside:
            text += f"[[{table.path}]]\n" if table.repeated else f"[{table.path}]\n"
            text += "".join(f"{key.rpartition('.')[2]} = {value}\n" for key, value in inside.items())
    return text


def _everything_printed(text: str, environ: dict[str, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), text)
        found = check_config(path, environ)
        printed = [as_text(found), as_json(found), repr(found)]
        try:
            config = load_config(path, environ)
            printed += [repr(config), str(config), f"{config}", repr(settings(path, environ))]
        except InvalidConfig as exc:
            printed += [str(exc), repr(exc), repr(exc.args), "".join(traceback.format_exception(exc))]
            printed += [repr(exc.__cause__), repr(exc.__context__)]
    return "\n".join(printed)


@given(st.dictionaries(st.sampled_from(sorted(SECRET_KEYS | {"auth.keys.public_key"})), st.sampled_from(DISGUISES)),
       TOKENS, st.booleans())  # fmt: skip
def test_secrets_appear_nowhere(disguises, token, by_variable):
    secrets = {key: disguise.replace("{}", token) for key, disguise in disguises.items()}
    if by_variable:
        variables = {key.upper().replace(".", "_"): value for key, value in secrets.items()}
        values = {key: json.dumps("env:" + key.upper().replace(".", "_")) for key in secrets}
        values["push.http.allowed_domains"] = '["env:NOT_THERE"]'
    else:
        variables, values = {}, {key: json.dumps(value) for key, value in secrets.items()}
    assert token not in _everything_printed(_document(values), variables)


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), st.sampled_from(DISGUISES), min_size=1), TOKENS)
def test_no_refused_value_is_repeated(disguises, token):
    """Any key: a secret may be pasted into the wrong line."""
    values = {key: json.dumps(disguise.replace("{}", token)) for key, disguise in disguises.items()}
    with tempfile.TemporaryDirectory() as folder:
        found = check_config(write(Path(folder), _document(values)), {})
    assert token not in as_text(found) + as_json(found) + repr(found)


BROKEN = ["a = {}", "a = 'x' {}", 'a = "{}', "a = [{}", "a = '''{}", "a = { {}", "{}", "[{}", 'a = "env:{} {}"']


@given(st.sampled_from(BROKEN), TOKENS.map("x{}".format))
def test_text_in_the_wrong_place_is_not_repeated(broken, token):
    assert token not in _everything_printed("[push]\n" + broken.replace("{}", token), {})


def test_good_secrets_appear_nowhere():
    token = "zq7k2m9x4w8v5t3r"
    variables = environ() | {
        "FCM_ACCOUNT": service_account(client_email=token, project_id=token),
        "DB": f"postgresql://user:{token}@host/db",
        "JWKS": f"https://issuer.example/{token}",
    }
    text = (
        apns_block()
        + '[push.fcm]\nservice_account = "env:FCM_ACCOUNT"\n[database]\nurl = "env:DB"\nreplica_url = "env:DB"\n'
        + '[auth]\njwks_url = "env:JWKS"\n'
    )
    printed = _everything_printed(text, variables)
    assert token not in printed
    assert "PRIVATE KEY" not in printed
    assert printed.count(REDACTED) >= 5


def test_secret_shows_itself_on_request_alone():
    secret = Secret("hunter2hunter2")
    shown = [
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret:>40}",
        f"{secret!r}",
        f"{[secret]}",
        f"{ ({'k': secret}) }",
    ]
    assert all(REDACTED in text and "hunter2" not in text for text in shown)
    assert secret.reveal() == "hunter2hunter2"
    assert not hasattr(secret, "__dict__")


def test_secrets_are_compared_by_text():
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a"), Secret("ä")}) == 2


@pytest.mark.parametrize("copying", [pickle.dumps, copy.deepcopy])
def test_secret_is_not_copied_elsewhere(copying):
    with pytest.raises(TypeError, match="not serialized"):
        copying(Secret("hunter2"))
