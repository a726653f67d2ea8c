"""Programs that torch would load: those made to harm are refused before any of it runs."""

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from resnet8ptq.backends.torch import program as exported
from resnet8ptq.backends.torch.torchscript import Example
from resnet8ptq.core.errors import QuantizationError
from resnet8ptq.models.gates import torch_archive
from tests.helpers.quantized import Quantize
from tests.helpers.torch_archives import forge

IMAGES = np.zeros((2, 32, 32, 3), np.float32)


@pytest.fixture
def program(quantize: Quantize) -> Path:
    """An exported program of ours."""
    return quantize("backend=torch_pt2e").artifact.path


def refused(path: Path, says: str = "") -> None:
    before = set(path.parent.iterdir())
    with pytest.raises(QuantizationError, match=re.escape(f"{path}: ")) as caught:
        exported.load(path)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(QuantizationError):
        exported.count_layers(path)
    assert set(path.parent.iterdir()) == before  # nothing ran


def test_a_program_that_calls_the_system_is_refused_before_it_does(program, tmp_path):
    target = tmp_path / "target"

    def plant(records: dict[str, bytes]) -> None:
        model = json.loads(records["archive/models/model.json"])
        nodes = model["graph_module"]["graph"]["nodes"]
        [relu, *_] = [n for n in nodes if n["target"] == "torch.ops.aten.relu.default"]
        relu["target"] = "torch.os.system"
        relu["inputs"] = [{"name": "", "arg": {"as_string": f"touch {target}"}, "kind": 1}]
        records["archive/models/model.json"] = json.dumps(model).encode()

    path = forge(program, tmp_path / "model.pt2", plant)
    refused(path, "archive/models/model.json: ")
    assert not target.exists()


def test_only_operators_of_inference_are_allowed():
    """None that torch has of them takes a file's name, or memory from elsewhere."""
    for name in ("save", "from_file", "set_", "resize_", "as_strided", "_reinterpret_tensor"):
        assert not torch_archive.is_allowed("aten", name)
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if "::" in schema.name]
    allowed = [s for s in schemas if torch_archive.is_allowed(*s.name.split("::", 1))]
    assert len(allowed) > 200
    files = ("file", "path", "url", "library")
    texts = [a.name for s in allowed for a in s.arguments if str(a.type) == "str"]
    assert not [name for name in texts if any(part in name for part in files)]


# Operators that ONNX has, and a network of inference has no use for.
REFUSED = {
    "unchecked indices or strides": """as_strided sym_storage_offset _unsafe_index
        _unsafe_index_put _grouped_mm embedding_bag _embedding_bag _embedding_bag_forward_only""",
    "sizes that torch does not check": """_fft_c2c _fft_c2r _fft_r2c _weight_norm
        _weight_norm_interface _native_batch_norm_legit_no_training
        _scaled_dot_product_flash_attention_for_cpu""",
    "memory without values": "empty empty_like empty_strided new_empty new_empty_strided",
    "random values": """bernoulli multinomial native_dropout normal normal_functional rand rand_like
        randint randint_like randn randn_like""",
    "training": """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        cross_entropy_loss embedding_renorm hardtanh_backward nll_loss nll_loss_forward""",
    "quantized already": "fake_quantize_per_channel_affine fake_quantize_per_tensor_affine",
    "kernels of other devices": """_scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention""",
    "statistics": "bincount histc _unique tensor",
}


def test_operators_that_torch_converts_to_onnx_are_allowed():
    """A network of a library uses any of them; those of `REFUSED` have a reason."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    convertible = set()
    for target in ONNXRegistry.from_torchlib().functions:
        namespace, _, name = str(target).partition("::")
        if namespace == "aten":
            convertible.add(name.partition(".")[0])
    assert len(convertible) > 300
    expected = set()
    for names in REFUSED.values():
        expected.update(names.split())
    refused = {name for name in convertible if not torch_archive.is_allowed("aten", name)}
    assert refused == expected & convertible


# Archives


@pytest.mark.parametrize(
    "name",
    ["archive/../../x", "/etc/x", "archive/code/x.so", "other/data.pkl", "archive/extra/model.pkl"],
)
def test_another_record_is_refused(program, tmp_path, name):
    path = tmp_path / "model.pt2"
    refused(forge(program, path, lambda records: records.update({name: b"x"})), name)


def test_one_name_for_two_records_is_refused(program, tmp_path):
    """Two readers of the archive may take different ones."""
    path = tmp_path / "model.pt2"
    path.write_bytes(program.read_bytes())
    for name in ("archive/byteorder", "archive/BYTEORDER"):
        with (
            zipfile.ZipFile(path, "a") as archive,
            pytest.warns() if name.islower() else (pytest.MonkeyPatch.context()),
        ):
            archive.writestr(name, b"")
        refused(path)
        path.write_bytes(program.read_bytes())


@pytest.mark.slow
def test_torch_reads_what_was_checked_and_not_the_file(program, tmp_path):
    """Whatever lies around the archive, or in front of it, is not there for torch."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"PK\x03\x04 something else" + program.read_bytes())
    output = exported.load(path).predict(IMAGES)[0]
    assert np.array_equal(output, exported.load(program).predict(IMAGES)[0])


def test_a_bomb_is_refused_before_it_unpacks(program, tmp_path):
    path = tmp_path / "model.pt2"
    path.write_bytes(program.read_bytes())
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("archive/data/weights/model_more_config.json", "w") as record,
    ):
        for _ in range(130):
            record.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    refused(path, "more data than an artifact has")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a zip", bytes(1000)])
def test_what_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    refused(path, "not an archive, or damaged")


# Programs


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"torch.ops.aten.relu.default"', '"torch.os.system"'),
        ('"torch.ops.aten.relu.default"', '"torch.load"'),
        ('"torch.ops.aten.relu.default"', '"torch.ops.aten.from_file.default"'),
        ('"torch.ops.aten.relu.default"', '"torch.ops.load_library"'),
        ('"torch.ops.aten.relu.default"', '"math.__loader__.load_module"'),
        ('"torch.ops.aten.relu.default"', '"_operator.attrgetter"'),
        ('"torch.ops.aten.relu.default"', '"#extension:evil"'),
        ('"torch.ops.aten.relu.default"', '["torch.os.system"]'),
        ('"as_float": 255.0', '"as_operator": "torch.os.system"'),
        ('"input_1"', "\"x=__import__('os').system('id')\""),
        ('"input_1"', '"x\\n    y"'),
        ("builtins.tuple", "builtins.eval(1)"),
        ('"is_hop_single_tensor_return"', '"metadata": {"a": "b"}, "x"'),
        ("Symbol('s6', positive=True, integer=True)", "Symbol('s6') + __import__('os')"),
        ("Symbol('s6', positive=True, integer=True)", "9**9**9**9"),
        ("Symbol('s6', positive=True, integer=True)", "9" * 40 + "!"),  # no match, and at once
        ("{", "[" * 100_000),
    ],
)
def test_a_program_that_names_more_than_operators_is_refused(program, tmp_path, old, new):
    def plant(records: dict[str, bytes]) -> None:
        text = records["archive/models/model.json"].decode()
        if old == '"as_float": 255.0':
            changed = re.sub(r'"as_float": [\d.e-]+', new, text, count=1)
        else:
            changed = text.replace(old, new)
        assert changed != text
        records["archive/models/model.json"] = changed.encode()

    refused(forge(program, tmp_path / "model.pt2", plant))


def test_weights_of_another_file_are_refused(program, tmp_path):
    name = "archive/data/weights/model_weights_config.json"

    def plant(records: dict[str, bytes]) -> None:
        records[name] = records[name].replace(b'"weight_0"', b'"../../../etc/passwd"')

    refused(forge(program, tmp_path / "model.pt2", plant), "path_name")


MANY = (
    *("Sigmoid", "HardSwish", "LeakyRelu", "Tanh", "Elu", "Abs", "Exp", "Sqrt", "Neg", "Erf"),
    *("Softplus", "Selu", "HardSigmoid", "Round", "Floor", "Identity", "Reciprocal", "Softsign"),
)


def test_networks_of_others_are_loaded(shapes_model, tmp_path):
    """What onnx2torch makes of ordinary operators is among those allowed."""
    from resnet8ptq.graph.torch_module import load_torch_module

    proto = onnx.load(shapes_model.onnx_path)
    graph = proto.graph
    last = graph.node[-1]
    name = last.input[0]
    added = [helper.make_node("Clip", [name, "low", "high"], ["x"], name="clip")]
    graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(v, np.float32), n)
        for n, v in (("low", 0.1), ("high", 3.0))
    )
    for index, kind in enumerate(MANY):
        added.append(helper.make_node(kind, ["x" * (index + 1)], ["x" * (index + 2)], name=kind))
    ends = "x" * (len(MANY) + 1)
    added.append(helper.make_node("Concat", [ends, ends], ["two"], axis=1, name="concat"))
    added.append(helper.make_node("Split", ["two"], ["l", "r"], axis=1, num_outputs=2, name="cut"))
    added.append(helper.make_node("Max", ["l", "r"], ["larger"], name="max"))
    added.append(helper.make_node("ReduceMean", ["larger"], ["mean"], axes=[1], name="mean"))
    added.append(helper.make_node("Sub", ["larger", "mean"], ["less"], name="sub"))
    last.input[0] = "less"
    graph.node.remove(last)
    graph.node.extend([*added, last])
    for node in graph.node:
        if node.name == "cut":
            node.attribute.remove(next(a for a in node.attribute if a.name == "num_outputs"))
    path = tmp_path / "many.onnx"
    onnx.save(proto, path)
    example = Example((torch.zeros(1, 32, 32, 3),), (False,))
    exported.save(load_torch_module(path), example, tmp_path / "many.pt2")
    assert exported.load(tmp_path / "many.pt2").predict(IMAGES)[0].shape == (2, 10)
