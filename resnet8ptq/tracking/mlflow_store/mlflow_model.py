"""Logs a run's artifact as an MLflow model, with signature, example and pinned requirements.

Files of the backend onnx use MLflow's onnx flavor, and other files a small pyfunc. MLflow copies
the code of the pyfunc (`served_model` and the backend's `serving`) into the model's folder. A
server therefore needs the framework and NumPy, but not this package.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from resnet8ptq.core import interrupts, machine
from resnet8ptq.core.descriptor import Backend, find_backends
from resnet8ptq.core.errors import TrackingError, errors_as
from resnet8ptq.core.records import feed, names_of
from resnet8ptq.data.fields import find_masked
from resnet8ptq.target.measure import CPU
from resnet8ptq.tracking import params
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.mlflow_store.store import Store, in_one_line

if TYPE_CHECKING:  # most commands do not need MLflow
    from mlflow.entities import LoggedModel
    from mlflow.models import ModelSignature

EXAMPLE = "example.npz"  # the file in the run's folder with the network's `inputs` [1, ...]
_REFUSED = re.compile("[/:.%\"']")  # characters that MLflow refuses in the name of a model
_CODE = Path(__file__).with_name("served_model.py")
_ONNX = "mlflow.onnx"  # MLflow's flavor for ONNX files
_NO_MODEL = "RESOURCE_DOES_NOT_EXIST"  # MLflow's code for a deleted model
_CHECK = "warn_dependency_requirement_mismatches"


@dataclass(frozen=True)
class _Unchecked:
    """A flavor of MLflow without the checks of the example and of the pinned versions.

    The first check loads the file, which the run has already measured. This takes 5% of a short
    run, and two seconds more if the file needs torch. The second check lists the modules of every
    installed package, which takes 0.6 seconds. It would never warn, because the pinned versions are
    the installed ones.
    """

    flavor: Any
    # An attribute, because `Model.log` would log the values of an argument as params of the run.
    model_config: dict[str, Any] | None = None

    def save_model(self, validate_serving_input: bool, **arguments: Any) -> None:
        """Save the model without the check of its example; `Model.log` calls this."""
        if self.model_config is not None:
            arguments["model_config"] = self.model_config
        with _unlisted_packages():
            self.flavor.save_model(**arguments)


@contextmanager
def _unlisted_packages() -> Iterator[None]:
    """Leave out MLflow's check of the installed versions while the block runs."""
    from mlflow.utils import environment

    check = getattr(environment, _CHECK, None)  # this check is not part of MLflow's interface
    setattr(environment, _CHECK, lambda requirements: None)
    try:
        yield
    finally:
        setattr(environment, _CHECK, check)


def find_model(store: Store, run_id: str) -> "LoggedModel | None":
    """Return the complete model that a run has logged, or None.

    MLflow links a model to its run first, and uploads the files later. A killed process may
    therefore leave a model without files, which is not READY.
    """
    outputs = store.client.get_run(run_id).outputs
    if not outputs:
        return None
    for output in outputs.model_outputs:
        model = _find_ready(store, output.model_id)
        if model is not None:
            return model
    return None


def _find_ready(store: Store, model_id: str) -> "LoggedModel | None":
    """Return a model; None if its upload is not complete, or if somebody has deleted it."""
    from mlflow.entities import LoggedModelStatus

    try:
        model = store.client.get_logged_model(model_id)
    except TrackingError as error:
        if getattr(error.__cause__, "error_code", "") != _NO_MODEL:
            raise
        return None
    if model.status != LoggedModelStatus.READY:
        return None
    return model


@interrupts.deferred()
def log_model(store: Store, run_id: str, journal: Journal, folder: Path) -> None:
    """Log the run's artifact as an MLflow model under the run's name, unless the store has it.

    A run without `Journal.model` logs none. The folder must hold the artifact and `EXAMPLE`.

    Raises:
        TrackingError: the artifact or the example is missing, a link or damaged, no backend writes
            such an artifact, the store's folder for models does not belong to it, or the store is
            unavailable or refuses the model.
        PackageNotFoundError: a package that a server needs is not installed here.
    """
    described = journal.model
    if described is None or find_model(store, run_id) is not None:
        return
    import mlflow
    from mlflow.models import Model

    path = folder / described.file
    for file in (path, folder / EXAMPLE):
        if file.is_symlink() or not file.is_file():  # other people's links may name any file
            raise TrackingError(f"{file}: is missing or a link, expected the run's own file")
    backend = _find_backend(journal, path)
    damaged = errors_as(TrackingError, f"{folder / EXAMPLE}: is damaged")
    with damaged, np.load(folder / EXAMPLE, allow_pickle=False) as arrays:
        example = arrays["inputs"]

    # Describe inputs and outputs of the file, and choose the flavor
    if backend.serving != _ONNX:
        shapes = _shapes(example)
        outputs = described.outputs
        values = feed(example, list(shapes))
        # A list, because MLflow sorts a dict
        dtypes = [[name, array.dtype.name] for name, array in values.items()]
        served = {"outputs": list(outputs), "engine": described.engine, "inputs": dtypes}
        settings = _pyfunc(path, backend.serving, served)
    else:
        shapes, outputs, settings = _onnx(path, journal.params.get(params.PROVIDER, CPU))
        values = feed(example, list(shapes))
    signature = _sign(values, shapes, outputs)
    pinned = _pin(backend)

    # Log to the run's experiment, whose folder for models is checked first
    experiment = store.client.get_experiment(store.experiment_id)
    store.locate(f"{experiment.artifact_location}/models")
    config = settings.pop("model_config", None)
    with in_one_line(store):
        # `Model.log` has no argument for the store and the experiment.
        mlflow.set_tracking_uri(store.uri)
        mlflow.set_experiment(experiment_id=store.experiment_id)
        Model.log(
            None,
            run_id=run_id,
            name=_REFUSED.sub("_", journal.name),
            params={"file": path.name, **params.select(journal)},
            signature=signature,
            input_example=values,
            pip_requirements=pinned,
            flavor_name=settings["flavor"].__name__,
            validate_serving_input=False,
            **{**settings, "flavor": _Unchecked(settings["flavor"], config)},
        )


def _sign(
    values: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, Sequence[int]],
    outputs: Mapping[str, Sequence[int]],
) -> "ModelSignature":
    """Return the signature of a model, by which a server checks requests.

    Args:
        values: an example of each input.
        shapes: the shape of each input, with the batch axis; free sizes are -1.
        outputs: the shape of each output, without the batch axis; free sizes are -1.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    takes = []
    for name, shape in shapes.items():
        takes.append(TensorSpec(values[name].dtype, tuple(shape), name))
    gives = []
    for name, shape in outputs.items():
        gives.append(TensorSpec(np.dtype(np.float32), (-1, *shape), name))
    return ModelSignature(Schema(takes), Schema(gives))


def _pin(backend: Backend) -> list[str]:
    """Return the packages that a server needs, pinned to the installed versions.

    Raises:
        PackageNotFoundError: see `machine.pin`.
    """
    needed = [backend.runtime, "numpy"]
    if backend.serving == _ONNX:
        needed.insert(0, "onnx")
    return [machine.pin(package) for package in needed]


def _find_backend(journal: Journal, path: Path) -> Backend:
    """Return the run's backend if it writes files with this suffix, else the first that does.

    Raises:
        TrackingError: no backend writes files with this suffix.
    """
    writers = [one for one in find_backends().values() if path.suffix in one.suffixes]
    if not writers:
        raise TrackingError(f"{path}: expected the file of a backend; its record.json is damaged")
    named = [one for one in writers if one.name == journal.params.get("backend")]
    return (named or writers)[0]


def _pyfunc(path: Path, serving: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Model.log` for a file that `served_model` serves.

    Args:
        serving: the name of the backend's module that loads the file.
        config: the values that `ServedModel.load_context` reads.
    """
    import mlflow.pyfunc

    spec = find_spec(serving)
    assert spec is not None and spec.origin is not None  # a backend's descriptor names the module
    return {
        "flavor": mlflow.pyfunc,
        "python_model": str(_CODE),
        "artifacts": {"model": str(path), "serving": spec.origin},
        "model_config": config,
    }


def _shapes(example: NDArray[Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input by name, with -1 for the batch and the length of texts."""
    names = names_of(example.dtype)
    masked = find_masked(example.dtype)
    if not names:
        return {"input": (-1, *example.shape[1:])}
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shape = example.dtype[name].shape
        if name in masked:  # the length of a text is free
            shape = (-1, *shape[1:])
        shapes[name] = (-1, *shape)
    return shapes


def _onnx(
    path: Path, provider: str
) -> tuple[dict[str, tuple[int, ...]], dict[str, list[int]], dict[str, Any]]:
    """Return the shapes of an ONNX file's inputs and outputs, and the arguments of `Model.log`.

    As in `_sign`, only the inputs' shapes have the batch axis.
    """
    import mlflow.onnx
    import onnx

    with errors_as(TrackingError, f"{path}: is damaged"):
        proto = onnx.load(path)

    def sizes(value: onnx.ValueInfoProto) -> list[int]:
        return [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim[1:]]

    settings = {
        "flavor": mlflow.onnx,
        "onnx_model": proto,
        "save_as_external_data": False,
        # Without a second CPU provider, of which MLflow would warn
        "onnx_execution_providers": [*dict.fromkeys((provider, CPU))],
    }
    inputs = {value.name: (-1, *sizes(value)) for value in proto.graph.input}
    outputs = {value.name: sizes(value) for value in proto.graph.output}
    return inputs, outputs, settings
