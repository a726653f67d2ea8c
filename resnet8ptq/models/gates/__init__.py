"""Checks of untrusted files by format, before a framework reads them."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from resnet8ptq.core.errors import ModelError, errors_as

# The end of the message about a file that is already quantized.
EXPECTS_FP32 = "expected the FP32 model; to score this file beside it: resnet8ptq judge FP32 FILE"


def check(source: Path, name: str, inputs: Any) -> None:
    """Call a format's check, see `sources.formats`; a library's error becomes a `ModelError`.

    It is defined here so that the process that checks a file imports few modules besides that of
    the check.

    Args:
        name: the check, as `module:name`.
        inputs: the setting `model.inputs`, set only for a format whose check takes it.
    """
    values = [inputs] if inputs else []
    with errors_as(ModelError, f"{source}: cannot be read"):
        resolve_name(name)(source, *values)
