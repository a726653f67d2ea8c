"""A run's artifact as an MLflow model: signature, input example, pinned requirements.

ONNX files have MLflow's own flavor; TFLite and torch files a small pyfunc, whose code MLflow copies
beside them (`serving_code`), so that serving needs the framework alone and not this package.
"""

from pathlib import Path
from typing import Any

import numpy as np

from resnet8ptq.core import interrupts, machine
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.store import Store

EXAMPLE = "example.npz"  # in the run's folder: `inputs` [1, ...], as the network takes them
MODEL = "model"  # the MLflow model's name in its run
_CODE = Path(__file__).parent / "serving_code"
# By the file's suffix: what its pyfunc is, and the packages that it imports.
_SERVED = {
    ".onnx": ("", ("onnx", "onnxruntime", "numpy")),
    ".tflite": ("tflite_model.py", ("ai-edge-litert", "numpy")),
    ".pt": ("torch_model.py", ("torch", "numpy")),
    ".pt2": ("torch_model.py", ("torch", "numpy")),
}


class _Unchecked:
    """MLflow's pyfunc for a file that MLflow is not to load in order to check it.

    That imports torch, two seconds at the end of a run that has loaded and measured the file.
    """

    @staticmethod
    def save_model(validate_serving_input: bool, **given: Any) -> None:
        """Save it; the first argument is that of `Model.log`, which hands it on."""
        from mlflow import pyfunc

        pyfunc.save_model(**given)


@interrupts.deferred()
def log_model(store: Store, run_id: str, journal: Journal, folder: Path) -> None:
    """Log the run's artifact as an MLflow model; once."""
    described = journal.model
    if described is None or store.client.get_run(run_id).outputs.model_outputs:
        return
    _add_model(store, run_id, folder, **described)


def _add_model(
    store: Store, run_id: str, folder: Path, file: str, outputs: Any, engine: str | None
) -> None:
    """Log a file of `folder`, which holds `EXAMPLE` too, as a run's model; see `Journal.model`."""
    import mlflow
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    path = folder / file
    code, packages = _SERVED[path.suffix]
    settings: dict[str, Any] = {}
    with np.load(folder / EXAMPLE, allow_pickle=False) as arrays:
        example = arrays["inputs"]
    if code:
        import mlflow.pyfunc

        flavor: Any = mlflow.pyfunc
        if "torch" in packages:
            flavor = _Unchecked
            settings |= {"validate_serving_input": False, "flavor_name": mlflow.pyfunc.__name__}
        settings["python_model"] = str(_CODE / code)
        settings["artifacts"] = {"model": str(path)}
        settings["model_config"] = {
            "outputs": list(outputs),
            "engine": engine,
            "dtype": example.dtype.name,
        }
        taken = "input"
    else:
        import mlflow.onnx
        import onnx

        flavor = mlflow.onnx
        proto = onnx.load(path)
        settings = {"onnx_model": proto, "save_as_external_data": False}
        settings["onnx_execution_providers"] = ["CPUExecutionProvider"]  # as it was measured
        taken = proto.graph.input[0].name
        outputs = {
            value.name: [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim[1:]]
            for value in proto.graph.output
        }
    takes = TensorSpec(example.dtype, (-1, *example.shape[1:]), taken)
    gives = [TensorSpec(np.dtype(np.float32), (-1, *s), name) for name, s in outputs.items()]
    versions = machine.versions()
    # What follows has no argument for the store and the experiment.
    mlflow.set_tracking_uri(store.uri)
    mlflow.set_experiment(experiment_id=store.experiment_id)
    Model.log(
        None,
        flavor=flavor,
        run_id=run_id,
        name=MODEL,
        signature=ModelSignature(Schema([takes]), Schema(gives)),
        input_example={taken: example},
        # Without what names a build of torch: `+cpu` is in no registry that pip asks by itself.
        pip_requirements=[
            f"{name}=={versions[f'version.{name}'].partition('+')[0]}" for name in packages
        ],
        **settings,
    )
