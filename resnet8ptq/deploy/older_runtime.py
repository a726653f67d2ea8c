"""Converts an ONNX file for an older ONNX Runtime, or to ONNX Runtime's own format.

The versions of the file format (IR) and of the operators (opset) are lowered to those that the
older ONNX Runtime reads. An operator whose definition has changed must mean the same in the older
definition; otherwise, the file is refused. `deploying` then runs the file in the older ONNX Runtime
and compares the outputs, unless `verify=false`.
"""

import re
from pathlib import Path

import onnx
from onnx import defs

from resnet8ptq.core import machine
from resnet8ptq.core.errors import ConfigError, UnsupportedError
from resnet8ptq.core.text import no_such_name
from resnet8ptq.deploy import runtime_faults
from resnet8ptq.graph import layers
from resnet8ptq.graph.links import find_all
from resnet8ptq.target.measure import CPU

# The first ONNX Runtime 1.x that reads the opset and the IR of a release of ONNX; versions up to
# the next entry read the same. 1.15 and 1.20 to 1.31 were tried with files of every opset and IR.
ONNX_SINCE = {
    **{10: "1.10.0", 11: "1.11.0", 12: "1.12.0", 14: "1.13.0", 15: "1.14.0", 17: "1.15.0"},
    **{18: "1.16.0", 21: "1.17.0", 23: "1.18.0", 24: "1.20.0", 25: "1.21.0"},
}
# Operators that changed their meaning, but not their attributes or inputs -> opset of the change.
_MEANS_OTHERWISE = {"AveragePool": (19,), "GridSample": (20,), "Resize": (18, 19)}
# Operators on blockwise weights, with their bits -> the first ONNX Runtime 1.x with a CPU kernel.
_BLOCKS_SINCE = {("MatMulNBits", 4): 17, ("MatMulNBits", 8): 22, ("GatherBlockQuantized", 4): 20}
NUMPY_2 = 19  # the first ONNX Runtime 1.x that runs with NumPy 2


def check_version(version: str) -> int:
    """Return the minor version, x of 1.x.

    Raises:
        ConfigError: the version is not one of those from 1.10 to the installed one.
    """
    match = re.fullmatch(r"1\.(\d+)", version)
    installed = int(machine.find_version("onnxruntime").split(".")[1])
    versions = range(min(ONNX_SINCE), installed + 1)
    if match is None or int(match[1]) not in versions:
        known = [f"1.{number}" for number in versions]
        raise ConfigError(no_such_name("target.onnxruntime", version, known, in_help=False))
    return int(match[1])


def find_formats(version: int) -> tuple[int, int]:
    """Return the newest opset and IR version that ONNX Runtime 1.`version` reads, by ONNX's table.

    >>> find_formats(13), find_formats(21), find_formats(24)
    ((17, 8), (22, 10), (25, 13))
    """
    since = max(first for first in ONNX_SINCE if first <= version)
    rows = {row[0]: row for row in onnx.helper.VERSION_TABLE}  # versions by ONNX release
    _, ir_version, opset, *_ = rows[ONNX_SINCE[since]]
    return opset, ir_version


def lower_file(source: Path, target: Path, version: int) -> list[str]:
    """Write an ONNX file for ONNX Runtime 1.`version`, see `lower`.

    Returns:
        The change, then the known faults of that version that concern the file.
    """
    proto = onnx.load(source)
    change = lower(proto, version)
    runtime_faults.write_zero_points(proto.graph)
    onnx.save(proto, target)
    return [change, *runtime_faults.find_known_faults(proto, version)]


def lower(proto: onnx.ModelProto, version: int) -> str:
    """Lower a model in place for ONNX Runtime 1.`version`; return the old and the new versions.

    Raises:
        UnsupportedError: the older version does not run an operator as the file means it, or ONNX
            refuses the lowered model; the message has the reason.
    """
    opset, ir_version = find_formats(version)
    before = f"opset {_opset(proto)}, IR {proto.ir_version}"
    known_error = _find_type_error(proto)
    _check_blocks(proto.graph, version)
    _drop_unused_opsets(proto)

    # Check that each operator means the same in the older opset
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > opset:
            for node in find_all(proto.graph, onnx.NodeProto):
                if node.domain in ("", "ai.onnx"):
                    _check_node(node, opset=entry.version, lower_opset=opset, version=version)
            entry.version = opset
    proto.ir_version = min(proto.ir_version, ir_version)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"target.onnxruntime=1.{version}: {reason}") from None

    # The checker ignores types, such as uint16, which QuantizeLinear takes from opset 21 on
    type_error = _find_type_error(proto)
    if type_error and not known_error:
        raise UnsupportedError(f"target.onnxruntime=1.{version}: {type_error}")
    return f"{before} -> opset {_opset(proto)}, IR {proto.ir_version}"


def _find_type_error(proto: onnx.ModelProto) -> str:
    """Return the first error of ONNX's inference of types and shapes; empty without one."""
    try:
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        return str(error).splitlines()[0]
    return ""


def _opset(proto: onnx.ModelProto) -> int:
    return next(e.version for e in proto.opset_import if e.domain in ("", "ai.onnx"))


def _check_node(node: onnx.NodeProto, opset: int, lower_opset: int, version: int) -> None:
    refused = f"target.onnxruntime=1.{version}: operator {node.op_type} ({node.name})"
    new = defs.get_schema(node.op_type, opset)
    try:
        old = defs.get_schema(node.op_type, lower_opset)
    except defs.SchemaError:
        raise UnsupportedError(
            f"{refused} is of opset {new.since_version}; that version reads up to {lower_opset}"
        ) from None
    if old.since_version == new.since_version:
        return
    for changed in _MEANS_OTHERWISE.get(node.op_type, ()):
        if lower_opset < changed <= opset:
            raise UnsupportedError(
                f"{refused} means something else before opset {new.since_version}"
            )

    # Attributes that the older definition lacks must have their default value
    added = [attribute for attribute in node.attribute if attribute.name not in old.attributes]
    unknown = [attribute.name for attribute in added if not _is_default(attribute, new)]
    part = ""
    if unknown:
        part = f"attribute {unknown[0]}"
    elif not old.min_input <= len(node.input) <= old.max_input:
        part = f"{len(node.input)} inputs"
    if part:
        raise UnsupportedError(f"{refused} has {part}, which opset {new.since_version} introduced")
    for attribute in added:
        node.attribute.remove(attribute)


def _drop_unused_opsets(proto: onnx.ModelProto) -> None:
    """Remove the opsets without an operator in the file, except that of ONNX itself.

    A file that ONNX Runtime writes lists all opsets that it knows. An older version refuses a newer
    opset, such as ai.onnx.ml 5, even if no operator uses it.
    """
    used = {node.domain for node in find_all(proto, onnx.NodeProto)} | {"", "ai.onnx"}
    for entry in list(proto.opset_import):
        if entry.domain not in used:
            proto.opset_import.remove(entry)


def _check_blocks(graph: onnx.GraphProto, version: int) -> None:
    """Raise `UnsupportedError` if the version has no kernel for weights in blocks."""
    for node in find_all(graph, onnx.NodeProto):
        bits = layers.attribute(node, "bits", 4)
        since = _BLOCKS_SINCE.get((node.op_type, bits), 0)
        if version < since:
            raise UnsupportedError(
                f"target.onnxruntime=1.{version}: operator {node.op_type} ({node.name}) runs "
                f"weights of {bits} bits from ONNX Runtime 1.{since} on"
            )


def _is_default(attribute: onnx.AttributeProto, schema: defs.OpSchema) -> bool:
    default = schema.attributes[attribute.name].default_value
    same = default.name and onnx.helper.get_attribute_value(default)
    return bool(default.name) and same == onnx.helper.get_attribute_value(attribute)


def requirements(version: int) -> list[str]:
    """Return the packages that run the model with ONNX Runtime 1.`version`."""
    numpy = "numpy>=2" if version >= NUMPY_2 else "numpy<2"
    return [f"onnxruntime~=1.{version}.0", numpy]


def to_ort(path: Path, target: Path) -> None:
    """Write an ONNX file in the ORT format, after the basic and extended graph optimizations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Avoid `all`, which would arrange the weights for this CPU.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(path), options, [CPU])
