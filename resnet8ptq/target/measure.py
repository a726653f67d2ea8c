"""Runs files of networks on this machine, for resnet8ptq on another machine.

resnet8ptq sends this program to a Python interpreter here. The program needs Python 3.9 or newer,
numpy and the runtime of the file, but nothing of resnet8ptq. It reads requests from standard input,
and writes answers to standard output. Each request or answer is a line of JSON with the number of
bytes that follow the line: a file, or arrays in C order.

Copied here by hand, next to a file of requests, the program reads that file instead; it then runs
as `python measure.py > result`. Backends of resnet8ptq also import its classes and checks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

CPU = "CPUExecutionProvider"
F32 = "f32"
# OpenVINO's float types, and their names among the capabilities of a CPU.
PRECISIONS = {F32: "FP32", "bf16": "BF16", "f16": "FP16"}
PROVIDER_PACKAGES = {
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
    "NvTensorRTRTXExecutionProvider": "onnxruntime-trt-rtx",
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
    "QNNExecutionProvider": "onnxruntime-qnn",
    "DmlExecutionProvider": "onnxruntime-directml",
    "MIGraphXExecutionProvider": "onnxruntime-migraphx",
    "ROCMExecutionProvider": "onnxruntime-rocm",
    "CANNExecutionProvider": "onnxruntime-cann",
    "WebGpuExecutionProvider": "onnxruntime-webgpu",
}


class RefusalError(Exception):
    """A provider or a float type is missing here, or a provider does not start."""


def check_provider(provider: str) -> None:
    """Raise `RefusalError` if ONNX Runtime here lacks this execution provider."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if provider not in available:
        has = ", ".join(available)
        message = f"{provider} is not in onnxruntime {onnxruntime.__version__}, which has {has}"
        if provider in PROVIDER_PACKAGES:
            message += f"; try: pip install {PROVIDER_PACKAGES[provider]}"
        raise RefusalError(message)


def check_precision(core: Any, precision: str) -> None:
    """Raise `RefusalError` if OpenVINO does not list a float type for this CPU.

    OpenVINO would emulate a type that it does not list, or compute in another, without a message.
    """
    if precision == F32:
        return
    listed = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if PRECISIONS[precision] not in listed:
        known = []
        for name, capability in PRECISIONS.items():
            if capability in listed:
                known.append(name)
        has = " | ".join(known)
        raise RefusalError(f"{precision} is no type of this CPU in OpenVINO, expected {has}")


class OnnxFile:
    """A file in ONNX Runtime, on one execution provider.

    If the provider does not start, ONNX Runtime would run the file on the CPU; this class raises an
    error.
    """

    def __init__(
        self,
        content: bytes | str,
        threads: int,
        provider: str = CPU,
        without: Sequence[str] = (),
    ) -> None:
        """Load a file from its content or its path.

        Args:
            without: names of ONNX Runtime's optimizers to leave out.

        Raises:
            RefusalError: the provider is missing, or does not start.
        """
        check_provider(provider)
        self._content = content
        self._threads = threads
        self._provider = provider
        self._without = list(without)
        self.session = self._open()
        self.names = [value.name for value in self.session.get_inputs()]

    def run(self, arrays: list[Any]) -> list[Any]:
        """Return the outputs for the inputs, in the file's order."""
        outputs: list[Any] = self.session.run(None, dict(zip(self.names, arrays)))
        return outputs

    def find_nodes(self, arrays: list[Any]) -> dict[str, dict[str, int]]:
        """Return the number of nodes by provider and operator, from the profile of one run."""
        with tempfile.TemporaryDirectory() as folder:
            session = self._open(str(Path(folder, "trace")))
            session.run(None, dict(zip(self.names, arrays)))
            events = json.loads(Path(session.end_profiling()).read_text())

        # Each node that ran has one event of its kernel
        nodes: dict[str, dict[str, int]] = {}
        for event in events:
            if event["name"].endswith("_kernel_time"):
                operators = nodes.setdefault(event["args"]["provider"], {})
                name = event["args"]["op_name"]
                operators[name] = operators.get(name, 0) + 1
        return nodes

    def _open(self, trace: str = "") -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # fatal errors only
        options.enable_profiling = bool(trace)
        if trace:
            options.profile_file_prefix = trace

        # ONNX Runtime says only on stderr why a provider does not start
        with _messages_kept() as messages:
            session = onnxruntime.InferenceSession(
                self._content,
                options,
                providers=[self._provider],
                disabled_optimizers=self._without,
                enable_fallback=0,
            )
        if self._provider not in session.get_providers():
            reason = _find_reason(messages) or "ONNX Runtime gives no reason"
            raise RefusalError(f"{self._provider} does not start: {reason}")
        return session


@contextmanager
def _messages_kept() -> Iterator[list[str]]:
    """Collect the lines that libraries write to standard error; pass them on afterwards."""
    # C++ code writes to the file descriptor, past Python's `sys.stderr`
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            content = file.read()
            lines += content.decode(errors="replace").splitlines()
            os.write(2, content)


def _find_reason(lines: Sequence[str]) -> str:
    """Return the text of the first error in ONNX Runtime's messages, or else of the first line.

    The text is empty without messages, and is cut at 400 characters.
    """
    colors = re.compile(r"\x1b\[[\d;]*m")
    texts = []
    for line in lines:
        if line.strip():
            texts.append(colors.sub("", line).strip())
    first = texts[0] if texts else ""
    for text in texts:
        if re.search(r"\[[EF]:onnxruntime", text):
            first = text
            break
    return re.sub(r"^\S+ \S+ \[[EWF]:onnxruntime[^]]*\] ", "", first)[:400]


class TfliteFile:
    """A file in LiteRT; values of other dtypes for int8 and int16 inputs are quantized."""

    def __init__(self, content: bytes, threads: int) -> None:
        """Load the content of a file."""
        self.interpreter = _tflite()(model_content=content, num_threads=threads)
        self.interpreter.allocate_tensors()
        self.names = [detail["name"] for detail in self.interpreter.get_input_details()]

    def run(self, arrays: list[Any]) -> list[Any]:
        """Return the outputs, as floats if they have a scale.

        A network of the fixed batch size 1 runs sample by sample.
        """
        details = self.interpreter.get_input_details()
        fixed = details[0]["shape_signature"][0] == 1
        if len(arrays[0]) > 1 and fixed:
            parts = []
            for n in range(len(arrays[0])):
                parts.append(self.run([array[n : n + 1] for array in arrays]))
            return [np.concatenate(values) for values in zip(*parts)]

        # Resize the inputs only if the shapes change, because it takes long
        shapes = [tuple(detail["shape"]) for detail in details]
        if shapes != [array.shape for array in arrays]:
            for detail, array in zip(details, arrays):
                self.interpreter.resize_tensor_input(detail["index"], array.shape)
            self.interpreter.allocate_tensors()
            details = self.interpreter.get_input_details()
        for detail, array in zip(details, arrays):
            self.interpreter.set_tensor(detail["index"], _to_levels(array, detail))
        self.interpreter.reset_all_variables()  # recurrent operators keep their state
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

    def __init__(self, content: bytes, threads: int, precision: str = F32) -> None:
        """Load the content of a file.

        Raises:
            RefusalError: OpenVINO does not list the float type `precision` for this CPU.
        """
        import openvino

        core = openvino.Core()
        check_precision(core, precision)
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
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
JOB = "measure.job"  # the file of requests that are carried by hand
_PACKAGES = ("numpy", "onnxruntime", "ai-edge-litert", "tflite-runtime", "tensorflow", "openvino")


def _tflite() -> Any:
    """Return the class of LiteRT's interpreter, from `ai_edge_litert` or `tflite_runtime`.

    Raises:
        ImportError: neither is installed; the error names the first.
    """
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
    """Return this machine: type, system, Python, CPU, cores, and versions of numpy and runtimes."""
    # Every package with a provider is a build of ONNX Runtime
    versions: dict[str, str] = {}
    for package in (*_PACKAGES, *PROVIDER_PACKAGES.values()):
        name = "onnxruntime" if package in PROVIDER_PACKAGES.values() else package
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.setdefault(name, importlib.metadata.version(package))

    # Read the model of the CPU, which `platform` does not know on Linux
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if "model name" in line:
                    name = line.partition(":")[2].strip()
                    break
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
    """Return the answer to a request, and its arrays.

    Args:
        payload: the content of a file, or arrays in C order.
        loaded: the files that earlier requests have loaded, by key; a new one is added.
    """
    if request["do"] == "describe":
        if "provider" in request:
            check_provider(request["provider"])
        return describe(), []
    if request["do"] == "load":
        options = {}
        for key in ("provider", "precision"):
            if key in request:
                options[key] = request[key]
        network = RUNTIMES[request["runtime"]](payload, request["threads"], **options)
        loaded[request["key"]] = network
        return {"names": network.names}, []

    # Run a loaded file on arrays, for all other requests
    network = loaded[request["key"]]
    arrays = list[Any]()
    start = 0
    for dtype, shape in request["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(payload[start : start + size], dtype).reshape(shape))
        start += size

    # Answer with the nodes, the time, or the outputs too
    if request["do"] == "nodes":
        return {"nodes": network.find_nodes(arrays)}, []
    begin = time.perf_counter()
    outputs = network.run(arrays)
    seconds = {"seconds": time.perf_counter() - begin}
    if request["do"] == "time":
        return seconds, []
    return seconds, [np.ascontiguousarray(output) for output in outputs]


def main() -> None:
    """Answer each request until standard input or the file of requests ends."""
    # Requests come from standard input, or from a file that was carried here
    source = sys.stdin.buffer
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries must not write among the answers
    own = globals().get("__file__")  # unknown if the program was sent
    job = Path(own).with_name(JOB) if own else None
    carried = job is not None and job.exists()
    if job is not None and carried:
        source = job.open("rb")

    # Answer each request, even by an error, which the other side then raises
    loaded: dict[str, Any] = {}
    while line := source.readline():
        request = json.loads(line)
        payload = source.read(request["bytes"])
        if "at" in request:  # an earlier payload of the file is used again
            after = source.tell()
            source.seek(request["at"])
            payload = source.read(request["size"])
            source.seek(after)
        try:
            reply, arrays = answer(request, payload, loaded)
        except Exception as error:
            text = str(error)
            if not isinstance(error, RefusalError):
                text = f"{type(error).__name__}: {error}"
            missing = error.name if isinstance(error, ImportError) else None
            reply = {"error": text, "missing": missing}
            arrays = []

        # Write the line first, because it says how many bytes follow
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
