"""Runs files of networks on this machine, for resnet8ptq on another one.

It is sent to a Python interpreter there, and needs Python 3.9, numpy and the runtime of the file;
nothing of resnet8ptq. It reads requests from standard input, and writes answers to standard output.
Each is a line of JSON with the number of bytes that follow it: a file, or arrays in C order.

Carried there by hand, with the requests in a file beside it: `python measure.py > result`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class OnnxFile:
    """A file in ONNX Runtime."""

    def __init__(self, content: bytes, threads: int) -> None:
        """Load the content of a file."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
        self.names = [value.name for value in self.session.get_inputs()]

    def run(self, arrays: list[Any]) -> list[Any]:
        """Return the outputs for the inputs, in the file's order."""
        outputs: list[Any] = self.session.run(None, dict(zip(self.names, arrays)))
        return outputs


class TfliteFile:
    """A file in LiteRT; values of an integer input are rounded to its levels."""

    def __init__(self, content: bytes, threads: int) -> None:
        """Load the content of a file."""
        self.interpreter = _tflite()(model_content=content, num_threads=threads)
        self.interpreter.allocate_tensors()
        self.names = [detail["name"] for detail in self.interpreter.get_input_details()]

    def run(self, arrays: list[Any]) -> list[Any]:
        """Return the outputs as floats; a network of one sample runs sample by sample."""
        details = self.interpreter.get_input_details()
        fixed = details[0]["shape_signature"][0] == 1
        if len(arrays[0]) > 1 and fixed:
            parts = [
                self.run([array[n : n + 1] for array in arrays]) for n in range(len(arrays[0]))
            ]
            return [np.concatenate(values) for values in zip(*parts)]
        if any(tuple(d["shape"]) != a.shape for d, a in zip(details, arrays)):
            for detail, array in zip(details, arrays):
                self.interpreter.resize_tensor_input(detail["index"], array.shape)
            self.interpreter.allocate_tensors()
            details = self.interpreter.get_input_details()
        for detail, array in zip(details, arrays):
            self.interpreter.set_tensor(detail["index"], _to_levels(array, detail))
        self.interpreter.invoke()
        return [self._read(detail) for detail in self.interpreter.get_output_details()]

    def _read(self, detail: dict[str, Any]) -> Any:
        values = self.interpreter.get_tensor(detail["index"])
        scale, zero_point = detail["quantization"]
        if scale and values.dtype.kind in "iu":
            values = (values.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        return values


class OpenVinoFile:
    """An ONNX file in OpenVINO."""

    def __init__(self, content: bytes, threads: int) -> None:
        """Load the content of a file."""
        import openvino

        core = openvino.Core()
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        settings["NUM_STREAMS"] = 1
        graph = core.read_model(io.BytesIO(content))
        self.request = core.compile_model(graph, "CPU", settings).create_infer_request()
        self.names = [value.get_any_name() for value in graph.inputs]
        self.count = len(graph.outputs)

    def run(self, arrays: list[Any]) -> list[Any]:
        """Return the outputs for the inputs, in the file's order."""
        self.request.infer(dict(zip(self.names, arrays)))
        return [self.request.get_output_tensor(number).data.copy() for number in range(self.count)]


RUNTIMES: dict[str, Any] = {
    "onnxruntime": OnnxFile,
    "ai-edge-litert": TfliteFile,
    "openvino": OpenVinoFile,
}
JOB = "measure.job"  # the requests, if they are carried by hand
_PACKAGES = ("numpy", "onnxruntime", "ai-edge-litert", "tflite-runtime", "tensorflow", "openvino")


def _tflite() -> Any:
    """Return the interpreter of the first installed package that has one."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        try:
            from tflite_runtime.interpreter import Interpreter
        except ImportError:
            raise ImportError("No module named 'ai_edge_litert'", name="ai_edge_litert") from None
    return Interpreter


def _to_levels(values: Any, detail: dict[str, Any]) -> Any:
    if detail["dtype"] not in (np.int8, np.int16) or values.dtype == detail["dtype"]:
        return values
    ends = np.iinfo(detail["dtype"])
    scale, zero_point = detail["quantization"]
    levels = np.rint(values / np.float32(scale)) + np.float32(zero_point)
    return np.clip(levels, ends.min, ends.max).astype(detail["dtype"])


def describe() -> dict[str, Any]:
    """Return what is here: machine, CPU, cores, and the versions of the runtimes."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
            name = (names or [name])[0]
    except OSError:
        pass
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": name,
        "cores": os.cpu_count() or 1,
        "versions": versions,
    }


def answer(
    request: dict[str, Any], payload: bytes, loaded: dict[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Return the answer to a request, and its arrays."""
    if request["do"] == "describe":
        return describe(), []
    if request["do"] == "load":
        network = RUNTIMES[request["runtime"]](payload, request["threads"])
        loaded[request["key"]] = network
        return {"names": network.names}, []
    network = loaded[request["key"]]
    arrays = list[Any]()
    start = 0
    for dtype, shape in request["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(payload[start : start + size], dtype).reshape(shape))
        start += size
    begin = time.perf_counter()
    outputs = network.run(arrays)
    seconds = {"seconds": time.perf_counter() - begin}
    if request["do"] == "time":
        return seconds, []
    return seconds, [np.ascontiguousarray(output) for output in outputs]


def main() -> None:
    """Answer requests until standard input ends, or the file of requests."""
    source = sys.stdin.buffer
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    own = globals().get("__file__")  # unknown if the program was sent
    job = Path(own).with_name(JOB) if own else None
    carried = job is not None and job.exists()
    if job is not None and carried:
        source = job.open("rb")
    loaded: dict[str, Any] = {}
    while line := source.readline():
        request = json.loads(line)
        payload = source.read(request["bytes"])
        if "at" in request:  # an earlier payload of the file
            after = source.tell()
            source.seek(request["at"])
            payload = source.read(request["size"])
            source.seek(after)
        try:
            reply, arrays = answer(request, payload, loaded)
        except Exception as error:
            missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
            reply = {"error": f"{type(error).__name__}: {error}", "missing": missing}
            arrays = []
        if carried:
            reply["request"] = {**request, "sha256": hashlib.sha256(payload).hexdigest()}
        reply["arrays"] = [[array.dtype.str, array.shape] for array in arrays]
        reply["bytes"] = sum(array.nbytes for array in arrays)
        target.write(json.dumps(reply).encode() + b"\n")
        for array in arrays:
            target.write(array.tobytes())
        target.flush()


if __name__ == "__main__":
    main()
