"""The accepted values of settings, which the fields of `schema` refer to."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from resnet8ptq.core import other_names
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import mend_value, no_such_key, or_nearest

MOST_PIXELS = 2**13  # most pixels along a side of a picture


@dataclass(frozen=True)
class Limit:
    """The accepted values of a setting, as a description and a check. `check` accepts null.

    Attributes:
        takes: the accepted values, as text.
        holds: returns whether a value is accepted.
        choices: the accepted words, if the limit is a list of words.
    """

    takes: str
    holds: Callable[[Any], bool]
    choices: Sequence[str] = ()

    def check(self, key: str, got: Any) -> None:
        """Raise `ConfigError` for a value outside the limit."""
        if got is None or self.holds(got):
            return
        require(key, got, False, self._expect(key, str(got)))

    def _expect(self, key: str, got: str) -> str:
        """Return the accepted values as text, with the word that `got` probably means, if any."""
        if not self.choices:
            return self.takes
        meant = other_names.OPTIONS.get(key, {}).get(got.casefold())
        if meant:
            return f"{' | '.join(self.choices)}; try {key}={meant}"
        return or_nearest(got, self.choices)


def limited(
    default: Any, *limits: Limit, only: Mapping[str, Limit] | None = None, is_path: bool = False
) -> Any:
    """Return a dataclass field with limits.

    Args:
        default: a value, or a function that makes one.
        only: the conditions, by key, under which the field has an effect; see `words.find_idle`.
        is_path: whether the field names a file or folder of the user.
    """
    metadata = {"limits": limits, "only": only or {}, "is_path": is_path}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def one_of(*choices: str) -> Limit:
    """Return the limit that accepts only these words."""
    return Limit(" | ".join(choices), lambda got: got in choices, choices)


def at_least(least: int) -> Limit:
    """Return the limit for integers: `least` or more."""
    return Limit(f"an integer >= {least}", lambda got: got >= least)


def at_most(most: int) -> Limit:
    """Return the limit for integers: `most` or less."""
    return Limit(f"an integer <= {most}", lambda got: got <= most)


def _is_size(got: Any) -> bool:
    sides = got if isinstance(got, list) else [got, got]
    return len(sides) == 2 and all(map(_is_side, sides))


def _is_side(got: Any) -> bool:
    return type(got) is int and 0 < got <= MOST_PIXELS


def _is_columns(got: Any) -> bool:
    names = listed(got)
    return len(names) > 0 and all(isinstance(name, str) for name in names)


def listed(got: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one.

    >>> listed(["a", "b"]), listed("a")
    (['a', 'b'], ['a'])
    """
    return got if isinstance(got, list) else [got]


def _are_numbers(got: Any) -> bool:
    numbers = listed(got)
    return len(numbers) > 0 and all(map(_is_number, numbers))


def _is_number(got: Any) -> bool:
    return type(got) in (int, float) and math.isfinite(got)


def _are_anchors(got: Any) -> bool:
    return isinstance(got, list) and all(map(_are_anchor_sizes, got))


def _are_anchor_sizes(got: Any) -> bool:
    is_paired = isinstance(got, list) and len(got) % 2 == 0  # anchors list widths and heights
    return is_paired and _are_numbers(got) and min(got) > 0


def _is_plan(got: Any) -> bool:
    if not isinstance(got, dict):
        return bool(got == "auto")
    return len(got) > 0 and all(bits in BITS for bits in got.values())


def _are_inputs(got: Any) -> bool:
    if not isinstance(got, dict):
        return isinstance(got, str)
    return all(isinstance(name, str) for name in (*got, *got.values()))


FLOAT_BITS = 32
BITS = (2, 3, 4, 8, FLOAT_BITS)  # allowed bits of weights
BLOCKS = (16, 32, 64, 128, 256)  # numbers of weights that share a scale
MEMORY = Limit("1 or more gigabytes", lambda got: 1 <= got <= 2**20)
COUNT = (at_least(1), at_most(2**31 - 1))
SEED = Limit("0 <= seed < 2**32", lambda got: 0 <= got < 2**32)
FRACTION = Limit("a fraction, 0 to 1", lambda got: 0 <= got <= 1)
LOSS = Limit("a fraction, 0 to 0.5: 1 point is 0.01", lambda got: 0 <= got <= 0.5)
SHARE = Limit("a fraction, 0 < f <= 1", lambda got: 0 < got <= 1)
PART = Limit("a fraction, 0 < f < 1", lambda got: 0 < got < 1)
PERCENTILE = Limit("50 < p <= 100", lambda got: 50 < got <= 100)
PIXEL = Limit("a pixel, 0 to 255", lambda got: 0 <= got <= 255)
TRUE = Limit("true", lambda got: got is True)
SET = Limit("a value", lambda got: got is not None)
FINITE = Limit("a finite number", math.isfinite)
FACTOR = Limit("a number, not 0", lambda got: got != 0 and math.isfinite(got))
POSITIVE = Limit("a number > 0", lambda got: 0 < got < math.inf)
NUMBERS = Limit("one number, or one for each channel", _are_numbers)
ALL_POSITIVE = Limit("numbers > 0", lambda got: min(listed(got)) > 0)
SIZE = Limit(f"null, a number of pixels up to {MOST_PIXELS}, or [height, width]", _is_size)
NAME = Limit("a name", lambda got: bool(got.strip()))
NAMES = Limit("null or a list of names", lambda got: len(got) > 0)
SIZES = Limit("null or sizes of at least 1", lambda got: got and min(got) >= 1)
SIGMAS = Limit(
    "null, or a number > 0 for each keypoint",
    lambda got: _are_numbers(got) and min(got) > 0,
)
ANCHORS = Limit(
    "null, or [[width, height, ...], ...] in pixels, a list for each stride", _are_anchors
)
INPUTS = Limit("null, a name, or {input: name, ...}", _are_inputs)
BLOCK = Limit(f"null | {' | '.join(map(str, BLOCKS))}", lambda got: got in BLOCKS)
COLUMNS = Limit("null, a column or a list of columns", _is_columns)
TEXTS = Limit(
    "null, a column of texts, or two of pairs",
    lambda got: _is_columns(got) and len(listed(got)) < 3,
)
CALL = Limit("null, or a mapping with _target_", lambda got: isinstance(got, Mapping))
PLAN = Limit(f"null | auto | bits by layer, such as {{conv2d: 4}}, of {BITS}", _is_plan)
CLASSES = Limit("null or two or more different names", lambda got: len(set(got)) == len(got) >= 2)


Condition = tuple[str, object, bool, str]  # key, value, whether it holds, the accepted values


def check(node: object, conditions: Iterable[Condition] = (), prefix: str = "") -> None:
    """Check each setting of a dataclass of `schema` and of the dataclasses in it.

    Args:
        conditions: further conditions, which are checked last.

    Raises:
        ConfigError: a key is unknown, text is not printable, a value is outside its limit, or a
            condition does not hold.
    """
    known = {item.name: item for item in fields(node)}  # type: ignore[arg-type]
    for name, value in vars(node).items():
        key = f"{prefix}{name}"
        if name not in known:
            raise ConfigError(no_such_key(key, known))
        # Text becomes part of folder names, logs, tables and pages; a path cannot contain NUL.
        for text in listed(value):
            is_safe = not isinstance(text, str) or text.isprintable()
            require(key, text, is_safe, "printable characters")
        for limit in known[name].metadata.get("limits", ()):
            limit.check(key, value)
        if is_dataclass(value):
            check(value, prefix=f"{key}.")
    for condition in conditions:
        require(*condition)


def require(key: str, got: object, ok: bool, expected: str) -> None:
    """Raise `ConfigError` unless `ok`.

    Args:
        expected: the accepted values, as text.
    """
    if not ok:
        quoted = repr(got) if isinstance(got, str) else shown(got)
        raise ConfigError(f"{key}: got {quoted}, expected {expected}{mend_value(key, got)}")


def shown(value: object) -> str:
    """Return a value as a message shows it, with null, true and false as on the command line.

    >>> shown(None), shown(True), shown("static")
    ('null', 'true', 'static')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def check_threads(key: str, value: int | None) -> None:
    """Raise `ConfigError` for more threads than this machine has CPUs; ignore other settings."""
    most = os.cpu_count() or 1
    if key in ("threads", "latency.threads") and value is not None:
        require(key, value, value <= most, f"at most {most}: the CPUs of this machine")
