"""Reads activation ranges from JSON files of runs, of other programs, or written by hand.

Formats: `calibration.json` of any run; ONNX Runtime's `TensorQuantOverrides` as JSON; AIMET's
encodings, versions 0.6, 1.0 and 2.0
(https://quic.github.io/aimet-pages/releases/latest/techniques/encoding_spec.html). Each gives a
range by tensor name. Encodings by channel, which are those of weights, are left out, because the
ranges of weights follow from their values.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.numbers import as_finite
from resnet8ptq.graph.links import input_names

log = logging.getLogger(__name__)

NAMED = 5  # tensors that a message lists
TAKES = (
    "a calibration.json, ONNX Runtime's tensor overrides {tensor: [{rmin, rmax}]}, or AIMET's "
    "encodings"
)
_BITS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16}
_WITHOUT_Q = {"quint8": "uint8", "qint8": "int8", "quint16": "uint16", "qint16": "int16"}


def read_ranges(parsed: object, path: Path) -> dict[str, Range]:
    """Return ranges by tensor name, without those of weights by channel.

    >>> read_ranges({"relu": [{"rmin": 0.0, "rmax": 6.0}]}, Path("overrides.json"))
    {'relu': (0.0, 6.0)}

    Args:
        parsed: the content of the JSON file, in any of the formats.
        path: path of the file, for errors.

    Raises:
        ConfigError: the format is unknown, no range is left, or a range is not valid.
    """
    if not isinstance(parsed, dict) or not parsed:
        raise ConfigError(f"calib.table: {path}: got other JSON, expected {TAKES}")

    # Refuse the whole file for one invalid range
    ranges = {}
    for name, entry in _entries(parsed):
        ends = _find_range(entry)
        if ends is None or None in map(as_finite, ends) or ends[0] > ends[1]:
            raise ConfigError(
                f"calib.table: {path}: {name!r}: no valid range; expected rmin <= rmax, or a scale "
                "with its offset"
            )
        ranges[name] = ends
    if not ranges:
        raise ConfigError(f"calib.table: {path} holds no tensors; expected {TAKES}")
    return ranges


def match_tensors(
    ranges: Mapping[str, Range], graph: onnx.GraphProto, path: str
) -> dict[str, Range]:
    """Return the ranges of the network's tensors; warn about their use and about unknown tensors.

    Raises:
        ConfigError: the network has none of the tensors.
    """
    # Match the names with the inputs and the outputs of nodes
    known = set(input_names(graph))
    for node in graph.node:
        known.update(node.output)
    matched = {}
    unmatched = []
    for name, ends in ranges.items():
        if name in known:
            matched[name] = ends
        else:
            unmatched.append(name)

    # Report both kinds
    listed = ", ".join(unmatched[:NAMED])
    if len(unmatched) > NAMED:
        listed += ", ..."
    if not matched:
        raise ConfigError(
            f"calib.table: got {listed}, expected tensors of the network, such as "
            f"{graph.node[0].output[0]}"
        )
    log.warning(
        "calib.trust=true: %d tensors take their ranges from %s, without a check of its network "
        "and samples; all other tensors are calibrated",
        len(matched),
        path,
    )
    if unmatched:
        log.warning("calib.table: the network lacks %d tensors: %s", len(unmatched), listed)
    return matched


def _entries(parsed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the entry of each tensor.

    Entries by channel are left out, and so are values of ONNX Runtime's format that are no lists.
    """
    if isinstance(parsed.get("data"), dict):  # calibration.json
        yield from parsed["data"].items()
        return
    encodings = parsed.get("activation_encodings", parsed.get("encodings"))
    if isinstance(encodings, list):  # AIMET 1.0 and 2.0
        for entry in encodings:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                yield "(no name)", None
            elif not _is_by_channel(entry):
                yield entry["name"], entry
        return
    if isinstance(encodings, dict):  # AIMET 0.6
        named = encodings
    else:  # the format of ONNX Runtime
        named = {name: entry for name, entry in parsed.items() if isinstance(entry, list)}
    for name, entry in named.items():
        if not _is_by_channel(entry):
            yield name, entry


def _is_by_channel(entry: Any) -> bool:
    """Return whether an entry is that of weights by channel.

    Such an entry has an axis or several scales, or is a list of several dicts.
    """
    if isinstance(entry, list) and len(entry) > 1:
        return all(isinstance(channel, dict) for channel in entry)
    if isinstance(entry, list) and entry:
        [entry] = entry
    if not isinstance(entry, dict):
        return False
    scales = entry.get("y_scale", entry.get("scale"))
    return "axis" in entry or (isinstance(scales, list) and len(scales) > 1)


def _find_range(entry: Any) -> Range | None:
    """Return the range of an entry, from its ends, or else by `_from_levels`.

    None if the entry has neither ends nor a scale, or if a value is not valid.
    """
    if isinstance(entry, list) and len(entry) == 1:
        entry = entry[0]
    if not isinstance(entry, dict):
        return None

    # The names of the ends differ by format
    for low, high in (("lowest", "highest"), ("rmin", "rmax"), ("min", "max")):
        if low not in entry or high not in entry:
            continue
        least = as_finite(entry[low])
        most = as_finite(entry[high])
        if least is None or most is None:
            return None
        return least, most
    return _from_levels(entry)


def _from_levels(entry: Mapping[str, Any]) -> Range | None:
    """Return the range of an entry that has a scale, and perhaps an offset or zero point.

    None if the scale is missing, a number is not valid, or the number of levels is unknown. A
    missing zero point is 0. Without a bit width or dtype, values are unsigned, with 8 bits.

    AIMET 0.6 and 1.0: low = scale * offset, with unsigned levels. AIMET 2.0 and ONNX:
    low = scale * (least level - zero_point).
    """
    scale = as_finite(entry.get("scale", entry.get("y_scale")))
    if scale is None or scale <= 0:
        return None
    if "offset" in entry:
        offset = as_finite(entry["offset"])
        bits = entry.get("bw", entry.get("bitwidth", 8))
        if offset is None or bits not in (4, 8, 16):
            return None
        return scale * offset, scale * (offset + 2**bits - 1)

    # AIMET 2.0 and ONNX
    dtype = str(entry.get("output_dtype", entry.get("quant_type", "uint8"))).lower()
    dtype = _WITHOUT_Q.get(dtype, dtype)
    zero_point = as_finite(entry.get("zero_point", entry.get("y_zero_point", 0)))
    if dtype not in _BITS or zero_point is None:
        return None
    count = 2 ** _BITS[dtype]
    least = 0 if dtype.startswith("u") else -count // 2
    return scale * (least - zero_point), scale * (least + count - 1 - zero_point)
