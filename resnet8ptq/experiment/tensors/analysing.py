"""`+analysis=compare`: where a quantized file loses the signal, tensor by tensor.

Measured on training samples that did not calibrate, never on test samples.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.matching import match_inputs
from resnet8ptq.backends.file.options import FileConfig
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import preparation
from resnet8ptq.experiment.compatibility import fit_settings
from resnet8ptq.experiment.recorder import Recorder
from resnet8ptq.experiment.settings import Settings
from resnet8ptq.experiment.subject import open_subject
from resnet8ptq.experiment.tensors.comparing import TensorComparison, compare_file
from resnet8ptq.experiment.workspace import Workspace
from resnet8ptq.models.model import Fp32Model


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(RunResult):
    """The tensors of the quantized file beside FP32's."""

    compared: TensorComparison

    def summary(self) -> str:
        """Return the finding in one line."""
        return self.compared.describe()

    def to_metrics(self) -> dict[str, float]:
        """Return every metric under its MLflow name."""
        worst = self.compared.costliest
        return {"tensors/matched": len(self.compared.tensors), "tensors/worst_db": worst.own_db}


def analyse(settings: Settings, folder: Path, run: Recorder) -> ComparisonResult:
    """Quantize, or take the file of `backend.path`; compare, and print the table.

    See `running.run`.

    Raises:
        UnsupportedError: the format does not give its inner tensors, or none is matched.
    """
    resolved = settings.quantizer.resolve()
    evaluator, samples = open_subject(settings, run)
    settings = fit_settings(settings, evaluator.network)
    evaluator = evaluator.with_quantizer(settings.quantizer)
    config = settings.config
    with tempfile.TemporaryDirectory() as scratch:
        work = Workspace(settings, evaluator, samples, Path(scratch), Path(scratch), run)
        prepared = preparation.prepare(work)
        path = work.quantize(prepared, Path(scratch)).path
        network = prepared.network  # with corrections, which change what is between the layers
        compared = _compare(settings, network, path, samples.held_out)
    if compared is None:
        raise UnsupportedError("no tensor of the file is one of the FP32 network's")
    params = {**resolved.to_params(), **samples.digests, "finding": compared.describe()}
    result = ComparisonResult("ok", compared=compared, resolved=params)

    # It draws, which a run that only judges a file does not.
    from resnet8ptq.experiment.tensors import comparison_table

    comparison_table.write(folder, config, compared)
    comparison_table.print_table(compared, comparison_table.describe(config))
    return result


def _compare(
    settings: Settings, network: Fp32Model, path: Path, split: Split
) -> TensorComparison | None:
    """Compare the tensors of a file with those of the network."""
    backend, runtime = settings.config.backend, settings.runtime
    admitted = reading.admit(path, runtime.cache_root)
    given = backend.inputs if isinstance(backend, FileConfig) else None
    inputs = match_inputs(network.contract.inputs, admitted.contents.inputs, given, path)
    return compare_file(network, admitted, inputs, split, runtime.threads)
