"""Starts a provider fake as a process of its own and talks to its control port."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Where this package can be imported from, whatever it is installed as.
_ROOT = Path(__file__).resolve().parents[len(__package__.split("."))]


class RunningFake:
    """A fake that is up. `facts` is what it printed: port, ca, endpoint, paths of the credentials made for it."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.port: int = facts["port"]
        self.ca = Path(facts["ca"])
        self.endpoint: str = facts.get("endpoint", "")

    def ask(self, path: str) -> Any:
        """GET from the control port."""
        return self._call("GET", path, None)

    def tell(self, path: str, order: Any = None) -> None:
        """POST to the control port.

        Raises:
            ValueError: the fake does not understand the order.
        """
        self._call("POST", path, order)

    def script(self, token: str, *answers: dict[str, Any]) -> None:
        """Answer the next requests for `token` so."""
        self.tell("/script", {"token": token, "answers": list(answers)})

    def requests(self) -> list[dict[str, Any]]:
        """The requests kept, oldest first."""
        kept: list[dict[str, Any]] = self.ask("/requests")
        return kept

    def stats(self) -> dict[str, Any]:
        """The counters."""
        counters: dict[str, Any] = self.ask("/stats")
        return counters

    def _call(self, method: str, path: str, order: Any) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.facts["control_port"], timeout=30)
        try:
            connection.request(method, path, None if order is None else json.dumps(order))
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        finally:
            connection.close()
        if reply.status != 200:
            raise ValueError(answer["error"])
        return answer


@contextlib.contextmanager
def launch(name: str, *options: str) -> Iterator[RunningFake]:
    """Run `python -m fakes.<name>` for the length of the block; it ends with its standard input, whatever happens."""
    command = [sys.executable, "-m", f"{__package__}.{name}", "--exit-with-stdin"]
    with (
        tempfile.TemporaryDirectory(prefix="fake-") as folder,
        subprocess.Popen(
            [*command, "--folder", folder, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fake {name} did not start")
        yield RunningFake(json.loads(line))
        process.kill()
