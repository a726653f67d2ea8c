"""`example.py` of a deployed folder: the model run by its own library alone, and checked."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resnet8ptq.config.schema import PreprocessConfig
from resnet8ptq.core import templates
from resnet8ptq.core.errors import QuantizationError, TrackingError
from resnet8ptq.core.text import printable
from resnet8ptq.deploy.source import Source
from resnet8ptq.deploy.vectors import FILE as VECTORS
from resnet8ptq.deploy.vectors import Vectors

_OF_PICTURES = ("folder", "coco")
FILE, REQUIREMENTS = "example.py", "requirements.txt"

_ONNX_LOAD = """options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(HERE / "{file}", options, ["CPUExecutionProvider"])
name = session.get_inputs()[0].name"""
_ONNX_RUN = ["return session.run(None, {name: sample})"]
_TFLITE_LOAD = """interpreter = Interpreter(str(HERE / "{file}"))
interpreter.allocate_tensors()
(taken,), given = interpreter.get_input_details(), interpreter.get_output_details()"""
_TFLITE_RUN = [
    'if taken["dtype"] == np.int8:  # real = (integer - zero_point) * scale',
    '    scale, zero_point = taken["quantization"]',
    "    levels = np.rint(sample / np.float32(scale)) + np.float32(zero_point)",
    "    sample = np.clip(levels, -128, 127).astype(np.int8)",
    'interpreter.set_tensor(taken["index"], sample)',
    "interpreter.invoke()",
    "outputs = []",
    "for each in given:",
    '    values = interpreter.get_tensor(each["index"])',
    '    if each["dtype"] == np.int8:',
    '        scale, zero_point = each["quantization"]',
    "        values = (values.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)",
    "    outputs.append(values)",
    "return outputs",
]
_TORCH_RUN = [
    "with torch.inference_mode():",
    "    found = module(torch.from_numpy(sample))",
    "outputs = found if isinstance(found, (list, tuple)) else [found]",
    "return [(each.dequantize() if each.is_quantized else each).numpy() for each in outputs]",
]
ENGINES = ("fbgemm", "x86", "onednn", "qnnpack")  # torch's
_LIBRARIES = {".onnx": "onnxruntime", ".ort": "onnxruntime", ".tflite": "ai-edge-litert"}


def library_of(suffix: str) -> str:
    """Return the package that runs files of this kind."""
    return _LIBRARIES.get(suffix, "torch")


def render(source: Source, vectors: Vectors, file: str, outputs: Sequence[str]) -> str:
    """Return the example's code.

    Args:
        file: the model's name in the folder.
        outputs: names, in the network's order.
    """
    suffix = Path(file).suffix
    imports, load, run = _code(suffix, source.record.engine or None)
    # Code: every value is a number, or a name through `repr`.
    return templates.load("resnet8ptq.deploy", "example.py.j2").render(
        file=file,
        library=library_of(suffix),
        imports=imports,
        load=load.format(file=file),
        run=run,
        picture=_picture(source) if reads_pictures(source, vectors) else None,
        steps=steps(vectors),
        sample_shape=str(list(vectors.samples.shape[1:])),
        sample_dtype=vectors.samples.dtype.name,
        input_dtype=vectors.inputs.dtype.name,
        input_shape=str(list(vectors.inputs.shape[1:])),
        outputs=", ".join(printable(name).replace('"', "'").replace("\\", "/") for name in outputs),
    )


def _code(suffix: str, engine: str | None) -> tuple[str, str, list[str]]:
    if library_of(suffix) == "onnxruntime":
        return "import onnxruntime", _ONNX_LOAD, _ONNX_RUN
    if suffix == ".tflite":
        return "from ai_edge_litert.interpreter import Interpreter", _TFLITE_LOAD, _TFLITE_RUN
    if suffix == ".pt2":
        more = "\nimport torch.ao.quantization.fx._decomposed  # the operators of the program"
        return (
            f"import torch{more}",
            'module = torch.export.load(HERE / "{file}").module()',
            _TORCH_RUN,
        )
    load = 'module = torch.jit.load(str(HERE / "{file}"), map_location="cpu")'
    if engine is not None and engine not in ENGINES:  # a store says so, and it becomes code
        raise TrackingError(f"engine: got {engine!r}, takes {' | '.join(ENGINES)}")
    if engine is not None:
        load = f"torch.backends.quantized.engine = {engine!r}  # as it was measured\n{load}"
    return "import torch", load, _TORCH_RUN


def steps(vectors: Vectors) -> list[str]:
    """Return the preprocessing as lines of Python, from `samples` to `values`."""
    done, integers = vectors.preprocessing, vectors.inputs.dtype.kind in "iub"
    lines = ["values = samples" if integers else "values = samples.astype(np.float64)"]
    if done.bgr:
        lines.append("values = values[..., ::-1]  # the channels from RGB to BGR")
    factor = done.step * done.scale
    if (done.offset, factor) != (0, 1):
        lines.append(f"values = (values - {done.offset!r}) * {factor!r}")
    if (set(done.mean), set(done.std)) != ({0.0}, {1.0}):
        lines.append(f"values = (values - {list(done.mean)!r}) / {list(done.std)!r}")
    if vectors.layout is not None:
        rank = vectors.samples.ndim - 1
        if len(vectors.layout) > rank:
            lines.append("values = values[..., np.newaxis]")
        elif len(vectors.layout) < rank:
            lines.append("values = values[..., 0]")
        axes = (0, *(axis + 1 for axis in vectors.layout))
        lines.append(f"values = values.transpose({', '.join(map(str, axes))})")
    return lines


def reads_pictures(source: Source, vectors: Vectors) -> bool:
    """Tell whether the samples are made of picture files, which the example then reads."""
    made = source.config.preprocess.size is not None or source.config.data.name in _OF_PICTURES
    return made and vectors.samples is not vectors.inputs


def _picture(source: Source) -> dict[str, Any]:
    """Return how a picture file becomes a sample."""
    mode = "L" if source.config.preprocess.channels == "grey" else "RGB"
    return {"mode": mode, "lines": resizing(source.config.preprocess, mode)}


def resizing(preprocess: PreprocessConfig, mode: str) -> list[str]:
    """Return what `data.pictures.fit` does, as lines of Python on `picture`."""
    if preprocess.size is None:
        return []
    size = preprocess.size
    height, width = size if isinstance(size, list) else (size, size)
    how = f"Image.Resampling.{preprocess.filter.upper()}"
    if preprocess.resize == "squash":
        return [f"picture = picture.resize(({width}, {height}), {how})"]
    if preprocess.resize == "fit":
        return [f"picture = ImageOps.fit(picture, ({width}, {height}), {how})"]
    if preprocess.resize == "letterbox":
        ground = (preprocess.pad,) * len(mode)
        centring = (0.5, 0.5) if preprocess.align == "center" else (0.0, 0.0)
        return [
            f"picture = ImageOps.pad(picture, ({width}, {height}), {how}, {ground}, {centring})"
        ]
    return [
        f"scale = max({width} / picture.width, {height} / picture.height)",
        f"scale = scale / {preprocess.crop_fraction!r}",
        "whole = (round(scale * picture.width), round(scale * picture.height))",
        f"picture = picture.resize(whole, {how})",
        f"left, top = (whole[0] - {width}) // 2, (whole[1] - {height}) // 2",
        f"picture = picture.crop((left, top, left + {width}, top + {height}))",
    ]


def requirements(suffix: str, pictures: bool) -> list[str]:
    """Return what the example needs, pinned to what is installed here."""
    from importlib.metadata import version

    names = [library_of(suffix), "numpy", *(["pillow"] if pictures else [])]
    # Without what names a build of torch, such as `+cpu`: registries have the number alone.
    return [f"{name}=={version(name).partition('+')[0]}" for name in names]


def verify(folder: Path, more: Vectors | None = None) -> str:
    """Run the example of a folder in a fresh virtual environment; return what it prints.

    Args:
        more: samples to check besides those in the folder.

    Raises:
        QuantizationError: the environment cannot be made, or the example fails in it.
    """
    with tempfile.TemporaryDirectory() as home:
        python = Path(home, "bin" if os.name == "posix" else "Scripts", "python")
        _call([sys.executable, "-m", "venv", home], "the virtual environment cannot be made")
        install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-r"]
        failed = f"{REQUIREMENTS} cannot be installed; verify=false leaves the check out"
        _call([str(python), *install, str(folder / REQUIREMENTS)], failed)
        said = run(python, folder)
        if more is not None:
            copy = Path(shutil.copytree(folder, Path(home, "more")))
            more.save(copy / VECTORS)
            said += f"\n{run(python, copy)}"
        return said


def run(python: Path | str, folder: Path) -> str:
    """Run the example of a folder with an interpreter, which sees nothing but its own packages.

    Raises:
        QuantizationError: it fails.
    """
    return _call([str(python), "-I", str(folder / FILE)], f"{FILE} fails")


def _call(command: Sequence[str], failed: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise QuantizationError(f"{failed} ({printable(' '.join(said))})")
    return done.stdout.strip()
