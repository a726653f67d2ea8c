"""Renders and runs a deployed folder's `example.py`, which runs and checks the model."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from resnet8ptq.config.schema import CPU, PreprocessConfig
from resnet8ptq.core import machine, templates
from resnet8ptq.core.console import waiting
from resnet8ptq.core.errors import QuantizationError, TrackingError
from resnet8ptq.core.records import names_of
from resnet8ptq.core.text import no_such_name, printable
from resnet8ptq.data.sources.texts import MAX_TOKENS
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import FILE as VECTORS
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.experiment.outputs import TOKENIZER

FILE = "example.py"
REQUIREMENTS = "requirements.txt"

ENGINES = ("fbgemm", "x86", "onednn", "qnnpack")  # torch's names


def render_example(source: SourceRun, vectors: Vectors, file: str, outputs: Sequence[str]) -> str:
    """Return the example's code.

    Args:
        file: the name of the model in the folder.
        outputs: names of the outputs, in the network's order.
    """
    suffix = Path(file).suffix
    preprocess = source.config.preprocess
    mode = ""
    if reads_pictures(vectors):
        height, width, channels = vectors.samples.shape[1:]
        mode = "L" if channels == 1 else "RGB"
        if preprocess.size is None:  # users' pictures may have other sizes
            preprocess = replace(preprocess, size=[height, width])

    # Texts need the length that the network takes
    texts = reads_texts(source)
    names = names_of(vectors.inputs.dtype)
    most = getattr(source.config.data, "max_tokens", None)
    length = 0
    integer = ""
    if texts and names:
        tokens = vectors.inputs.dtype[names[0]]
        length = tokens.shape[0]
        integer = tokens.base.str
        if tokens.shape != vectors.samples.dtype[names[0]].shape:
            most = length  # the network has a fixed length; samples are padded to it

    # Only torch's files have an engine, and only pictures are resized
    engine = ""
    if suffix == ".pt":
        engine = check_engine(source.record.engine)
    resizing_lines = []
    if mode:
        resizing_lines = resizing(preprocess, mode)

    # The result is code, so every value must be a number, a checked name, or a text through `repr`.
    package = source.backend.example_package
    runner = templates.load(package, "runner.py.j2", extends="resnet8ptq.deploy")
    return runner.render(
        file=file,
        suffix=suffix,
        library=source.backend.runtime,
        engine=engine,
        providers=[*dict.fromkeys((source.config.backend.provider, CPU))],
        precision=source.config.inference_precision,
        mode=mode,
        resizing=resizing_lines,
        inputs=names,
        input_names=_listed(names),
        steps=steps(vectors),
        tokenizer=TOKENIZER if texts else "",
        max_tokens=most,
        most_tokens=MAX_TOKENS,
        length=length,
        integer=integer,
        sample_shape=str(list(vectors.samples.shape[1:])),
        sample_tuple=repr(tuple(vectors.samples.shape[1:])),
        classes=_class_names(source, vectors),
        sample_dtype=vectors.samples.dtype.name,
        input_dtype=vectors.inputs.dtype.name,
        input_shape=str(list(vectors.inputs.shape[1:])),
        outputs=_listed(outputs),
    )


def _class_names(source: SourceRun, vectors: Vectors) -> list[str]:
    """Return the class names if the only output has one value for each class; else nothing."""
    names = [printable(name) for name in source.record.class_names or ()]
    shapes = [output.shape[1:] for output in vectors.outputs]
    if not names or shapes != [(len(names),)]:
        return []
    return names


def _listed(names: Sequence[str]) -> str:
    """Return names of tensors for a docstring, escaped so that they cannot end it."""
    listed = ", ".join(map(printable, names))
    return listed.replace('"', "'").replace("\\", "/")


def check_engine(engine: str) -> str:
    """Check and return torch's engine for quantized operators, read from an untrusted store.

    Raises:
        TrackingError: the engine is neither empty nor one of `ENGINES`, so it could be code.
    """
    if engine and engine not in ENGINES:
        raise TrackingError(no_such_name("engine", engine, ENGINES))
    return engine


def steps(vectors: Vectors) -> list[str]:
    """Return the preprocessing from `samples` to `values` as lines of Python; empty for records."""
    if names_of(vectors.inputs.dtype):
        return []
    done = vectors.preprocessing
    lines = ["values = samples.astype(np.float64)"]
    if vectors.inputs.dtype.kind in "iub":  # integers are not preprocessed
        lines = ["values = samples"]
    if done.bgr:
        lines.append("values = values[..., ::-1]  # the channels from RGB to BGR")
    factor = done.step * done.scale
    if (done.offset, factor) != (0, 1):
        lines.append(f"values = (values - {done.offset!r}) * {factor!r}")
    if (set(done.mean), set(done.std)) != ({0.0}, {1.0}):
        lines.append(f"values = (values - {list(done.mean)!r}) / {list(done.std)!r}")

    # Add or drop the channel axis, then order the axes as the network takes them
    if vectors.layout is not None:
        rank = vectors.samples.ndim - 1
        if len(vectors.layout) > rank:
            lines.append("values = values[..., np.newaxis]")
        elif len(vectors.layout) < rank:
            lines.append("values = values[..., 0]")
        axes = (0, *(axis + 1 for axis in vectors.layout))
        lines.append(f"values = values.transpose({', '.join(map(str, axes))})")
    return lines


def reads_pictures(vectors: Vectors) -> bool:
    """Return whether the example reads picture files.

    The samples must be grey or RGB pictures. If the data are missing, there are only network
    inputs, and the example reads no pictures.
    """
    shape = vectors.samples.shape[1:]
    is_picture = vectors.samples.dtype == np.uint8 and len(shape) == 3 and shape[-1] in (1, 3)
    return is_picture and vectors.samples is not vectors.inputs


def reads_texts(source: SourceRun) -> bool:
    """Return whether the run has kept a tokenizer, with which the example reads texts."""
    return (source.folder / TOKENIZER).is_file()


def resizing(preprocess: PreprocessConfig, mode: str) -> list[str]:
    """Return the resizing of `data.pictures.fit` as lines of Python on `picture`.

    There are none without `preprocess.size`.

    Args:
        mode: Pillow's mode of the picture: `L` or `RGB`.
    """
    if preprocess.size is None:
        return []
    size = preprocess.size
    height, width = size if isinstance(size, list) else (size, size)
    centering = (0.5, 0.5) if preprocess.align == "center" else (0.0, 0.0)
    text = templates.load("resnet8ptq.deploy", "resizing.py.j2").render(
        preprocess=preprocess,
        size=(width, height),
        how=f"Image.Resampling.{preprocess.filter.upper()}",
        background=(preprocess.pad,) * len(mode),
        centering=centering,
    )
    return text.splitlines()


def requirements(library: str, *others: str) -> list[str]:
    """Return the packages of the example, pinned to the installed versions."""
    return [machine.pin(name) for name in (library, "numpy", *others)]


def verify(folder: Path, more: Vectors | None = None) -> str:
    """Run the example of a folder in a fresh virtual environment; return its output.

    Args:
        more: further vectors, with which the example is run a second time; None without them.

    Raises:
        QuantizationError: the environment cannot be created or filled, or the example fails.
    """
    with _temporary_folder() as home:
        programs = "bin" if os.name == "posix" else "Scripts"
        python = Path(home, programs, "python")
        with waiting("Creating a virtual environment"):
            _call([sys.executable, "-m", "venv", home], "the virtual environment cannot be created")
        install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-r"]
        failed = f"{REQUIREMENTS} cannot be installed; try verify=false, without this check"
        with waiting(f"Installing {REQUIREMENTS} in a fresh environment"):
            _call([str(python), *install, str(folder / REQUIREMENTS)], failed)

        # Run it with the folder's vectors, then with more
        output = run_example(python, folder)
        if more is not None:
            copy = Path(shutil.copytree(folder, Path(home, "more")))
            more.save(copy / VECTORS)
            output += f"\n{run_example(python, copy)}"
        return output


@contextmanager
def _temporary_folder() -> Iterator[str]:
    home = tempfile.mkdtemp()
    try:
        yield home
    finally:
        with waiting("Removing the virtual environment"):
            shutil.rmtree(home, ignore_errors=True)


def run_example(python: Path | str, folder: Path) -> str:
    """Run a folder's example with an interpreter in isolated mode (`-I`); return its output."""
    with waiting(f"Running {FILE}"):
        return _call([str(python), "-I", str(folder / FILE)], f"{FILE} fails")


def _call(command: Sequence[str], failed: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise QuantizationError(f"{failed} ({printable(' '.join(last))})")
    return done.stdout.strip()
