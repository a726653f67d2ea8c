"""The quantizer of `backend=file`, which passes on a file that another program has quantized.

The file is untrusted: `reading` checks it. `matching` maps the file's inputs and outputs to those
of the FP32 network. By default, FP32 mostly runs in the file's framework, see `_find_fp32`.
"""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from resnet8ptq.backends.contract import (
    Artifact,
    Predict,
    Predictor,
    Quantizer,
    Resolved,
    Takes,
    options_of,
    refuse_others,
    without_corrections,
)
from resnet8ptq.backends.file import predictor, reading
from resnet8ptq.backends.file.contents import RawRun
from resnet8ptq.backends.file.matching import match_inputs, match_outputs
from resnet8ptq.backends.file.options import FileConfig
from resnet8ptq.backends.file.reading import Admitted, find_suffix
from resnet8ptq.backends.onnx import checking as onnx_checking
from resnet8ptq.backends.tflite import checking as tflite_checking
from resnet8ptq.core import files
from resnet8ptq.core.descriptor import find_readers
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.sources.formats import is_tflites
from resnet8ptq.precision.decisions import Decisions

log = logging.getLogger(__name__)

_UNCHANGED = "the file of backend.path is scored unchanged"
_TAKES: Takes = {
    "dtype.name": (["int8"], "the file of backend.path has its own dtype; expected int8 for all"),
    "method": (["static", "dynamic", "weight_only"], _UNCHANGED),
    "precision.plan": ([None], _UNCHANGED),
    "nodes_to_exclude": ([[]], _UNCHANGED),
    **without_corrections(_UNCHANGED),
    "slim": ([False], _UNCHANGED),
}

# The function that counts the kernels of a file, by the file's framework.
_COUNTERS = {
    "onnx": "resnet8ptq.backends.onnx.profiler:count_kernels",
    "openvino": "resnet8ptq.backends.openvino.profiler:count_kernels",
}


class FileQuantizer(Quantizer):
    """Checks, copies and runs a file of another program."""

    @property
    def runs_torch(self) -> bool:
        """Whether FP32 runs in torch, or in ExecuTorch, whose files torch exports."""
        return (self._options.fp32 or self._engine) in ("torch", "executorch")

    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return the dtypes, execution and format of the file; refuse settings that change a file.

        Raises:
            ConfigError: `reading` refuses the file.
            UnsupportedError: a setting does not apply to a file of another program; see also
                `reading.admit`.
        """
        refuse_others(self.config, _TAKES)
        contents = self._admitted.contents
        engine = None
        if self._engine == "openvino":
            engine = "openvino"
        return Resolved(
            weight_dtype=contents.weight_dtype,
            activation_dtype=contents.activation_dtype,
            execution=contents.execution,
            file_format=contents.format,
            engine=engine,
        )

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Match inputs and outputs, and find FP32's framework and the file's method.

        See `contract.Quantizer`.

        Raises:
            ConfigError: the file does not match the network, see `matching`.
        """
        options = self._options
        contents = self._admitted.contents
        contract = model.contract
        path = self._path
        inputs = match_inputs(
            contract.inputs, ports=contents.inputs, asked=options.inputs, path=path
        )
        outputs = match_outputs(
            contract.outputs, ports=contents.outputs, asked=options.outputs, path=path
        )
        fp32 = options.fp32 or self._find_fp32(model)
        backend = replace(options, inputs=inputs, outputs=outputs, fp32=fp32)

        # The method of the other program, as this package names it
        method = "static"
        if contents.dynamic:
            method = "dynamic"
        elif contents.execution.startswith("weights only"):
            method = "weight_only"
        return {"backend": backend, "method": method}

    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Copy the checked file, which is a single file; see `contract.Quantizer`."""
        self.resolve()
        admitted = self._admitted
        contents = admitted.contents
        path = folder / admitted.path.name
        with files.atomic(path) as temporary:
            shutil.copyfile(admitted.path, temporary)
        in_float = len(contents.layers) - len(contents.narrowed)
        details = {
            "float_layers": str(in_float),
            "producer": contents.producer or "unknown",
            "fp32_framework": self._options.fp32 or self._find_fp32(model),
        }
        return Artifact(path, quantized_layers=len(contents.narrowed), ranges={}, details=details)

    def verify(self, artifact: Artifact, model: Fp32Model, calibration: Split) -> dict[str, str]:
        """Compare the kernels of ONNX Runtime or LiteRT with the file's definition.

        The result is empty for other frameworks; see `contract.Quantizer`.
        """
        open_fp32 = partial(open_runner, str(model.onnx_path), self.runtime.threads)
        name = self._path.name
        if self._engine == "onnx":
            return onnx_checking.compare_kernels(
                name, open_file=self._open_onnx, open_fp32=open_fp32, calibration=calibration
            )
        if self._engine == "tflite":
            return tflite_checking.compare_kernels(
                name, open_file=self._open_tflite, open_fp32=open_fp32, calibration=calibration
            )
        return {}

    def _open_onnx(self, optimized: bool = True, without: Sequence[str] = ()) -> Predict:
        reader = reading.reader_of(self._admitted.path)
        content = self._admitted.path.read_bytes()
        threads = self.runtime.threads
        return self._match(reader.open_run(content, threads, optimized, without))

    def _open_tflite(self, reference: bool) -> Predict:
        reader = reading.reader_of(self._admitted.path)
        content = self._admitted.path.read_bytes()
        threads = self.runtime.threads
        return self._match(reader.open_run(content, threads, reference))

    def _match(self, run: RawRun) -> Predict:
        """Return a function from network inputs to network outputs, as `fit` has matched them."""
        inputs = self._options.inputs or {}
        outputs = self._options.outputs or {}
        return predictor.MatchedNetwork(run, self._admitted.contents, inputs, outputs)

    def load(self, path: Path, threads: int) -> Predictor:
        """Load the copy, with the inputs and outputs that `fit` has matched.

        A file other than the copy is checked first.
        """
        options = self._options
        admitted = self._admitted
        if files.sha256(path) != files.sha256(admitted.path):
            admitted = reading.admit(path, self.runtime.cache_root)
        return predictor.load(
            admitted, inputs=options.inputs or {}, outputs=options.outputs or {}, threads=threads
        )

    def count_kernels(self, path: Path) -> tuple[int, int]:
        """Count the kernels of ONNX Runtime or OpenVINO; for other frameworks, the file's layers.

        A layer of the file counts as one on integers if its weights and inputs are integers.
        """
        counter = _COUNTERS.get(self._engine)
        if counter is not None:
            counts: tuple[int, int] = resolve_name(counter)(path)
            return counts
        contents = self._admitted.contents
        integer = sum("int" in layer.activations for layer in contents.quantized)
        return integer, len(contents.layers) - integer

    def profile(self, path: Path, threads: int) -> NoReturn:
        """Raise `UnsupportedError`: only files that this package has quantized are profiled."""
        raise UnsupportedError(f"+analysis=profile: {_UNCHANGED}; expected other backends")

    @property
    def _options(self) -> FileConfig:
        return options_of(self.config, FileConfig)

    @property
    def _path(self) -> Path:
        return reading.find_path(self._options)

    @property
    def _engine(self) -> str:
        return find_readers()[find_suffix(self._path)].name

    @cached_property
    def _admitted(self) -> Admitted:
        return reading.admit(self._path, self.runtime.cache_root)

    def _find_fp32(self, model: Fp32Model) -> str:
        """Return the framework that runs the FP32 network by default.

        This is the file's framework. For a TFLite file, it is ONNX Runtime if the network
        does not become a .tflite file without ONNX, see `is_tflites`, or with model.fold=false.
        """
        if self._engine != "tflite":
            return self._engine
        if is_tflites(model.format, is_float=True) and model.fold:
            return "tflite"
        log.warning(
            "%s: TensorFlow's converter does not take %s: FP32 runs in ONNX Runtime, and the speed "
            "is compared across frameworks",
            self._path.name,
            model.source.name,
        )
        return "onnx"
