"""Who may reach the tracking server: its names, its users, and a warning where it is open."""

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from rich.panel import Panel

from resnet8ptq.core import console, files

OPEN = """Whoever reaches {address} can read, change and delete every run and every file here.
There is no password: start with auth=true, or listen on 127.0.0.1 and reach it through ssh -L."""
UNENCRYPTED = "Passwords and runs travel to {address} unencrypted: put a proxy with TLS in front."

# MLflow's basic-auth app, on tables of its own beside the runs. Every user logs to experiments of
# others. Passwords are hashed slowly on purpose, once a minute rather than at each request; one
# that was changed is taken for as long.
_AUTH = """[mlflow]
database_uri = {database}
admin_username = admin
default_permission = EDIT
auth_cache_ttl_seconds = 60
authorization_function = mlflow.server.auth:authenticate_request_basic_auth"""


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bracket(host: str) -> str:
    """Return an address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def name_variables(host: str, port: int, others: str | None) -> dict[str, str]:
    """Return the settings by which MLflow refuses calls under names that are not its own.

    Else a web page could have its own name resolve to this server, and read it.

    Args:
        others: names besides the address, with commas between them.
    """
    hosts = [host, "127.0.0.1", "localhost"]
    if not is_loopback(host):
        hosts += [socket.gethostname(), socket.getfqdn()]
    names = [f"{bracket(name)}:{port}" for name in dict.fromkeys(hosts)]
    names += [name.strip() for name in (others or "").split(",") if name.strip()]
    variables = {"MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(names)}
    if others or not is_loopback(host):
        # MLflow's own pages are refused as foreign ones too, unless they come from localhost.
        origins = [f"{scheme}://{name}" for name in names for scheme in ("http", "https")]
        variables["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(origins)
    return variables


def user_variables(folder: Path, database: str) -> dict[str, str]:
    """Return what sets up users: their settings in `folder`, readable by nobody else, and secrets.

    Args:
        database: its URI.
    """
    path = folder / "auth.ini"
    files.write_text(path, _AUTH.format(database=database.replace("%", "%%")), mode=0o600)
    variables = {"MLFLOW_AUTH_CONFIG_PATH": str(path)}
    drawn = {
        "MLFLOW_AUTH_ADMIN_PASSWORD": "admin_password",  # taken at the first start alone
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "secret_key",
    }
    for variable, name in drawn.items():
        kept = folder / name  # at random, unless the environment has it
        if not os.environ.get(variable) and not kept.exists():
            files.write_text(kept, secrets.token_urlsafe(24), mode=0o600)
        variables[variable] = os.environ.get(variable) or kept.read_text()
    return variables


def warn(host: str, address: str, auth: bool) -> None:
    """Say on stderr what is open to others."""
    if not is_loopback(host):
        text = (UNENCRYPTED if auth else OPEN).format(address=address)
        console.stderr().print(Panel(text, title="WARNING", style="bold red"))
