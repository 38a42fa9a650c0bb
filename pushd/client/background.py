"""A task group for what runs behind an app's back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """A task group that ends with its block, and does not wrap what the block raises.

    A plain group turns every exception of the block into an exception group, so that an app's `except CallFailed`
    around `open_client` would never match. What the background raises still comes in one.
    """
    raised: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as exc:
            # Not swallowed: raised again below, once the background has ended.
            raised = exc
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised
