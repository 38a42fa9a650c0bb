"""Keeps the key set of an issuer fresh in the background; no call ever waits for a fetch."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import httpx2
import trio
from attrs import frozen

from pushd.core.tokens import TrustedKey, read_key_set
from pushd.errors import PushdError, StartError
from pushd.telemetry import Event, Metrics, get_logger

# What other backends of this protocol allow a key set too, so that one which serves them serves here.
FETCH_S = 10.0
MAX_BODY_BYTES = 262_144
START_ATTEMPTS = 3  # a start is not to fail because of one lost packet, nor to hang
START_PAUSE_S = 1.0
JITTER = 0.1  # of the pause, upwards, so that instances started together do not fetch together

Fetch = Callable[[], Awaitable[bytes | None]]


class KeySetStale(PushdError):
    """No fetch succeeded for longer than the operator allows; tokens can no longer be judged."""


@frozen
class KeySetSettings:
    """How often to fetch and how long an old set may serve, in seconds."""

    refresh_s: int = 300
    max_stale_s: int = 3_600


class KeySet:
    """The keys trusted now. `keys` is replaced as a whole."""

    def __init__(self, keys: tuple[TrustedKey, ...], metrics: Metrics) -> None:
        self._metrics = metrics
        self.keys = keys
        metrics.auth_keys.set(len(keys))

    def __repr__(self) -> str:
        return f"<KeySet of {len(self.keys)}>"

    def replace(self, keys: tuple[TrustedKey, ...]) -> None:
        """Trust `keys` from now on and nothing else."""
        self.keys = keys
        self._metrics.auth_keys.set(len(keys))


def http_fetch(url: str) -> Fetch:
    """Fetches `url` within FETCH_S and MAX_BODY_BYTES; None for any answer but 200, redirects included."""

    async def fetch() -> bytes | None:
        with trio.move_on_after(FETCH_S):
            try:
                # A client a fetch: once in minutes, an idle connection would only be found dead.
                async with httpx2.AsyncClient(trust_env=False, follow_redirects=False, timeout=None) as client:
                    async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as response:
                        return await _read_bounded(response) if response.status_code == 200 else None
            except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError):  # the last: a host with an unusable label
                return None
        return None

    return fetch


async def _read_bounded(response: httpx2.Response) -> bytes | None:
    body = bytearray()
    # Leaving the loop would leave the library's inner generators suspended for the garbage collector to complain
    # about; a cancelled read ends them all.
    with trio.CancelScope() as scope:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                scope.cancel(reason="the answer is too long")
    return bytes(body) if len(body) <= MAX_BODY_BYTES else None


async def run_key_set(
    key_set: KeySet,
    fetch: Fetch,
    settings: KeySetSettings,
    metrics: Metrics,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Fetch at the start, then once a refresh period; started once the first fetch brought keys. Never returns.

    A fetch that fails or brings no usable key leaves the old set in place.

    Raises:
        StartError: START_ATTEMPTS fetches in a row brought nothing.
        KeySetStale: nothing was fetched for `max_stale_s`.
    """
    for attempt in range(START_ATTEMPTS):
        if attempt:
            await trio.sleep(START_PAUSE_S)
        if await _refresh(key_set, fetch, metrics):
            break
    else:
        raise StartError("auth.jwks_url: no usable key set could be fetched")
    fresh = trio.current_time()
    task_status.started()
    while True:
        pause_s = settings.refresh_s * (1 + random.uniform(0, JITTER))
        await trio.sleep_until(min(trio.current_time() + pause_s, fresh + settings.max_stale_s))
        if await _refresh(key_set, fetch, metrics):
            fresh = trio.current_time()
        elif trio.current_time() >= fresh + settings.max_stale_s:
            raise KeySetStale("no usable key set could be fetched for auth.jwks_max_stale_seconds")


async def _refresh(key_set: KeySet, fetch: Fetch, metrics: Metrics) -> bool:
    body = await fetch()
    keys = read_key_set(body) if body is not None else None
    if not keys:
        metrics.auth_jwks_refresh.labels("error").inc()
        get_logger().warning(Event.KEY_SET_REFRESH_FAILED)
        return False
    metrics.auth_jwks_refresh.labels("ok").inc()
    key_set.replace(keys)
    return True
