"""An ONNX file for an older ONNX Runtime, or in ONNX Runtime's own format.

The version of the file format (IR) and of the operators (opset) are lowered to what the older
version reads. An operator whose definition differs in between is taken over where the older
definition has its attributes and inputs; whether it computes the same there is checked by running
it there.
"""

import re
from pathlib import Path

import onnx
from onnx import defs

from resnet8ptq.core.errors import ConfigError, UnsupportedError

# ONNX Runtime 1.x -> (opset, IR) that it reads: its table of compatibility with ONNX.
READS = {
    **{10: (15, 8), 11: (16, 8), 12: (17, 8), 13: (17, 8), 14: (18, 8), 15: (19, 8)},
    **{16: (19, 9), 17: (20, 9), 18: (21, 10), 19: (21, 10), 20: (21, 10), 21: (22, 10)},
}
# Changed their meaning without changing their attributes or inputs: opset from which they differ.
_MEANS_OTHERWISE = {"AveragePool": (19,), "GridSample": (20,), "Resize": (18, 19)}
NUMPY_2 = 19  # the first ONNX Runtime 1.x that runs with NumPy 2


def check_version(version: str) -> int:
    """Return the x of ONNX Runtime 1.x.

    Raises:
        ConfigError: no such version is known.
    """
    found = re.fullmatch(r"1\.(\d+)", version)
    if found is None or int(found[1]) not in READS:
        known = " | ".join(f"1.{number}" for number in READS)
        raise ConfigError(f"target.onnxruntime: got {version!r}, takes {known}")
    return int(found[1])


def lower(proto: onnx.ModelProto, version: int) -> str:
    """Lower a model in place for ONNX Runtime 1.`version`; say from what to what.

    Raises:
        UnsupportedError: an operator is not to be had there; names it.
    """
    opset, ir_version = READS[version]
    before = f"opset {_opset(proto)}, IR {proto.ir_version}"
    for entry in proto.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > opset:
            for node in proto.graph.node:
                if node.domain in ("", "ai.onnx"):
                    _check_node(node, entry.version, opset, version)
            entry.version = opset
    proto.ir_version = min(proto.ir_version, ir_version)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedError(f"target.onnxruntime=1.{version}: {reason}") from None
    return f"{before} -> opset {_opset(proto)}, IR {proto.ir_version}"


def _opset(proto: onnx.ModelProto) -> int:
    return next(each.version for each in proto.opset_import if each.domain in ("", "ai.onnx"))


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
    if any(lower_opset < changed <= opset for changed in _MEANS_OTHERWISE.get(node.op_type, ())):
        raise UnsupportedError(f"{refused} means something else before opset {new.since_version}")
    unknown = [
        each.name
        for each in node.attribute
        if each.name not in old.attributes and not _is_default(each, new)
    ]
    if unknown or not old.min_input <= len(node.input) <= old.max_input:
        what = f"attribute {unknown[0]}" if unknown else f"{len(node.input)} inputs"
        raise UnsupportedError(
            f"{refused} has {what}, which it has not before opset {new.since_version}"
        )
    for each in list(node.attribute):
        if each.name not in old.attributes:
            node.attribute.remove(each)


def _is_default(attribute: onnx.AttributeProto, schema: defs.OpSchema) -> bool:
    default = schema.attributes[attribute.name].default_value
    same = default.name and onnx.helper.get_attribute_value(default)
    return bool(default.name) and same == onnx.helper.get_attribute_value(attribute)


def requirements(version: int) -> list[str]:
    """Return what runs the model with ONNX Runtime 1.`version`."""
    return [f"onnxruntime~=1.{version}.0", "numpy>=2" if version >= NUMPY_2 else "numpy<2"]


def to_ort(path: Path, target: Path) -> None:
    """Write an ONNX file in the ORT format, with what ONNX Runtime does to it on every CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # `all` would lay weights out as this CPU alone wants them.
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
