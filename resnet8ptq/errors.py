"""Every error that this package raises on purpose.

PtqError                  one clear line for the user; the program exits with 1
├── ConfigError           a setting is wrong: names the key, what it got, what it takes (exit 2)
├── DataError             a data file is missing, damaged or does not fit
│   └── DataNotFoundError neither on disk nor to be downloaded
├── ModelError            the FP32 model is missing, damaged, or does not fit the data
│   └── ParityError       a converted model disagrees with the original
├── QuantizationError     the framework failed, or quantized nothing
├── TrackingError         the MLflow store cannot be reached or written
└── UnsupportedError      the framework cannot do this combination: a result, not a failure
"""

import re


def redact(text: str) -> str:
    """Return a message without the user names and passwords of the URLs in it."""
    return re.sub(r"(?<=://)[^/\s@]+@", "", text)


def printable(text: str) -> str:
    """Return a text in one line, without what would steer a terminal: it may quote a file."""
    folded = " ".join(text.split())
    return "".join(char if char.isprintable() else "?" for char in folded)


def one_line(error: Exception) -> str:
    """Return an error's text, folded into one line and cut; it may quote what a file says."""
    return printable(redact(f"{type(error).__name__}: {error}"))[:300]


class PtqError(Exception):
    """Base of all errors below; `str()` of it is one line, fit for a terminal."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(PtqError):
    """A setting is wrong: names the key, what it got and what it takes."""


class DataError(PtqError):
    """A data file is missing, damaged or does not fit; names the file."""


class DataNotFoundError(DataError):
    """The data set is neither on disk nor to be downloaded."""


class ModelError(PtqError):
    """The FP32 model is missing, damaged, or does not fit the data."""


class ParityError(ModelError):
    """A converted model disagrees with the original; says by how much."""


class QuantizationError(PtqError):
    """The framework failed to quantize, or quantized nothing."""


class TrackingError(PtqError):
    """The MLflow store cannot be reached or written."""


class UnsupportedError(PtqError):
    """The framework cannot do this combination; the message is the reason."""
