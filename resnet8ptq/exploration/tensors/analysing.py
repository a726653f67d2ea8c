"""`+analysis=compare`: finds where a quantized file loses the signal, tensor by tensor.

The analysis measures on training samples, never on test samples. To quantize, it calibrates with
other samples.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.matching import match_inputs
from resnet8ptq.backends.file.options import FileConfig
from resnet8ptq.config.loading import CONFIG_FILE, save_config
from resnet8ptq.core.descriptor import FILE
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.subject import open_fitted
from resnet8ptq.exploration.search import step_table
from resnet8ptq.exploration.tensors import findings
from resnet8ptq.exploration.tensors.comparing import TensorComparison, compare_file
from resnet8ptq.exploration.tensors.findings import Finding
from resnet8ptq.exploration.tensors.network_picture import time_nodes
from resnet8ptq.models.model import Fp32Model


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(RunResult):
    """The tensors of the quantized file, compared with those of FP32."""

    compared: TensorComparison

    def summary(self) -> str:
        """Return a sentence about the faulty or the costliest layer."""
        return self.compared.describe()

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name."""
        worst = self.compared.costliest
        return {"tensors/matched": len(self.compared.tensors), "tensors/worst_db": worst.own_db}


def analyse(settings: Settings, folder: Path, run: Recorder) -> ComparisonResult:
    """Quantize, or take the file of `backend.path`; compare, write the files, print the table.

    See `dispatch.run_or_analyse`.

    Raises:
        UnsupportedError: the backend cannot take a setting or the network, the format does not give
            its inner tensors, or none is matched.
        PtqError: network, samples or file cannot be read, or do not fit each other.
    """
    resolved = settings.quantizer.resolve()
    tunes = preparation.tunes(settings.config)  # whether steps tune by the metric
    with open_fitted(settings, run, needs_labels=tunes) as work:
        prepared = preparation.prepare(work)
        path = work.quantize(prepared, work.scratch).path
        network = prepared.network  # corrections change the tensors between layers
        compared = compare_artifact(work.settings, network, path, split=work.samples.held_out)

    # Find the faults, which the run logs as params
    config = work.config
    faults = find_faults(work.settings, compared)
    params = {**resolved.to_params(), **work.samples.digests}
    params["findings"] = json.dumps(findings.to_entries(faults))
    params["finding"] = compared.describe()
    result = ComparisonResult("ok", compared=compared, resolved=params)

    # The table imports matplotlib, which a run that only checks a file does not need.
    from resnet8ptq.exploration.tensors import tensor_table

    title = tensor_table.describe(config, "tensors")
    save_config(config, folder / CONFIG_FILE)
    tensor_table.write_comparison(folder, "tensors", compared, faults, title=title)
    tensor_table.save_figure(folder / "tensors.png", compared, faults, title=title)
    tensor_table.print_table(compared, faults, title)
    return result


def compare_artifact(
    settings: Settings, network: Fp32Model, path: Path, split: Split
) -> TensorComparison:
    """Compare the tensors of a file with those of the network, and time the file's nodes.

    Raises:
        UnsupportedError: the format does not give its inner tensors, no tensor is matched, or the
            file cannot be run here, see `reading.admit`.
        ConfigError: the file is refused, see `reading.admit`, or an input has no clear match in the
            network.
    """
    backend = settings.config.backend
    runtime = settings.runtime
    if not reading.gives_tensors(path.suffix):
        raise UnsupportedError(
            f"backend={backend.name}: its {path.suffix} files do not give their inner tensors; "
            "expected .onnx, .tflite, .pt2 (backend=torch_pt2e) or OpenVINO's files"
        )

    # Match the file's inputs, of which the user may have named some
    admitted = reading.admit(path, runtime.cache_root)
    asked = backend.inputs if isinstance(backend, FileConfig) else None
    ports = admitted.contents.inputs
    inputs = match_inputs(network.contract.inputs, ports, asked, path=path)
    compared = compare_file(network, admitted, inputs, split=split, threads=runtime.threads)
    if compared is None:
        raise UnsupportedError("no tensor of the file is one of the FP32 network's")
    return replace(compared, times=time_nodes(settings.quantizer, path, split))


def find_faults(settings: Settings, compared: TensorComparison) -> list[Finding]:
    """Return the faults of a file; if this program quantized it, with settings against them."""
    faults = findings.find_faults(compared)
    config = settings.config
    if config.backend.name == FILE:
        return faults
    answered = []
    for fault in faults:
        changes = step_table.answer(config, fault.name, fault.nodes)
        answered.append(replace(fault, changes=tuple(changes)))
    return answered
