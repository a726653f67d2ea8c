"""The words of a command, as an instance of its dataclass."""

import errno
import os
from dataclasses import dataclass, field

import pytest

from resnet8ptq.core.command import explain, parse_words
from resnet8ptq.core.errors import ConfigError


@dataclass
class Inner:
    version: str | None = None


@dataclass
class Arguments:
    name: str = "best"
    number: float = 1.0
    file: str | None = None
    target: Inner = field(default_factory=Inner)


def test_a_text_that_looks_like_a_number_stays_a_text():
    asked = parse_words(["1.20", "number=1.20", "target.version=007"], Arguments, None, "name")
    assert (asked.name, asked.number, asked.target.version) == ("1.20", 1.2, "007")
    assert parse_words(["target.version=null"], Arguments, None).target.version is None
    assert parse_words(["name=😀 a"], Arguments, None).name == "😀 a"


@pytest.mark.parametrize(("word", "key"), [("", "file"), ("name=", "name"), ("number=", "number")])
def test_an_empty_value_is_refused(word, key):
    """A script's empty variable, as in `run_id=$ID`, would choose the default: another run."""
    with pytest.raises(ConfigError, match=f"^{key}: got nothing, expected a value"):
        parse_words([word], Arguments, None, "file")


@pytest.mark.parametrize("value", ["[1", "{a", "a: b: c"])
def test_a_value_that_is_no_yaml_is_refused(value):
    """The YAML parser's own error would be printed with a traceback."""
    with pytest.raises(ConfigError, match=r"^number: got "):
        parse_words([f"number={value}"], Arguments, None)


def test_a_key_with_an_open_bracket_is_refused():
    with pytest.raises(ConfigError, match=r"^\[: got '1', expected a plain value"):
        parse_words(["[=1"], Arguments, None)


@pytest.mark.parametrize(
    ("number", "mend"), [(errno.EROFS, "working folder"), (errno.ENOSPC, "free some space")]
)
def test_an_error_of_the_disk_names_the_mend(number, mend):
    """The operating system names the fault alone."""
    explained = explain(OSError(number, os.strerror(number)))
    assert explained.startswith(f"[Errno {number}] {os.strerror(number)}; ")
    assert mend in explained
