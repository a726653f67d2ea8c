"""Networks that come as a SavedModel or a TFLite file.

TensorFlow is only imported by a process of its own, as in the package.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resnet8ptq.backends.file import tflite_file
from resnet8ptq.backends.tflite import contents
from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.session import open_runner
from resnet8ptq.models import conversion
from resnet8ptq.models.gates import tflite as tflite_gate
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.models.sources import formats
from tests.helpers import probe
from tests.helpers.configs import make_config
from tests.helpers.converted import record_of
from tests.helpers.factories import quantize_network, quantizer_of

SAMPLES = np.random.default_rng(0).normal(size=(12, 8, 6, 3)).astype(np.float32)

# Makes SavedModel folders and TFLite files, tries to convert each, and writes down what came of it.
PROBE = """
import json, os, shutil, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
from pathlib import Path
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tests.helpers.converted import attempt

folder = Path(sys.argv[1])
target, secret = folder / "target", folder / "secret"
secret.write_text("secret")
random = np.random.default_rng(0)
spec = tf.TensorSpec((None, 8, 6, 3), tf.float32)


class Network(tf.Module):
    def __init__(self):
        super().__init__()
        self.filters = tf.Variable(random.normal(size=(3, 3, 3, 4)).astype(np.float32))
        self.dense = tf.Variable(random.normal(size=(4, 5)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 6, 3), tf.float32, name="features")])
    def sound(self, features):
        found = tf.nn.relu(tf.nn.conv2d(features, self.filters, 1, "SAME"))
        mean = tf.reduce_mean(found, (1, 2))
        return {"scores": tf.matmul(mean, self.dense), "mean": mean}

    @tf.function(input_signature=[spec])
    def reads(self, x):
        size = tf.strings.length(tf.io.read_file(str(secret)))
        return self.sound(x)["scores"] + tf.cast(size, tf.float32)

    @tf.function(input_signature=[spec])
    def writes(self, x):
        with tf.control_dependencies([tf.io.write_file(str(target), "x")]):
            return self.sound(x)["scores"] + 0

    @tf.function(input_signature=[spec])
    def trains(self, x):
        self.dense.assign_add(tf.ones_like(self.dense))
        return self.sound(x)["scores"]

    @tf.function(input_signature=[spec])
    def python(self, x):
        act = lambda y: (target.touch(), y)[1]
        scores = tf.py_function(act, [self.sound(x)["scores"]], tf.float32)
        return tf.ensure_shape(scores, (None, 5))

    @tf.function(input_signature=[spec, spec])
    def two_inputs(self, x, y):
        return self.sound(x + y)["scores"]

    @tf.function(input_signature=[spec])
    def asserts(self, x):
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), 1e6, "too large")
        return self.sound(x)["scores"]

    @tf.function(input_signature=[spec])
    def logits(self, x):
        return self.sound(x)["scores"]

    @tf.function(input_signature=[tf.TensorSpec((1, None, None, 3), tf.float32)])
    def free_sizes(self, x):
        found = tf.nn.relu(tf.nn.conv2d(x, self.filters, 1, "VALID"))  # needs 3 x 3 pixels
        return tf.matmul(tf.reduce_mean(found, (1, 2)), self.dense)


network = Network()
for name in ("sound", "asserts", "reads", "writes", "trains", "python", "two_inputs"):
    tf.saved_model.save(network, folder / name, signatures=getattr(network, name))


def forge(name, change):
    shutil.copytree(folder / "sound", folder / name)
    path = folder / name / "saved_model.pb"
    proto = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    change(proto.meta_graphs[0])
    path.write_bytes(proto.SerializeToString())


def restore_by_writing(meta):
    with tf.Graph().as_default() as graph:
        tf.raw_ops.WriteFile(filename=str(target), contents="x", name="evil")
    meta.graph_def.node.extend(graph.as_graph_def().node)
    meta.saver_def.restore_op_name = "evil"


def lead_nowhere(meta):
    meta.signature_def["serving_default"].outputs["scores"].name = "nowhere:0"


def forget_the_tag(meta):
    meta.meta_info_def.tags[:] = ["train"]


def restore_nodes(meta):
    for function in meta.graph_def.library.function:
        for node in function.node_def:
            if node.op == "RestoreV2":
                yield function.node_def, node


def name_other(nodes):
    other = nodes.add(name="other", op="Const")
    other.attr["dtype"].type = tf.string.as_datatype_enum
    path = folder / "sound" / "variables" / "variables"
    other.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(str(path)))


def restore_another(meta):
    for nodes, node in list(restore_nodes(meta)):
        name_other(nodes)
        node.input[0] = "other:output:0"


def restore_what_a_checkpoint_names(meta):
    for nodes, node in list(restore_nodes(meta)):
        again = nodes.add()
        again.CopyFrom(node)
        again.name, again.input[0] = "again", f"{node.name}:tensors:0"


def call_with_another(meta):
    name_other(meta.graph_def.node)
    called = meta.saver_def.restore_op_name
    for node in meta.graph_def.node:
        if node.name == called:
            node.input[0] = "other"
            node.input.append("^" + meta.saver_def.filename_tensor_name.split(":")[0])


forge("restores", restore_by_writing)
forge("other", restore_another)
forge("other_by_call", call_with_another)
forge("other_by_name", restore_what_a_checkpoint_names)
forge("piped", lambda meta: None)
os.mkfifo(folder / "piped" / "variables" / "more")
forge("nowhere", lead_nowhere)
forge("untagged", forget_the_tag)
shutil.copytree(folder / "sound", folder / "without_variables")
shutil.rmtree(folder / "without_variables" / "variables")
(folder / "damaged").mkdir()
(folder / "damaged" / "saved_model.pb").write_bytes(b"\\x0f" * 100)

tf.saved_model.save(network, str(folder / "logits"), signatures=network.logits)
converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "logits"))
(folder / "float.tflite").write_bytes(converter.convert())
converter.optimizations = [tf.lite.Optimize.DEFAULT]
converter.target_spec.supported_types = [tf.float16]
(folder / "float16.tflite").write_bytes(converter.convert())
converter.target_spec.supported_types = []
samples = random.normal(size=(12, 8, 6, 3)).astype(np.float32)
converter.representative_dataset = lambda: ([each] for each in samples[:, None])
(folder / "int8.tflite").write_bytes(converter.convert())

free = [network.free_sizes.get_concrete_function()]
converter = tf.lite.TFLiteConverter.from_concrete_functions(free, network)
(folder / "free_sizes.tflite").write_bytes(converter.convert())

report = {}
for path in sorted(folder.iterdir()):
    if path == secret or path.suffix == ".converted":
        continue
    report[path.name] = [*attempt(path, samples), target.exists()]
(folder / "report.json").write_text(json.dumps(report))
"""

Report = dict[str, tuple[str, str, bool]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what PROBE made."""
    folder = tmp_path_factory.mktemp("formats")
    probe.run(PROBE, folder)
    return folder


@pytest.fixture(scope="module")
def report(kept: Path) -> Report:
    """What came of each: the error's class and message, and whether hostile code ran."""
    return json.loads((kept / "report.json").read_text())


# SavedModel


@pytest.mark.slow
def test_a_saved_model_keeps_the_names_of_its_signature(kept, report):
    assert report["sound"] == ["", "", False]
    record = record_of(kept, "sound")
    assert [str(output) for output in record.contract.inputs] == ["features [8, 6, 3] float32"]
    assert [str(output) for output in record.contract.outputs] == [
        *("mean [4] float32", "scores [5] float32")
    ]
    assert record.final == "values"
    assert max(record.parity.values()) < 1e-5
    assert len(record.parity) == 4


def test_a_saved_model_may_check_its_values(report):
    assert report["asserts"] == ["", "", False]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("logits", ["dtype=fp32"]),
        ("logits", ["dtype=int8", "per_channel=true"]),
        ("float.tflite", ["dtype=fp32"]),
    ],
)
def test_tflite_takes_a_saved_model_and_files_of_its_own(kept, tmp_path, name, overrides, capfd):
    """Whatever is made returns what the network does, as near as 8 bits come."""
    samples = np.random.default_rng(1).normal(size=(40, 8, 6, 3)).astype(np.float32)
    result = record_of(kept, name)
    network = Fp32Model("own", kept / name, "", kept / "none", True, result)
    quantizer = quantizer_of(make_config("backend=tflite", *overrides))
    artifact = quantize_network(
        quantizer, network, Split(samples, np.zeros(40, np.int64), ""), tmp_path
    )
    text = capfd.readouterr().err
    assert "@defun" not in text and "trackable_obj" not in text
    onnx_path = kept / f"{name}.converted" / conversion.FOLDED
    [expected] = open_runner(str(onnx_path))(samples)
    got = quantizer.load(artifact.path, 1).predict(samples)
    quantized = overrides != ["dtype=fp32"]
    assert artifact.quantized_layers == (2 if quantized else 0)
    noise = np.abs(np.asarray(got).reshape(expected.shape) - expected).max()
    assert noise < (0.2 if quantized else 1e-5) * np.abs(expected).max()


def test_a_float_tflite_file_is_not_quantized_again(kept, tmp_path):
    network = Fp32Model("own", kept / "float.tflite", "", kept, True, record_of(kept, "logits"))
    split = Split(np.zeros((2, 8, 6, 3), np.float32), np.zeros(2, np.int64), "")
    quantizer = quantizer_of(make_config("backend=tflite"))
    with pytest.raises(
        UnsupportedError, match=r"got float\.tflite, expected a Keras file or a Saved"
    ):
        quantize_network(quantizer, network, split, tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("reads", "its operator 'ReadFile' is not an operator of inference"),
        ("writes", "its operator 'WriteFile' is not an operator of inference"),
        (
            "trains",
            "its operator 'AssignAddVariableOp' is not an operator of inference; expected "
            "operators that compute outputs from inputs and variables; in training mode? try "
            "Keras's model.save('NAME.keras')",
        ),
        ("python", "its operator 'EagerPyFunc' is not an operator of inference"),
        ("restores", "its operator 'WriteFile' is not an operator of inference"),
        ("other", "restores variables from another path"),
        ("other_by_call", "restores variables from another path"),
        ("other_by_name", "restores variables from another path"),
        (
            "two_inputs",
            "has 2 inputs (x [8, 6, 3] float32, y [8, 6, 3] float32), and the samples are one "
            "array; expected an array for each (data=arrays)",
        ),
        ("nowhere", "not a SavedModel ("),
        ("untagged", "has no graph tagged 'serve'"),
        ("without_variables", "cannot be converted ("),
        ("damaged", "not a SavedModel ("),
        ("piped", "variables/more is not a regular file"),
    ],
)
def test_a_saved_model_with_more_or_less_is_refused_before_it_runs(kept, report, name, says):
    kind, message, acted = report[name]
    assert not acted
    assert not list((kept / f"{name}.converted").iterdir())
    assert kind == "ModelError"
    assert message.startswith(f"{kept / name}: ")
    assert says in message
    assert "\n" not in message


# TFLite


def test_a_float_tflite_file_is_taken(kept, report):
    assert report["float.tflite"] == ["", "", False]
    record = record_of(kept, "float.tflite")
    assert record.contract.inputs[0].shape == (8, 6, 3)
    assert record.contract.outputs[0].shape == (5,)
    assert (record.final, record.contract.batch) == ("logits", None)
    assert max(record.parity.values()) < 1e-5


def test_the_samples_give_a_tflite_file_its_free_sizes(kept, report):
    assert report["free_sizes.tflite"] == ["", "", False]
    record = record_of(kept, "free_sizes.tflite")
    assert record.contract.inputs[0].shape == (8, 6, 3)
    assert max(record.parity.values()) < 1e-5


def test_float16_weights_of_a_tflite_file_are_widened(kept, report):
    assert report["float16.tflite"] == ["", "", False]
    assert max(record_of(kept, "float16.tflite").parity.values()) < 1e-5
    graph = onnx.load(kept / "float16.tflite.converted" / conversion.UNFOLDED).graph
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in graph.initializer}


def test_a_quantized_tflite_file_is_no_baseline(report):
    kind, message, _ = report["int8.tflite"]
    assert kind == "ModelError"
    assert "resnet8ptq judge FP32 FILE" in message
    assert "expected the FP32 model" in message


@pytest.mark.slow
def test_sparse_weights_of_a_tflite_file_are_refused_as_such(kept, tmp_path):
    network = contents.read_model((kept / "float16.tflite").read_bytes())
    weights = next(t for t in network.subgraphs[0].tensors if t.type == schema.TensorType.FLOAT16)
    weights.sparsity = schema.SparsityParametersT()
    (tmp_path / "sparse.tflite").write_bytes(contents.write_model(network))
    with pytest.raises(ModelError, match="are sparse; expected a file with dense"):
        tflite_gate.check(tmp_path / "sparse.tflite")


@pytest.mark.parametrize("kind", ["INT2", "UINT4", "INT4"])
def test_weights_of_few_bits_in_a_tflite_file_count_as_quantized(tmp_path, kind):
    weights = schema.TensorT()
    weights.name = b"weights"
    weights.shape = [2]
    weights.type = getattr(schema.TensorType, kind)
    weights.buffer = 1
    graph = schema.SubGraphT()
    graph.tensors = [weights]
    graph.inputs = graph.outputs = [0]
    graph.operators = []
    empty = schema.BufferT()
    stored = schema.BufferT()
    stored.data = np.ones(1, np.uint8)
    network = schema.ModelT()
    network.operatorCodes = []
    network.subgraphs = [graph]
    network.buffers = [empty, stored]
    path = tmp_path / "narrow.tflite"
    path.write_bytes(contents.write_model(network))
    with pytest.raises(ModelError, match=f"already quantized .{kind.lower()} weights"):
        tflite_gate.check(path)


@pytest.mark.parametrize("name", ["float16.tflite", "int8.tflite"])
def test_a_tflite_file_that_keeps_a_state_is_refused_as_such(kept, tmp_path, name):
    """As streaming networks of keywords do, in variables."""
    network = contents.read_model((kept / name).read_bytes())
    code = schema.OperatorCodeT()
    code.builtinCode = schema.BuiltinOperator.VAR_HANDLE
    code.deprecatedBuiltinCode = 127  # marks codes above 126
    network.operatorCodes.append(code)
    handle = schema.OperatorT()
    handle.opcodeIndex = len(network.operatorCodes) - 1
    handle.inputs = []
    handle.outputs = []
    network.subgraphs[0].operators.insert(0, handle)
    path = tmp_path / name
    path.write_bytes(contents.write_model(network))
    with pytest.raises(ModelError, match="keeps a state between calls"):
        tflite_gate.check(path)
    with pytest.raises(ModelError, match="keeps a state between calls"):
        tflite_file.fetch(path)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_tflite_file_is_refused_in_one_line_or_harmless(kept, tmp_path, data):
    content = bytearray((kept / "float.tflite").read_bytes())
    for sample in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
        content[sample] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "damaged.tflite"
    path.write_bytes(content[: data.draw(st.integers(8, len(content)))])
    try:
        tflite_gate.check(path)
    except ModelError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)


def test_the_formats_are_distinguished_by_name_and_first_bytes(kept, tmp_path):
    named = tmp_path / "network.ONNX"
    named.write_bytes(b"\x08\x08")
    program = tmp_path / "network.pt2"
    program.write_bytes(b"PK\x03\x04")
    for path, name in (
        (kept / "sound", "saved_model"),
        (kept / "float.tflite", "tflite"),
        (program, "exported_program"),
        (named, "onnx"),
        (kept, None),
        (kept / "report.json", None),
    ):
        result = formats.find_format(path)
        assert (result and result.name) == name
