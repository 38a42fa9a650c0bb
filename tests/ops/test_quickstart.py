"""The shell blocks of README.md and docs/quickstart.md do what they say.

The quickstart's blocks run in order in one bash, except those whose comment says `not run by the test`. Only the port
numbers are replaced, as others may use them. The README's first block is what CI itself does; each line of its list of
commands is run, and one that would go on for ever is stopped once it works.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTS = ("5050", "5051", "9464", "9465")
LIMIT_S = 120

pytestmark = pytest.mark.slow


def blocks(document: Path) -> list[str]:
    """The sh blocks that are to be run."""
    found = re.findall(r"(<!-- not run by the test[^>]*-->\n)?```sh\n(.*?)^```", document.read_text(), re.M | re.S)
    return [text for mark, text in found if not mark]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: its names are longer than a socket's path may be.
    place = Path(tempfile.mkdtemp(prefix="pushd-"))
    programs = place / "bin"
    programs.mkdir()
    for name, command in (("pushd", f"{sys.executable} -m pushd"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def ports() -> dict[str, str]:
    """Free ports in the place of those that the documents name."""
    with socket.socket() as a, socket.socket() as b, socket.socket() as c, socket.socket() as d:
        for sock in (a, b, c, d):
            sock.bind(("127.0.0.1", 0))
        return dict(zip(PORTS, (str(sock.getsockname()[1]) for sock in (a, b, c, d)), strict=True))


def moved(text: str, ports: Mapping[str, str]) -> str:
    return re.sub(r"\b(?:5050|5051|9464|9465)\b", lambda match: ports[match[0]], text)


def bash(folder: Path, script: str, **environ: str) -> str:
    """Run a script strictly; whatever it leaves behind is ended with it."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    log = folder / "output"
    with (
        log.open("w") as output,
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environ},
            stdout=output,  # a file, because what still runs in the background would hold a pipe open
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LIMIT_S} s:\n{log.read_text()}")
        finally:
            # SIGTERM first: PostgreSQL runs in a session of its own and is stopped by the pushd that started it.
            _end_group(process.pid, signal.SIGTERM)
            _end_group(process.pid, signal.SIGKILL)
    assert process.returncode == 0, log.read_text()
    return log.read_text()


def _end_group(group: int, signum: signal.Signals) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_quickstart_leads_to_a_push_and_survives_a_kill(folder: Path, ports: dict[str, str]) -> None:
    steps = blocks(ROOT / "docs" / "quickstart.md")
    assert len(steps) >= 6
    output = bash(folder, moved("\n".join(steps), ports))
    assert "nothing to mend" in output or "warning" in output
    assert "xmtp_push_dispatcher 1.0" in output
    assert re.search(r"outcome +delivered", output)
    assert "webhook-signature" in output
    holders = re.findall(r"^ *dispatcher +(\S+:\d+)", output, re.M)
    assert len(holders) == 3
    assert len(set(holders)) == 3, "a new process dispatches each time"


def test_the_fakes_run_under_the_names_they_have_in_the_wheel(folder: Path) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    place = folder / wheel["force-include"]["fakes"]
    shutil.copytree(ROOT / "fakes", place, ignore=shutil.ignore_patterns("__pycache__"))
    (place.parent / "__init__.py").touch()
    names = re.findall(r"`(?:python -m )?(pushd\._fakes\.\w+)`", (ROOT / "docs" / "quickstart.md").read_text())
    assert len(names) == 3
    for name in names:
        command = [sys.executable, "-m", name, "--folder", str(folder / name)]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as fake:
            try:
                assert fake.stdout is not None
                facts = json.loads(fake.stdout.readline())
            finally:
                fake.kill()
        assert Path(facts["ca"]).is_relative_to(folder / name)


LONG = {"serve": "term_started", "db": "postgresql://"}
"""Commands that go on until they are stopped, with what they print once they work."""
NEED_NO_SERVER = {"check-config", "config", "config-schema", "migrate"}


def readme_commands() -> list[str]:
    """The command lines of the README's list, which begins with making `pushd` mean this program."""
    contributors, listing = blocks(ROOT / "README.md")
    assert all(line.startswith("pip install rust-just && just ") for line in contributors.splitlines())
    first, *commands = [line.partition("#")[0].strip() for line in listing.splitlines()]
    assert first == "enable -n pushd"
    return commands


def stopped_when(sign: str, command: str, meanwhile: str = ":") -> str:
    """Shell lines that start a command, wait for a sign of life, do something meanwhile, and stop it in order."""
    return (
        f"rm -f out.log; echo '+ {command}'; {command} > out.log 2>&1 & child=$!\n"
        f"until grep -qs '{sign}' out.log; do kill -0 $child || cat out.log; sleep 0.1; done\n"
        f"{meanwhile}\nkill $child; wait $child"
    )


def test_the_commands_of_the_readme_work_as_they_stand(folder: Path, ports: dict[str, str]) -> None:
    free = "[server]\nlisten = '127.0.0.1:5050'\n[telemetry]\nmetrics_listen = '127.0.0.1:9464'\n"
    (folder / "pushd.toml").write_text(moved(free, ports))
    run = {command: f"echo '+ {command}'; {command}" for command in readme_commands()}
    asking = [run.pop(command) for command in list(run) if command.split()[1] not in {*LONG, *NEED_NO_SERVER}]
    script = ["enable -n pushd"]
    for command in run:
        sign = LONG.get(command.split()[1])
        meanwhile = "\n".join(asking) if command == "pushd serve" else ":"
        script.append(stopped_when(sign, command, meanwhile) if sign else run[command])
    output = bash(folder, moved("\n".join(script), ports), PUSHD_CONFIG=str(folder / "pushd.toml"))
    for command in readme_commands():
        assert f"+ {moved(command, ports)}" in output
