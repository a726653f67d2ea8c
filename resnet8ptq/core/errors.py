"""Every error that this package raises on purpose.

PtqError                  one clear line for the user; the program exits with 1
├── ConfigError           a setting is wrong: names the key, what it got, what it takes (exit 2)
│   └── SizesDifferError  pictures have several sizes, and none is set
├── DataError             a data file is missing, damaged or does not fit (exit 2)
│   └── DataNotFoundError neither on disk nor to be downloaded
├── JobError              a job of a sweep could not be started, or its process died
├── ModelError            the FP32 model is missing, damaged, or does not fit the data (exit 2)
│   └── ParityError       a converted model disagrees with the original
├── QuantizationError     the framework failed, or quantized nothing
├── TrackingError         the MLflow store cannot be reached or written
└── UnsupportedError      the framework cannot do this combination: a result, not a failure
"""

from collections.abc import Iterator
from contextlib import contextmanager

from resnet8ptq.core.text import one_line, printable


class PtqError(Exception):
    """Base of all errors below (exit code 1); `str()` of it is one line, fit for a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(PtqError):
    """A setting is wrong: names the key, what it got and what it takes (exit code 2)."""


class SizesDifferError(ConfigError):
    """Pictures have several sizes, and `preprocess.size` sets none."""


class DataError(PtqError):
    """A data file is missing, damaged or does not fit; names the file."""


class DataNotFoundError(DataError):
    """The data set is neither on disk nor to be downloaded."""


class JobError(PtqError):
    """A job of a sweep could not be started, or its process died; names the job or the key."""


class ModelError(PtqError):
    """The FP32 model is missing, damaged, or does not fit the data."""


class ParityError(ModelError):
    """A converted model disagrees with the original; says by how much."""


class QuantizationError(PtqError):
    """The framework failed to quantize, or quantized nothing."""


class TrackingError(PtqError):
    """The MLflow store cannot be reached or written."""


class UnsupportedError(PtqError):
    """The framework cannot do this combination: a result, and the message is its reason."""


@contextmanager
def errors_as(kind: type[PtqError], text: str) -> Iterator[None]:
    """Raise a library's error as `kind`, with the message `text (error)`; a `PtqError` passes.

    Libraries raise dozens of their own classes, and not all can be pickled.
    """
    try:
        yield
    except PtqError:
        raise
    except Exception as error:
        raise kind(f"{text} ({one_line(error)})") from None
