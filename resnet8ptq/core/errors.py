"""Errors whose message is written for the user, in one line.

A `ConfigError`, `DataError` or `ModelError` means that an input is wrong; `core.command` has the
exit codes.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from resnet8ptq.core.alarm import AlarmError
from resnet8ptq.core.text import one_line, printable


class PtqError(Exception):
    """Base class; `str()` of an error is one line without control characters."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(PtqError):
    """A setting is wrong, or a file or folder that it names."""


class DataError(PtqError):
    """A data set is missing, damaged or unsuitable."""


class DataNotFoundError(DataError):
    """CIFAR-10 is not on disk and cannot be downloaded."""


class JobError(PtqError):
    """Jobs of a sweep could not be started, or a job's process returned no result."""


class ModelError(PtqError):
    """A network is missing, damaged or unsuitable, or does not fit the data or the task."""


class ParityError(ModelError):
    """The outputs of a converted model differ from those of the original."""


class QuantizationError(PtqError):
    """Quantization failed or would quantize nothing, or an artifact does not pass a check."""


class TrackingError(PtqError):
    """The MLflow store, a run or a sweep cannot be read, recorded or used, or drawing failed."""


class UnsupportedError(PtqError):
    """The settings cannot be run here, mostly because the framework does not support them.

    A run records the reason as its result.
    """


@contextmanager
def errors_as(kind: type[PtqError], text: str, mend: str = "") -> Iterator[None]:
    """Raise a library's error as `kind`: `text (error); mend`.

    Libraries raise dozens of error classes, and not all can be pickled. Wrap each call that reads a
    user's file or runs a user's code, so that the message names the file and the mend. A `PtqError`
    and an `AlarmError` pass unchanged.

    >>> with errors_as(DataError, "a.npz: cannot be read", "expected arrays"):
    ...     raise KeyError("x")
    Traceback (most recent call last):
        ...
    resnet8ptq.core.errors.DataError: a.npz: cannot be read (KeyError: 'x'); expected arrays
    """
    try:
        yield
    except (PtqError, AlarmError):
        raise
    except Exception as error:
        raise kind("; ".join(filter(None, (f"{text} ({one_line(error)})", mend)))) from None


def portable(error: Exception, other: type[Exception] = RuntimeError) -> Exception:
    """Return the error; if it cannot be pickled, an error of the type `other` with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # raised by pickle, or by the error's constructor
        return other(one_line(error))
    return error
