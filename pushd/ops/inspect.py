"""`pushd status`, `explain`, `cursor`, `step-down`, `prune`: ask a running installation, or move it on.

None prints an id, token, URL, key or topic.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import attrs
import trio
from rich.console import Console
from rich.table import Table

from pushd.config import Config
from pushd.core.explain import Explanation, Holds, explain
from pushd.errors import StartError, StoreError, UsageError
from pushd.model import RECIPIENT_ID_BYTES, Channel
from pushd.store import operations
from pushd.store.operations import COUNTED_ROWS, ChannelCount, DispatchStatus, Holder, Skip
from pushd.store.startup import open_running_database
from pushd.telemetry import Event, get_logger

NS_PER_S = 1_000_000_000
STEP_DOWN_MARGIN_S = 2.0  # beyond the drain: for hearing of the request, and for another instance's try
HOLDER_POLL_S = 0.1


async def run_status(config: Config, data_dir: Path, *, as_json: bool) -> int:
    """Print who dispatches and how far it is; 0 when somebody does, else 1."""
    async with open_running_database(config, data_dir, "status") as connection:
        status = await operations.load_dispatch_status(connection)
        counts = await operations.count_recipients(connection)
    if as_json:
        print(json.dumps(status_fields(status, counts, config.push.recipient_ttl_seconds)))
    else:
        _print_status(status, counts, config.push.recipient_ttl_seconds)
    return 0 if status.holder is not None else 1


def status_fields(status: DispatchStatus, counts: Sequence[ChannelCount], recipient_ttl_s: int) -> dict[str, object]:
    """The status as plain values: what `--json` prints."""
    return {
        "holder": status.holder,
        "cursor": status.cursor,
        "closed_boundary": status.closed_sequence_id,
        "last_sequence_id": status.last_sequence_id,
        "waiting_rows": status.waiting_rows,
        "waiting_rows_is_minimum": status.waiting_rows >= COUNTED_ROWS,
        "lag_s": lag_s(status),
        "skipped_rows": status.skipped_rows,
        "recipients": {count.channel.label: count.recipients for count in counts},
        "topics": {count.channel.label: count.topics for count in counts},
        "next_expiry_s": next_expiry_s(status, recipient_ttl_s),
    }


def lag_s(status: DispatchStatus) -> float:
    """Seconds since the oldest eligible envelope above the cursor was stored; 0 when there is none."""
    if status.oldest_waiting_ns is None:
        return 0.0
    return round(max(0, status.now_ns - status.oldest_waiting_ns) / NS_PER_S, 3)


def next_expiry_s(status: DispatchStatus, recipient_ttl_s: int) -> float | None:
    """Seconds until the recipient renewed longest ago expires (negative: it is due); None without recipients."""
    if status.oldest_renewal_ns is None:
        return None
    return round((status.oldest_renewal_ns - status.now_ns) / NS_PER_S + recipient_ttl_s, 1)


def _print_status(status: DispatchStatus, counts: Sequence[ChannelCount], recipient_ttl_s: int) -> None:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    at_least = "at least " if status.waiting_rows >= COUNTED_ROWS else ""
    expiry = next_expiry_s(status, recipient_ttl_s)
    rows = {
        "dispatcher": status.holder or "nobody: no instance holds the lock",
        "cursor": str(status.cursor),
        "closed boundary": str(status.closed_sequence_id),
        "last sequence id": str(status.last_sequence_id),
        "waiting": f"{at_least}{status.waiting_rows} eligible envelopes, the oldest for {lag_s(status):.1f} s",
        "skipped by operators": f"{status.skipped_rows} eligible envelopes ever",
        "next expiry": "no recipients" if expiry is None else f"in {expiry / 3_600:.1f} hours",
    }
    for count in counts:
        rows[f"recipients on {count.channel.label}"] = f"{count.recipients}, with {count.topics} topics"
    for name, text in rows.items():
        table.add_row(name, text)
    Console(highlight=False).print(table)


async def run_explain(
    config: Config, data_dir: Path, recipient: str, sequence_id: int, configured: Collection[Channel], *, as_json: bool
) -> int:
    """Print why the envelope was, or was not, pushed to the recipient; always 0.

    Raises:
        UsageError: the recipient's id is not 64 hex digits.
        StartError: there is no database to ask.
    """
    try:
        recipient_id = bytes.fromhex(recipient)
    except ValueError:
        recipient_id = b""
    if len(recipient_id) != RECIPIENT_ID_BYTES:
        raise UsageError(f"--recipient must be the recipient's id, {2 * RECIPIENT_ID_BYTES} hex digits")
    async with open_running_database(config, data_dir, "explain") as connection:
        facts = await operations.load_delivery_facts(connection, recipient_id, sequence_id, configured)
    explanation = explain(facts)
    if as_json:
        print(json.dumps(explanation_fields(explanation)))
    else:
        _print_explanation(explanation)
    return 0


def explanation_fields(explanation: Explanation) -> dict[str, object]:
    """The explanation as plain values: what `--json` prints."""
    steps = [{"condition": step.name, "holds": step.holds.value, "because": step.text} for step in explanation.steps]
    return {"steps": steps, "verdict": explanation.verdict}


_MARKS = {Holds.YES: "[green]yes[/]", Holds.NO: "[red]no[/]", Holds.SO_FAR: "[yellow]not yet[/]"}


def _print_explanation(explanation: Explanation) -> None:
    table = Table(show_header=False, box=None)
    for step in explanation.steps:
        table.add_row(step.name, _MARKS[step.holds], step.text.replace("[", r"\["))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\n{explanation.verdict}", markup=False)


async def run_cursor_show(config: Config, data_dir: Path, *, as_json: bool) -> int:
    """Print the cursor beside the closed boundary."""
    async with open_running_database(config, data_dir, "cursor") as connection:
        status = await operations.load_dispatch_status(connection)
    if as_json:
        print(json.dumps({"cursor": status.cursor, "closed_boundary": status.closed_sequence_id}))
    else:
        print(f"cursor {status.cursor}, closed boundary {status.closed_sequence_id}")
    return 0


async def run_cursor_skip(config: Config, data_dir: Path, *, is_sure: bool, as_json: bool) -> int:
    """Move the cursor to the closed boundary: nothing in between is pushed, ever. Logged, and recorded in the database.

    Raises:
        StartError: `is_sure` is false.
    """
    if not is_sure:
        raise StartError(
            "this drops the push of every envelope between the cursor and the closed boundary (`pushd status` counts "
            "them); say --yes if that is what you want"
        )
    async with open_running_database(config, data_dir, "cursor") as connection:
        skip = await operations.skip_cursor(connection)
    if skip is not None:
        get_logger().warning(Event.CURSOR_SKIPPED, **attrs.asdict(skip))
    _print_skip(skip, as_json=as_json)
    return 0


def _print_skip(skip: Skip | None, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(None if skip is None else attrs.asdict(skip)))
    elif skip is None:
        print("The cursor is at the closed boundary already; nothing was skipped.")
    else:
        print(
            f"The cursor went from {skip.from_sequence_id} to {skip.to_sequence_id}; {skip.eligible_rows} eligible "
            "envelopes will not be pushed."
        )


async def run_step_down(config: Config, data_dir: Path, *, as_json: bool) -> int:
    """Ask the holder to give the dispatcher lock away, and print who has it then.

    Returns 0 when its term ended, 1 when nobody holds the lock or the holder keeps it beyond its drain time.
    """
    patience_s = config.server.max_drain_duration_ms / 1_000 + STEP_DOWN_MARGIN_S
    async with open_running_database(config, data_dir, "step-down") as connection:
        before = after = await operations.find_holder(connection)
        if before is not None:
            await operations.ask_to_step_down(connection)
            with trio.move_on_after(patience_s):
                while after is None or after == before:
                    await trio.sleep(HOLDER_POLL_S)
                    after = await operations.find_holder(connection)
    stepped_down = before is not None and after != before
    if as_json:
        names = {"before": before and before.name, "after": after and after.name}
        print(json.dumps({**names, "stepped_down": stepped_down}))
    else:
        print(_step_down_text(before, after, patience_s))
    return 0 if stepped_down else 1


def _step_down_text(before: Holder | None, after: Holder | None, patience_s: float) -> str:
    if before is None:
        return "Nobody holds the dispatcher lock: there is no one to step down."
    if after == before:
        return f"{before.name} was asked and still holds the dispatcher lock after {patience_s:g} s."
    if after is None:
        return f"{before.name} gave the dispatcher lock away; nobody holds it now. `pushd status` tells who does later."
    if after.name == before.name:
        return f"{before.name} gave the dispatcher lock away, no other instance took it, and it holds it again."
    return f"{before.name} gave the dispatcher lock away; {after.name} holds it now."


async def run_prune(config: Config, data_dir: Path, *, as_json: bool) -> int:
    """Delete expired envelopes at or below the cursor, a batch at a time, and print how many went.

    A batch that fails leaves those before it deleted; running it again goes on.
    """
    total = 0
    try:
        async with open_running_database(config, data_dir, "prune") as connection:
            while deleted := await operations.prune_envelopes(connection):
                total += deleted
    except StoreError as exc:
        raise StartError(f"{exc} after {total} envelopes were deleted; run it again to go on") from exc
    print(json.dumps({"deleted": total}) if as_json else f"{total} expired envelopes were deleted.")
    return 0
