"""The commands as functions: `quantize`, `sweep`, `ship` and `judge`.

Each function runs its command in a separate process. A call writes the same folders and MLflow runs
as the command line. Keywords are the keys of the command line; see `keywords.to_words`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resnet8ptq.api.keywords import to_words
from resnet8ptq.api.networks import find_network, list_inputs
from resnet8ptq.api.samples import find_samples
from resnet8ptq.core import cache, command_process
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.files import expand

if TYPE_CHECKING:
    from resnet8ptq.results import RunRecord, SweepSummary


@contextmanager
def _same_environment() -> Iterator[None]:
    """Restore the caller's environment variables at the end; torch's export and MLflow add some."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@_same_environment()
def quantize(
    model: Any, data: Any = None, *, example: Any = None, quiet: bool = False, **settings: Any
) -> "RunRecord":
    """Quantize a network, measure the file, and compare it with FP32.

        run = quantize(model, (x, y), backend="onnx", dtype="u8s8", per_channel=True)
        run.verdict, run.loss, run.path

    Args:
        model: a path, an ONNX model, a `torch.nn.Module` or a Keras model; None for the network
            that `settings` name, or the default.
        data: `(x, y)`, an array, a dict of arrays by input name that may also have `labels`, a
            torch Dataset or DataLoader, a `tf.data.Dataset`, `{"train": ..., "test": ...}` of
            these, a path, or the name of a data source; None for the data that `settings` name, or
            the default.
        example: inputs of a torch module, if their shapes do not follow from the samples.
        quiet: whether to print no log.
        settings: keys of `resnet8ptq run`, with `__` for a dot, or a dict for a group.

    Raises:
        PtqError: an input is wrong, or the command failed; the message is one line.
    """
    from resnet8ptq.results import load_run

    words = _find_inputs(model, data, example, settings)
    answer = command_process.run("run", [*words, *to_words(settings)], quiet)
    if "record_folder" not in answer:  # such as experiment=auto, or analysis=inspect
        raise ConfigError(
            "quantize: got settings of a sweep or an inspection, expected those of a single run; "
            "try ptq.sweep"
        )
    return load_run(folder=answer["record_folder"])


@_same_environment()
def sweep(
    model: Any, data: Any = None, *, example: Any = None, quiet: bool = False, **settings: Any
) -> "SweepSummary":
    """Quantize a network with each combination of settings, and judge the files.

        sweep(model, data, backend=["onnx", "torch"], dtype=["int8", "uint8"]).to_frame()

    Args:
        settings: as for `quantize`, but a list holds the values to sweep. A setting whose values
            are lists takes a list of lists: `nodes_to_exclude=[["conv1"], []]`.

    `model`, `data`, `example`, `quiet` and the errors are those of `quantize`. A job that fails
    becomes a run with the status `failed`.
    """
    words = _find_inputs(model, data, example, settings)
    return _run_sweep(["-m", *words, *to_words(settings, swept=True)], quiet)


@_same_environment()
def ship(
    model: Any,
    data: Any = None,
    *,
    goal: str = "fastest",
    minutes: float = 10,
    example: Any = None,
    quiet: bool = False,
    **settings: Any,
) -> "SweepSummary":
    """Search for a quantized file with an accepted loss, within a time limit.

        ship(model, data, goal="smallest", minutes=5).deploy("folder")

    Args:
        goal: `fastest`, `smallest` or `best`.
        minutes: time for the whole search.
        settings: as for `quantize`; `backend` may be a list of backends to try.

    `model`, `data`, `example`, `quiet` and the errors are those of `quantize`.
    """
    from resnet8ptq.shipping import to_run

    words = _find_inputs(model, data, example, settings)
    own = to_words({"goal": goal, "minutes": minutes})
    if "backend" in settings:
        own += to_words({"backend": settings.pop("backend")}, swept=True)
    return _run_sweep(to_run([*own, *words, *to_words(settings)]), quiet)


@_same_environment()
def judge(
    model: Any,
    files: str | Path | Sequence[str | Path],
    data: Any = None,
    *,
    example: Any = None,
    quiet: bool = False,
    **settings: Any,
) -> "SweepSummary":
    """Compare quantized files of other programs with their FP32 network.

        judge("fp32.onnx", ["theirs.tflite"], data).runs[0].verdict

    Args:
        model: as for `quantize`; if it is None, `settings` must name the network.
        files: the quantized file or files, each of which gets a run.
        settings: as for `quantize`, and the limits `max_drop`, `min_sqnr_db`, `min_accuracy`.
            Settings of the quantization do not apply, because the files are quantized already;
            some, such as corrections, make the runs `unsupported`.

    `data`, `example`, `quiet` and the errors are those of `quantize`.
    """
    from resnet8ptq.judging import Arguments

    # The command line would take the first file as the network
    if model is None and not Arguments([], to_words(settings)).names_network:
        raise ConfigError("model: got None, expected the FP32 network of the files")
    words = _find_inputs(model, data, example, settings)
    if isinstance(files, str | Path):
        files = [files]
    paths = [str(expand(file).absolute()) for file in files]
    asked = Arguments.parse([*paths, *words, *to_words(settings)])
    return _run_sweep(asked.to_sweep(), quiet)


def _find_inputs(model: Any, data: Any, example: Any, settings: dict[str, Any]) -> list[str]:
    """Return the command-line words that name the samples and the network.

    Samples and networks from memory are written to the cache.
    """
    root = cache.folder(settings.get("cache_dir"))
    sample_words, few = find_samples(data, root, takes=list_inputs(model))
    return [*sample_words, *find_network(model, example, samples=few, root=root)]


def _run_sweep(words: Sequence[str], quiet: bool) -> "SweepSummary":
    from resnet8ptq.results import load_sweep

    answer = command_process.run("run", words, quiet)
    return load_sweep(folder=answer["sweep_folder"])
