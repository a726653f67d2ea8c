"""Converts networks in this process, and lets torch check them."""

import json
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.models import conversion


def convert(
    source: Path,
    folder: Path,
    samples: NDArray[Any],
    **settings: Any,
) -> conversion.Conversion:
    """Write a conversion into `folder`, with torch's check of each file; return the record."""
    folder.mkdir(exist_ok=True)
    conversion.convert(source, folder, samples, ModelConfig(**settings))
    record = json.loads((folder / conversion.RECORD).read_text())
    for path in folder.glob("*.onnx"):
        checked = json.loads(conversion.check_torch(path, samples, final=record["final"]))
        for key, values in checked.items():
            record[key].update(values)
    (folder / conversion.RECORD).write_text(json.dumps(record))
    return conversion.read_record(folder)


def attempt(source: Path, samples: NDArray[Any]) -> list[str]:
    """Convert into a folder beside `source`; return an error's class and message, or empty ones."""
    try:
        convert(source, source.with_name(f"{source.name}.converted"), samples)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


def record_of(folder: Path, name: str) -> conversion.Conversion:
    """Return the record of what `attempt` converted."""
    return conversion.read_record(folder / f"{name}.converted")
