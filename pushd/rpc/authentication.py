"""Authentication of calls by bearer tokens (PUSH-010): the shell around `core.tokens`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import trio

from pushd.backend.key_set import Fetch, KeySet, KeySetSettings, KeySetStale, http_fetch, run_key_set
from pushd.config import Auth
from pushd.core.credentials import Fault, inspect_public_key
from pushd.core.tokens import TokenPolicy, TrustedKey, judge
from pushd.errors import ConfigError, StatusError
from pushd.rpc.boundary import Authenticate
from pushd.telemetry import Event, Metrics, get_logger


class Keys:
    """The keys trusted now, and why they could not be kept fresh, if that came to pass."""

    def __init__(self, key_set: KeySet) -> None:
        self.key_set = key_set
        self.failure: KeySetStale | None = None


async def start_keys(
    nursery: trio.Nursery, auth: Auth | None, metrics: Metrics, drain: Callable[[], None]
) -> Keys | None:
    """The keys of `[auth]`, kept fresh in `nursery` when they come from an issuer; None without the block.

    `drain` is called when the set became too old to judge by; the reason then stands in `failure`.

    Raises:
        ConfigError: a key of the file is unusable.
        StartError: the issuer's key set cannot be fetched.
    """
    if auth is None:
        return None
    if auth.jwks_url is None:
        return Keys(KeySet(tuple(_inline_keys(auth)), metrics))
    keys = Keys(KeySet((), metrics))
    settings = KeySetSettings(auth.jwks_refresh_seconds, auth.jwks_max_stale_seconds)
    await nursery.start(partial(_keep, keys, http_fetch(auth.jwks_url.reveal()), settings, metrics, drain))
    return keys


async def _keep(
    keys: Keys,
    fetch: Fetch,
    settings: KeySetSettings,
    metrics: Metrics,
    drain: Callable[[], None],
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    try:
        await run_key_set(keys.key_set, fetch, settings, metrics, task_status=task_status)
    except KeySetStale as failure:
        get_logger().critical(Event.KEY_SET_STALE)
        keys.failure = failure
        drain()


def _inline_keys(auth: Auth) -> list[TrustedKey]:
    keys = []
    for index, entry in enumerate(auth.keys or ()):
        public_key = inspect_public_key(entry.public_key, entry.alg)
        if isinstance(public_key, Fault):
            raise ConfigError(f"auth.keys.{index}.public_key {public_key.what}")
        keys.append(TrustedKey(entry.kid, entry.alg, public_key))
    return keys


def make_authenticate(
    auth: Auth | None, keys: Keys | None, metrics: Metrics, now_s: Callable[[], float] = time.time
) -> Authenticate | None:
    """The check every call passes before a byte of its message is read; None when `[auth]` is absent.

    The check raises StatusError with the constant status of the first stage that fails, and counts its reason.
    """
    if auth is None or keys is None:
        return None
    policy = TokenPolicy(
        audiences=None if auth.audiences is None else frozenset(auth.audiences),
        issuers=None if auth.issuers is None else frozenset(auth.issuers),
        required_scopes=frozenset(auth.required_scopes),
        leeway_s=auth.leeway_seconds,
    )

    def authenticate(_path: str, headers: Mapping[str, str]) -> None:
        rejection = judge(headers.get("authorization"), keys.key_set.keys, policy, now_s())
        if rejection is not None:
            metrics.auth_rejections.labels(rejection.reason).inc()
            raise StatusError(rejection.code, rejection.message)

    return authenticate
