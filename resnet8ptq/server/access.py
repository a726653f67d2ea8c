"""Access to the tracking server: host names, users, and a warning if it is open."""

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from rich.panel import Panel

from resnet8ptq.core import console, files

OPEN = """Everyone who reaches {address} can read, change and delete every run and every file here.
There is no password: start with auth=true, or listen on 127.0.0.1 and connect through ssh -L."""
UNENCRYPTED = "Passwords and runs travel to {address} unencrypted: put a proxy with TLS in front."

# MLflow's basic-auth app, with its own tables beside the runs. Users log to each other's
# experiments. MLflow hashes passwords slowly on purpose, so a worker checks one once a minute, and
# accepts a changed one for as long.
_AUTH = """[mlflow]
database_uri = {database}
admin_username = admin
default_permission = EDIT
auth_cache_ttl_seconds = 60
authorization_function = mlflow.server.auth:authenticate_request_basic_auth"""


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def to_url(host: str, port: int) -> str:
    """Return the URL of a server.

    >>> to_url("::1", 5000)
    'http://[::1]:5000'
    """
    return f"http://{_bracket(host)}:{port}"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def name_variables(host: str, port: int, others: str | None) -> dict[str, str]:
    """Return the variables that make MLflow answer only to its own host names and `others`.

    Otherwise a web page could make its own host name resolve to this server, and read the runs.
    `others` holds names separated by commas.
    """
    hosts = [host, "127.0.0.1", "localhost"]
    if not is_loopback(host):
        hosts += [socket.gethostname(), socket.getfqdn()]
    names = [f"{_bracket(name)}:{port}" for name in dict.fromkeys(hosts)]
    names += [name.strip() for name in (others or "").split(",") if name.strip()]
    variables = {"MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names)}
    if others or not is_loopback(host):
        # Otherwise MLflow refuses its own pages too, unless they come from localhost.
        origins = [f"{scheme}://{name}" for name in names for scheme in ("http", "https")]
        variables["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(origins)
    return variables


def user_variables(folder: Path, database_uri: str) -> dict[str, str]:
    """Write the user settings into `folder`, readable by this user only; return the variables."""
    path = folder / "auth.ini"
    files.write_text(path, _AUTH.format(database=database_uri.replace("%", "%%")), mode=0o600)
    variables = {"MLFLOW_AUTH_CONFIG_PATH": str(path)}
    secret_files = {
        "MLFLOW_AUTH_ADMIN_PASSWORD": "admin_password",  # MLflow reads it only at the first start
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "secret_key",
    }
    for variable, name in secret_files.items():
        path = folder / name  # drawn at random, unless the environment has the secret
        if not os.environ.get(variable) and not path.exists():
            files.write_text(path, secrets.token_urlsafe(24), mode=0o600)
        variables[variable] = os.environ.get(variable) or path.read_text()
    return variables


def warn(host: str, address: str, auth: bool) -> None:
    """Print a warning to stderr if other machines reach the server."""
    if not is_loopback(host):
        text = (UNENCRYPTED if auth else OPEN).format(address=address)
        console.stderr().print(Panel(text, title="WARNING", style="bold red"))
