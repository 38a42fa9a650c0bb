"""Every scenario runs twice: against a model of the backend, and against a real server over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.client.rig import Rig, open_rig
from tests.client.worlds import MemoryWorld, ServerAddress, World, server_process, server_world


def _make_database(postgres: str, name: str) -> str:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE migrated STRATEGY file_copy")
    return postgres.replace("/postgres?", f"/{name}?")


@pytest.fixture
def own_database(postgres: str) -> Iterator[str]:
    """URL, as a configuration takes it, of a database for a server of the test's own."""
    yield _make_database(postgres, "client_own")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP DATABASE client_own WITH (FORCE)")


@pytest.fixture(scope="session")
def start_server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], ServerAddress]]:
    """Starts one server per topic limit, on first use."""
    started: dict[int, ServerAddress] = {}
    with ExitStack() as stack:

        def start(max_topics: int) -> ServerAddress:
            if max_topics not in started:
                name = f"client_{max_topics}"
                url = _make_database(postgres, name)
                folder = tmp_path_factory.mktemp(name)
                started[max_topics] = stack.enter_context(server_process(url, folder, max_topics))
            return started[max_topics]

        yield start


@pytest.fixture
def max_topics() -> int:
    return 100_000


@pytest.fixture(params=["memory", "server"])
def server(request: pytest.FixtureRequest, max_topics: int) -> ServerAddress | None:
    """The server of this run, or None for the run without one."""
    if request.param == "memory":
        return None
    started: ServerAddress = request.getfixturevalue("start_server")(max_topics)
    return started


@pytest.fixture
async def world(server: ServerAddress | None, max_topics: int) -> AsyncIterator[World]:
    if server is None:
        yield MemoryWorld(max_topics)
        return
    async with server_world(server) as real:
        yield real


@pytest.fixture
async def rig(world: World, tmp_path: Path) -> AsyncIterator[Rig]:
    with open_rig(tmp_path / "client.db", world.backend) as opened:
        yield opened


@pytest.fixture
def memory_rig(tmp_path: Path) -> Iterator[Rig]:
    """For what concerns the client alone."""
    with open_rig(tmp_path / "client.db", MemoryWorld()) as opened:
        yield opened
