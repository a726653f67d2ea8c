"""Passwords in the address of a store: neither the terminal nor any file keeps them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import redact
from resnet8ptq.tracking.mlflow_store import address
from tests.helpers.calling import QUICK, call

KNOWN = ["http", "https", "postgresql", "mysql+pymysql"]
SCHEMES = st.sampled_from([*KNOWN, "nosuch"])
VISIBLE = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1)


@given(SCHEMES, VISIBLE, st.sampled_from(["", ":5000", ":5000/name", "/name"]))
def test_no_password_survives_in_what_is_shown(scheme, password, rest):
    """What is shown is the same for every password: nothing of any is left."""
    text = f"cannot reach {scheme}://me:{password}@host{rest} today"
    expected = f"{scheme}://..." if "?" in password else f"{scheme}://host{rest}"
    assert redact(text) == f"cannot reach {expected} today"


@given(SCHEMES, VISIBLE, st.sampled_from(["password", "sslpassword", "p"]))
def test_no_secret_of_a_parameter_survives_in_what_is_shown(scheme, secret, name):
    shown = redact(f"{scheme}://host/db?{name}={secret}")
    assert shown == (f"{scheme}://..." if "@" in secret else f"{scheme}://host/db?...")


def test_paths_and_texts_without_secrets_are_shown_as_they_are():
    for text in (
        "sqlite:////home/me@work/a:b/mlflow.db",
        "file:///home/me@work/x",
        "see http://host:5000/#/experiments/7, or write to me@work",
    ):
        assert redact(text) == text


def message_of(uri: str, written: bool) -> str:
    try:
        address.check(uri, written)
    except ConfigError as error:
        return str(error)
    return ""


@given(SCHEMES, st.text(min_size=1))
def test_any_password_in_a_setting_is_refused_in_the_same_words(scheme, password):
    uri = f"{scheme}://me:{password}@host/db"
    expected = message_of("http://me:x@host/db", written=True)
    assert message_of(uri, written=True) == expected != ""
    with pytest.raises(ConfigError) as caught:
        address.check_words(["dtype=int8", f"tracking.uri={uri}"])
    assert str(caught.value) == expected


@given(st.sampled_from(KNOWN), st.text(min_size=1))
def test_a_password_of_the_environment_is_refused_or_hidden(scheme, password):
    uri = f"{scheme}://me:{password}@host/db"
    if message := message_of(uri, written=False):
        assert message == message_of("http://me:/@host/db", written=False)
    else:
        assert redact(uri) == f"{scheme}://host/db"


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(
    "uri",
    ["postgresql://h/d?password=hunter2", "http://h?token=hunter2", "mssql://h/d?odbc_connect=PWD"],
)
def test_a_secret_in_a_parameter_is_refused(uri, written):
    message = message_of(uri, written)
    assert "got a parameter after ? that may hold a secret, expected " in message
    assert "hunter2" not in message


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:5000",
        "https://host/path",
        "http://me@host:5000",
        "sqlite:////home/me@work/a:b/mlflow.db",
        "postgresql://me@host:5432/name?sslmode=require&options=-csearch_path%3Dmlflow",
    ],
)
def test_addresses_without_a_secret_are_taken(uri):
    address.check(uri, written=True)
    address.check(uri, written=False)
    address.check_words([f"tracking.uri={uri}", "tracking.root=/home/me@work"])


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(
    "uri",
    [
        *("sftp://h/x", "ftp://h/x", "s3://bucket/x", "file:///tmp/x", "mlruns", "databricks"),
        *("nosuch+driver://h", "http+unix://h", "x\x1b[31m://h", "://h", "sqlite:x"),
    ],
)
def test_an_address_of_no_store_is_refused_with_those_that_are(uri, written):
    message = message_of(uri, written)
    assert message.startswith(address.KEY if written else address.VARIABLE)
    assert "expected http:// | https:// | sqlite:// | postgresql://" in message
    assert message.isprintable()


@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
@pytest.mark.parametrize(
    "word",
    [
        "tracking.uri=postgresql://me:hun/ter2@host/db",
        "tracking.uri=postgresql://me:hun?ter2#x@host/db",
        "tracking.uri=postgresql://me:5,hunter2@host/db",
        "++tracking.uri=http://me:hunter2@host",
        "tracking.uri=postgresql://host/db?password=hunter2",
        "tracking={uri: 'http://me:hunter2@host'}",
        "tracking.uri=${oc.env:HELD}",
    ],
)
def test_a_password_on_the_command_line_is_printed_and_written_nowhere(tmp_path, mode, word):
    done = call(tmp_path, *mode, *QUICK, word, HELD="http://me:hunter2@host")
    assert (done.code, len(done.err.splitlines())) == (2, 1), done.err
    assert done.err.startswith("error: tracking.uri: ")
    for part in ("hunter2", "ter2", "hun/"):
        assert part not in done.out + done.err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
