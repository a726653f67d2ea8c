"""A PostgreSQL cluster of one's own, in a folder: made on first use, reached by a Unix socket.

No port and no password: the operating system says who connects (`peer`), and only the user who made
the cluster may. PostgreSQL refuses to run as root; started by root, it runs as Debian's `postgres`.
"""

import os
import pwd
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resnet8ptq.core.errors import TrackingError

DEBIAN = Path("/usr/lib/postgresql")  # <major version>/bin


@contextmanager
def run(folder: Path, max_connections: int) -> Iterator[str]:
    """Run the cluster in `folder` during the block; yield the URI of its database.

    The caller sees to it that no other process does the same.

    Raises:
        TrackingError: PostgreSQL is not installed, or cannot be started here.
    """
    programs = _find_programs(folder)
    account = _account()
    if not (folder / "PG_VERSION").exists():
        _make(folder, programs, account)
    log = folder / "log"
    control = [str(programs / "pg_ctl"), "-D", str(folder)]
    with tempfile.TemporaryDirectory(prefix="resnet8ptq-") as socket:  # its path must be short
        _give(Path(socket), account)
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": socket,
            "max_connections": str(max_connections),
        }
        options = " ".join(f"-c {key}={shlex.quote(text)}" for key, text in settings.items())
        # One that a killed server has left behind listens in a folder that is not known any more.
        _call([*control, "stop", "-m", "fast"], account)
        try:
            started = _call([*control, "start", "-w", "-l", str(log), "-o", options], account)
            if started.returncode:
                reason = _last_line(log.read_text() if log.exists() else started.stderr)
                raise TrackingError(f"folder: PostgreSQL did not start in {folder} ({reason})")
            yield f"postgresql://{_user()}@/postgres?host={socket}"
        finally:
            _call([*control, "stop", "-m", "fast"], account)


def _find_programs(folder: Path) -> Path:
    """Return where `initdb` and `pg_ctl` are, of the version that made the cluster."""
    installed = {path.parent.name: path for path in DEBIAN.glob("*/bin") if path.is_dir()}
    version = folder / "PG_VERSION"
    if version.exists() and installed:
        made_by = version.read_text().strip()
        if made_by not in installed:
            raise TrackingError(
                f"folder: {folder} was made by PostgreSQL {made_by}, and {', '.join(installed)} is "
                f"installed: apt-get install postgresql-{made_by}, or pg_upgrade the folder"
            )
        return installed[made_by]
    if installed:
        return installed[max(installed, key=float)]
    if (found := shutil.which("pg_ctl")) is not None:
        return Path(found).resolve().parent
    raise TrackingError(
        "database: no PostgreSQL is installed here (apt-get install postgresql); takes also the "
        "URI of one elsewhere, postgresql://user@host/name"
    )


def _account() -> dict[str, Any]:
    """Return whom to run PostgreSQL as, in `subprocess`'s terms: nobody else unless root starts."""
    if os.geteuid() != 0:
        return {}
    try:
        found = pwd.getpwnam("postgres")
    except KeyError:
        raise TrackingError(
            "database: root may not run PostgreSQL, and there is no user postgres to do it; start "
            "the server as another user"
        ) from None
    return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}


def _make(folder: Path, programs: Path, account: dict[str, Any]) -> None:
    """Make the cluster aside, and put it in place when it is whole."""
    scratch = folder.with_name(f".{folder.name}-new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    _give(scratch, account)
    command = [str(programs / "initdb"), "-D", str(scratch), f"--username={_user()}"]
    command += ["--auth-local=peer", "--auth-host=reject", "--encoding=UTF8", "--locale=C"]
    done = _call([*command, "--data-checksums"], account)
    if done.returncode:
        hint = f"; user postgres must be able to enter {folder.parent}" if account else ""
        raise TrackingError(
            f"folder: PostgreSQL cannot be set up in {folder} ({_last_line(done.stderr)}{hint})"
        )
    scratch.replace(folder)


def _give(folder: Path, account: dict[str, Any]) -> None:
    if account:
        os.chown(folder, account["user"], account["group"])


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _call(command: list[str], account: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    # From "/": the other account may not enter the current folder. English: the text is quoted.
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(
        command, cwd="/", env=environment, capture_output=True, text=True, check=False, **account
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wanted = [line for line in lines if any(word in line for word in ("FATAL", "error:"))]
    return (wanted or lines or ["no reason given"])[-1]
