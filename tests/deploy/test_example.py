"""The code of a deployed example: its preprocessing and its execution provider."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import parser
from PIL import Image

from resnet8ptq.data import pictures
from resnet8ptq.data.preprocessing import Preprocessing, arrange
from resnet8ptq.deploy import example
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import Vectors
from tests.helpers.configs import make_config


@pytest.mark.parametrize("resize", ["squash", "fit", "crop", "letterbox"])
def test_example_reads_pictures_as_runs_do(resize, tmp_path):
    random = np.random.default_rng(0)
    Image.fromarray(random.integers(0, 256, (37, 61, 3), np.uint8)).save(tmp_path / "a.png")
    config = make_config("data=shapes", "preprocess.size=[24,32]", f"preprocess.resize={resize}")
    lines = "\n    ".join(example.resizing(config.preprocess, "RGB"))
    code = (
        "import numpy as np\nfrom PIL import Image, ImageOps\ndef read(path):\n"
        "    picture = ImageOps.exif_transpose(Image.open(path)).convert('RGB')\n"
        f"    {lines}\n    return np.asarray(picture)\n"
    )
    names: dict[str, object] = {}
    exec(code, names)
    result = names["read"](tmp_path / "a.png")
    np.testing.assert_array_equal(result, pictures.decode(tmp_path / "a.png", config.preprocess))


def render_reader(tmp_path, config, channels):
    """The example's function that reads a picture file."""
    samples = np.zeros((1, 24, 32, channels), np.uint8)
    inputs = samples.astype(np.float32)
    vectors = Vectors(samples, inputs, (inputs,), (0.0,), Preprocessing(), None)
    record = SimpleNamespace(engine="", class_names=None)
    source = SourceRun(record, config, tmp_path / "model.onnx")
    code = example.render_example(source, vectors=vectors, file="model.onnx", outputs=["y"])
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    [reader] = [node for node in functions if node.name == "read_picture"]
    names = {"np": np}
    exec(ast.unparse(reader), names)
    return names["read_picture"]


MODES = {
    "16 bits": lambda random: Image.fromarray(random.integers(0, 2**16, (37, 61), np.uint16)),
    "palette": lambda random: Image.fromarray(
        random.integers(0, 256, (37, 61, 3), np.uint8)
    ).quantize(),
    "alpha": lambda random: Image.fromarray(random.integers(0, 256, (37, 61, 4), np.uint8)),
    "two colours": lambda random: Image.fromarray(random.integers(0, 2, (37, 61)) > 0),
}


@pytest.mark.parametrize("channels", ["grey", "rgb"])
@pytest.mark.parametrize("kind", MODES)
def test_example_reads_each_mode_as_runs_do(kind, channels, tmp_path):
    path = tmp_path / "a.png"
    MODES[kind](np.random.default_rng(0)).save(path)
    words = ("data=shapes", "preprocess.size=[24,32]", f"preprocess.channels={channels}")
    config = make_config(*words)
    read = render_reader(tmp_path, config, channels=1 if channels == "grey" else 3)
    np.testing.assert_array_equal(read(path), pictures.decode(path, config.preprocess))


@pytest.mark.parametrize("layout", [None, (2, 0, 1)])
def test_example_preprocesses_as_runs_do(layout):
    steps = Preprocessing(3.0, 0.5, True, 1 / 255, (0.4, 0.5, 0.6), (0.2, 0.3, 0.1))
    samples = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
    expected = np.ascontiguousarray(arrange(steps.apply(samples), layout))
    vectors = Vectors(samples, expected, (), (), steps, layout)
    names: dict[str, object] = {"np": np, "samples": samples}
    exec("\n".join(example.steps(vectors)), names)
    np.testing.assert_array_equal(np.asarray(names["values"]).astype(np.float32), expected)


# ONNX Runtime with a provider that starts, or does not.
PROVIDED = """
class SessionOptions: pass
class Value: name = "x"
class InferenceSession:
    def __init__(self, path, options, providers): self.providers = providers[{left_out}:]
    def get_inputs(self): return [Value]
    def get_providers(self): return self.providers
    def run(self, names, feeds): print("ran on", self.providers[0]); return [feeds["x"]]
"""


@pytest.mark.parametrize("starts", [True, False])
def test_example_runs_on_the_provider_of_the_run(starts, tmp_path):
    config = make_config("data=shapes", "backend.provider=CUDAExecutionProvider")
    record = SimpleNamespace(engine="", class_names=None)
    source = SourceRun(record, config, tmp_path / "model.onnx")
    samples = np.ones((2, 3), np.float32)
    vectors = Vectors(samples, samples, (samples,), (0.0,), Preprocessing(), None)
    vectors.save(tmp_path / "test_vectors.npz")
    (tmp_path / "onnxruntime.py").write_text(PROVIDED.format(left_out=int(not starts)))
    code = example.render_example(source, vectors=vectors, file="model.onnx", outputs=["y"])
    (tmp_path / "example.py").write_text(code)
    words = [sys.executable, str(tmp_path / "example.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"ran on {'CUDA' if starts else 'CPU'}ExecutionProvider" in done.stdout
    assert ("CUDAExecutionProvider is missing here" in done.stderr) == (not starts)


def test_example_compares_booleans_and_unsigned_integers(tmp_path):
    """The difference of two booleans is an error in NumPy; that of uint8 0 and 1 would be 255."""
    head = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 2] x)'
    outs = "(bool[n, 2] a, uint8[n, 2] b)"
    body = "a = IsNaN(x)  b = Cast <to = 2> (x)"
    onnx.save(parser.parse_model(f"{head} => {outs} {{ {body} }}"), tmp_path / "model.onnx")
    inputs = np.zeros((1, 2), np.float32)
    outputs = (np.zeros((1, 2), np.bool_), np.ones((1, 2), np.uint8))
    vectors = Vectors(inputs, inputs, outputs, (0.0, 1.0))
    vectors.save(tmp_path / "test_vectors.npz")
    record = SimpleNamespace(engine="", class_names=None)
    source = SourceRun(record, make_config("data=shapes"), tmp_path / "model.onnx")
    code = example.render_example(source, vectors, file="model.onnx", outputs=["a", "b"])
    (tmp_path / example.FILE).write_text(code)
    shown = example.run_example(sys.executable, tmp_path)
    assert "largest difference 0 " in shown and "largest difference 1 " in shown
