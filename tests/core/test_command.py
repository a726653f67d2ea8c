"""The words of a command, as an instance of its dataclass."""

from dataclasses import dataclass, field

from resnet8ptq.core.command import parse_words


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


def test_an_empty_word_is_an_empty_value():
    assert parse_words([""], Arguments, None, "file").file is None
