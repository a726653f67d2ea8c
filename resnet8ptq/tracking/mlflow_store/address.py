"""Checks the address of an MLflow store, so that settings and messages hold no password.

Hydra writes settings to `.hydra/`, MLflow logs them, and errors quote them. `core.text.redact`
hides user names and passwords in printed text. This module refuses addresses whose secrets `redact`
could fail to hide.
"""

import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, urlsplit

from resnet8ptq.core.errors import ConfigError

KEY = "tracking.uri"
VARIABLE = "MLFLOW_TRACKING_URI"
# Allowed after the question mark of a database's address, because none of them holds a secret.
PARAMETERS = frozenset(
    (
        "host",
        "port",
        "options",
        "application_name",
        "connect_timeout",
        "client_encoding",
        "target_session_attrs",
        "channel_binding",
        "gssencmode",
        "keepalives",
        "charset",
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
        "sslcrl",
        "ssl_ca",
        "ssl_cert",
        "ssl_key",
        "unix_socket",
        "driver",
        "Encrypt",
        "TrustServerCertificate",
        # parameters of SQLite
        "mode",
        "cache",
        "uri",
        "timeout",
        "nolock",
        "immutable",
    )
)
_SERVERS = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # each is also allowed with +DRIVER
_HELD = (
    f"{KEY}: holds a password, or text that may be one, and the config is written to files; "
    "expected an address without one; try MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, "
    f"or {VARIABLE}"
)
_QUOTED = (
    f"{VARIABLE}: got a user name or password with / ? # @ [ ] or a space, expected them "
    "percent-encoded; try python -c 'from urllib.parse import quote; print(quote(input(), \"\"))'"
)
_PARAMETER = (
    f": got a parameter after ? that may hold a secret, expected {' | '.join(sorted(PARAMETERS))}"
)
_USER = re.compile(r"[\w.%+~-]*")
_USER_AND_PASSWORD = re.compile(r"[^/?#@\s:\[\]]*(:[^/?#@\s\[\]]*)?")


def check_words(words: Iterable[str]) -> None:
    """Refuse secrets in `tracking.uri` on the command line, before Hydra writes them to a file.

    Raises:
        ConfigError: a word sets an address with text that may be a password, or with a parameter
            that may hold a secret.
    """
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") in (KEY, KEY.partition(".")[0]):
            _check_user(value, written=True)
            _check_parameters(re.findall(r"[?&]([^=&]*)=", value), KEY)


def check(uri: str, written: bool) -> None:
    """Refuse an address whose secrets could be written or printed, or that cannot be used.

    Args:
        uri: the address; an empty one is accepted.
        written: whether the address is a setting, which Hydra writes to files; otherwise, it is
            from the environment.

    Raises:
        ConfigError: a setting holds text that may be a password, the environment holds a password
            that an error could print, a parameter may hold a secret, or the address is malformed or
            of an unknown kind. The message quotes at most the scheme of the address.
    """
    if not uri:  # the address is not set
        return
    key = KEY if written else VARIABLE
    _check_user(uri, written)
    scheme, separator, _ = uri.partition("://")
    is_known = scheme in _SERVERS or scheme.partition("+")[0] in _DATABASES
    if not separator or not is_known:
        takes = " | ".join(f"{name}://" for name in (*_SERVERS, *_DATABASES))
        got = "another address"
        if separator and scheme.isalnum():
            got = f"{scheme[:20]}://..."
        raise ConfigError(f"{key}: got {got}, expected {takes}; try root=FOLDER for a folder")

    # Check the address of a database, or else of a server
    if scheme not in _SERVERS:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            url = make_url(uri)
        except (ArgumentError, ValueError):
            takes = "http://host:port or postgresql://user@host/name"
            raise ConfigError(f"{key}: cannot be parsed; expected {takes}") from None
        if written and url.password is not None:
            raise ConfigError(_HELD)
        _check_parameters(url.query, key)
    else:
        try:
            query = parse_qsl(urlsplit(uri).query, keep_blank_values=True)
            _check_parameters([name for name, _ in query], key)
            _ = urlsplit(uri).port  # the text after the colon may be half of a password
        except ValueError:
            raise ConfigError(f"{key}: cannot be parsed; expected http://host:port") from None


def _check_user(uri: str, written: bool) -> None:
    scheme, separator, rest = uri.partition("://")
    if re.fullmatch(r"sqlite(\+\w+)?|file", scheme) and rest.startswith("/"):
        return  # the address is a path without a host
    if not separator:
        rest = uri
    user, _, _ = rest.rpartition("@")
    if written and not _USER.fullmatch(user):
        raise ConfigError(_HELD)
    if not written and not _USER_AND_PASSWORD.fullmatch(user):
        raise ConfigError(_QUOTED)


def _check_parameters(names: Iterable[str], key: str) -> None:
    if not PARAMETERS.issuperset(names):
        raise ConfigError(f"{key}{_PARAMETER}")
