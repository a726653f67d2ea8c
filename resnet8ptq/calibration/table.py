"""Writes the activation ranges of a run to files, and reads them for another (`calib.table`).

| file | content |
|---|---|
| `calibration.json` | both ends of each tensor's range, float32; `calib.table` reads this |
| `calibration.flatbuffers` | one number per tensor, for TensorRT's execution provider |
| `calibration.cache` | the same as text |
| `calibration.provenance.json` | network, method and samples of the ranges, and the files' hashes |

ONNX Runtime's functions write the first three. Ranges belong to a network, a method and calibration
samples; without `calib.trust`, a table is refused if one of the three differs.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.quant_utils import write_calibration_table

from resnet8ptq.calibration import foreign_table
from resnet8ptq.calibration.methods import describe_method
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.schema import CalibConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.dataset import Split

TABLE_FILE = "calibration.json"
PROVENANCE_FILE = "calibration.provenance.json"
MAX_BYTES = 2**26
FILES = (TABLE_FILE, "calibration.flatbuffers", "calibration.cache")

Provenance = Mapping[str, str | Mapping[str, str | int | float]]


def provenance(calib: CalibConfig, fp32_onnx_path: Path, calibration: Split) -> Provenance:
    """Return the provenance of this run's ranges: model, method with parameters, and samples."""
    return {
        "model": files.sha256(fp32_onnx_path),
        "method": describe_method(calib),
        "images": calibration.digest,
    }


def write_tables(folder: Path, ranges: Mapping[str, Range], provenance: Provenance) -> None:
    """Write `ranges` into `folder` in ONNX Runtime's formats, with their provenance.

    Each file is written atomically. The hashes are written last, so that `load_ranges` detects a
    `calibration.json` of another writer.
    """
    with tempfile.TemporaryDirectory(prefix=".calibration-", dir=folder) as name:
        temporary = Path(name)
        root = logging.getLogger()
        root.addFilter(_is_other)  # ONNX Runtime logs the whole table there
        try:
            write_calibration_table(as_tensors_data(ranges), name)
        finally:
            root.removeFilter(_is_other)

        # Move the complete files
        hashes = {file: files.sha256(temporary / file) for file in FILES}
        for file in FILES:
            (temporary / file).replace(folder / file)
    record = json.dumps({**provenance, "sha256": hashes}, indent=2)
    files.write_text(folder / PROVENANCE_FILE, record)


def as_tensors_data(ranges: Mapping[str, Range]) -> TensorsData:
    """Return ranges as ONNX Runtime's calibration type, in float32."""
    tensors = {}
    for name, (low, high) in ranges.items():
        lowest = np.array(low, np.float32)
        highest = np.array(high, np.float32)
        tensors[name] = TensorData(lowest=lowest, highest=highest)
    return TensorsData(CalibrationMethod.MinMax, tensors)


def load_ranges(path: str | Path, provenance: Provenance | None) -> dict[str, Range]:
    """Return the ranges in a table, by ONNX tensor name.

    Args:
        path: the table, or the folder of a `calibration.json`.
        provenance: the provenance of this run's ranges, see `provenance`; None accepts a table of
            any origin, in the formats of `foreign_table`.

    Raises:
        ConfigError: the table cannot be read, is not JSON, or `foreign_table.read_ranges` refuses
            it. With `provenance`, also: its provenance file is missing or damaged, or the table was
            edited or belongs to another model, method or samples.
    """
    table = files.expand(path)
    if table.suffix in (".flatbuffers", ".cache") and not table.is_dir():
        raise ConfigError(
            f"calib.table: got {path}, which holds one number per tensor; expected the "
            f"{TABLE_FILE} beside it, which has both ends"
        )
    if table.is_dir():
        table = table / TABLE_FILE
    content = _read(table, f"a {TABLE_FILE} of an earlier run, or its folder")
    if provenance is None:
        return foreign_table.read_ranges(_decode(content, table), table)

    # Without calib.trust, the table must be unchanged and have the same provenance
    beside = table.with_name(PROVENANCE_FILE)
    takes = f"a table with the {PROVENANCE_FILE} of its run; calib.trust=true takes any ranges"
    made_from = _decode(_read(beside, takes), beside)
    if not isinstance(made_from, dict):
        raise ConfigError(f"calib.table: {beside} is damaged: got other JSON, expected an object")
    hashes = made_from.get("sha256")
    expected = hashes.get(TABLE_FILE) if isinstance(hashes, dict) else None
    if hashlib.sha256(content).hexdigest() != expected:
        raise ConfigError(f"calib.table: {table} was edited or damaged: not what its run wrote")
    theirs = []
    ours = []
    for key, value in provenance.items():
        if made_from.get(key) != value:
            theirs.append(_describe(key, made_from.get(key)))
            ours.append(_describe(key, value))
    if theirs:
        raise ConfigError(
            f"calib.table: made from {', '.join(theirs)}; this run has {', '.join(ours)}; "
            "calib.trust=true takes it"
        )
    return foreign_table.read_ranges(_decode(content, table), table)


def _is_other(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("calibration cache: ")


def _describe(key: str, value: object) -> str:
    """Return an entry of a provenance as text, such as `model 0123456789ab`.

    A method has its parameters, as in `method percentile (num_bins=2048, percentile=99.9)`.
    """
    if isinstance(value, str):
        return f"{key} {value[:12]}"
    if not isinstance(value, dict):
        return f"{key} unknown"
    described = f"{key} {value.get('name', '?')}"
    parameters = sorted(value.keys() - {"name"})
    if parameters:
        described += f" ({', '.join(f'{name}={value[name]}' for name in parameters)})"
    return described


def _read(path: Path, takes: str) -> bytes:
    try:
        return files.read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:  # ValueError if the text is not a path
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"calib.table: cannot read {path} ({reason}); expected {takes}"
        ) from error


def _decode(content: bytes, path: Path) -> object:
    try:
        return json.loads(content, object_pairs_hook=_unique)
    # The file is not UTF-8 or JSON, or nests too deeply
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"calib.table: {path} is damaged: not JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return unique
