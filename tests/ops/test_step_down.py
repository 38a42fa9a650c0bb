"""`pushd step-down` against dispatchers on a real database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
import trio

from pushd.config import Config, Database, Server
from pushd.ops.inspect import run_step_down
from pushd.secret import Secret
from tests.dispatch.instance import instance
from tests.dispatch.memory import Provider
from tests.dispatch.seed import Seed, eventually, topic


@pytest.fixture
def seed(database_url: str) -> Iterator[Seed]:
    with Seed(database_url) as opened:
        yield opened


@pytest.fixture
def config(database_url: str) -> Config:
    return Config(database=Database(url=Secret(database_url)), server=Server(max_drain_duration_ms=10_000))


async def step_down(config: Config, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    capsys.readouterr()
    with trio.fail_after(60):
        code = await run_step_down(config, Path("unused"), as_json=True)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


async def test_other_instance_takes_over_and_nothing_is_sent_twice(
    database_url: str, seed: Seed, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    seed.recipients(range(1, 101))
    seed.subscribe(range(1, 101), topic(1))
    seed.envelopes((number, topic(1)) for number in range(1, 101))
    seed.settle(50)
    old, new = Provider(), Provider()
    async with instance(database_url, old) as first:
        await eventually(lambda: first.holds and old.attempts)
        async with instance(database_url, new) as second:
            code, answer = await step_down(config, capsys)
            assert (code, answer["stepped_down"]) == (0, True)
            await eventually(lambda: second.holds)
            assert not first.holds
            seed.settle(100)
            await eventually(lambda: seed.cursor() == 100)
            await second.stopped(10)
    sent = [(row, who) for _, row, who in [*old.attempts, *new.attempts]]
    assert len(sent) == len(set(sent)) == 10_000
    assert set(new.rows()) >= set(range(51, 101))


async def test_nobody_to_ask_and_nobody_who_listens_are_told_apart(
    database_url: str, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    config = attrs.evolve(config, server=Server(max_drain_duration_ms=100))
    assert await step_down(config, capsys) == (1, {"before": None, "after": None, "stepped_down": False})
    with psycopg.connect(database_url, autocommit=True, application_name="pushd dispatcher elsewhere:1") as conn:
        conn.execute("SELECT pg_try_advisory_lock(0, 3)")
        answer = {"before": "elsewhere:1", "after": "elsewhere:1", "stepped_down": False}
        assert await step_down(config, capsys) == (1, answer)
        assert await run_step_down(config, Path("unused"), as_json=False) == 1
    assert "still holds the dispatcher lock after 2.1 s" in capsys.readouterr().out
