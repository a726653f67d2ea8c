"""Archives that torch would load: those made to harm are refused before any of it runs."""

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Cell, Quantize
from onnx import helper

from resnet8ptq.backends.torch import archive as torch_archive
from resnet8ptq.backends.torch import program as torch_program
from resnet8ptq.backends.torch import torchscript, torchscript_check
from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.core.errors import QuantizationError

IMAGES = np.zeros((2, 32, 32, 3), np.float32)


@pytest.fixture
def script(quantize: Quantize) -> Path:
    """A TorchScript file of ours."""
    return quantize("backend=torch").artifact.path


@pytest.fixture
def program(quantize: Quantize) -> Path:
    """An exported program of ours."""
    return quantize("backend=torch_pt2e").artifact.path


def forge(source: Path, target: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """Copy an archive with its records changed in place."""
    with zipfile.ZipFile(source) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    target.write_bytes(torch_archive.pack(records).getvalue())
    return target


def refused(path: Path, says: str = "") -> None:
    module = torch_program if path.suffix == ".pt2" else torchscript
    before = set(path.parent.iterdir())
    with pytest.raises(QuantizationError, match=re.escape(f"{path}: ")) as caught:
        module.load(path)
    assert says in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(QuantizationError):
        module.count_quantized_layers(path)
    assert set(path.parent.iterdir()) == before  # nothing ran


# What torch itself writes


class SavesAsItPredicts(torch.nn.Module):
    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        torch.save(images, self.target)
        return images


class SavesAsItLoads(torch.nn.Module):
    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.target, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.target = state[0]
        self.training = state[1]
        torch.save(torch.zeros(1), state[0])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images


@pytest.mark.parametrize("kind", [SavesAsItPredicts, SavesAsItLoads])
def test_a_script_that_writes_a_file_is_refused_before_it_does(tmp_path: Path, kind: type) -> None:
    target, path = tmp_path / "target", tmp_path / "model.pt"
    with known_warnings():
        scripted = torch.jit.script(kind(str(target)))
        content = io.BytesIO()
        torch.jit.save(scripted, content)
        path.write_bytes(content.getvalue())
        target.unlink(missing_ok=True)
        refused(path, "calls torch.save")
        assert not target.exists()
        torch.jit.load(path)(torch.zeros(1))  # unguarded, it does act
    assert target.exists()


def test_a_program_that_calls_the_system_is_refused_before_it_does(
    program: Path, tmp_path: Path
) -> None:
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


# Code


@pytest.mark.parametrize(
    "code",
    [
        'torch.save(images, "target")',
        '(images).save("target")',
        'ops.aten.save(images, "target")',
        'torch.from_file("target", True, 4)',
        'ops.aten.from_file("target", True, 4)',
        "ops.prim.PythonOp(images)",
        "ops.profiler._record_function_enter(images)",
        "ops.quantized.make_quantized_cell_params(images)",
        "torch.as_strided(images, [1000000], [1])",
        "torch.set_(images, images)",
        "save(images)",
        '(getattr(torch, "save"))(images)',
        "(ops.aten).save(images)",
        "__torch__.torch.classes.xnnpack.LinearOpContext(images)",
        "__torch__.torch.classes.quantized.Conv2dPackedParamsBase.__init__(images)",
        "[torch.save][0](images)",
    ],
)
def test_code_that_calls_another_operator_is_refused(
    script: Path, tmp_path: Path, code: str
) -> None:
    path = forge(script, tmp_path / "model.pt", lambda records: plant_line(records, f"x = {code}"))
    refused(path, "calls ")


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "while True:\n      pass",
        "for i in [1]:\n      pass",
        "f = lambda x: x",
        "torch = ops.aten",
        "ops = self",
        "# a comment",
        "x = 'quotes'",
        'x = "\\x41"',
        'x = """long"""',
        'x = f"{images}"',
        "x = __torch__.torch.classes.xnnpack.LinearOpContext",
        "x = 1 +",
        "x = " + "(" * 5000 + ")" * 5000,
        "x = \r1",
        "x = \x00",
        "ä = 1",
    ],
)
def test_code_of_another_kind_is_refused(script: Path, tmp_path: Path, line: str) -> None:
    refused(forge(script, tmp_path / "model.pt", lambda records: plant_line(records, line)))


def plant_line(records: dict[str, bytes], line: str) -> None:
    """Put a line at the start of the network's `forward`."""
    [name] = [n for n in records if n.endswith(".py") and b"def forward" in records[n]]
    head, sign, body = records[name].partition(b"-> Tensor:\n")
    assert sign
    records[name] = head + sign + f"    {line}\n".encode() + body


def test_only_operators_of_inference_are_allowed() -> None:
    """None that torch has of them takes a file's name, or memory from elsewhere."""
    for name in ("save", "from_file", "set_", "resize_", "as_strided", "_reinterpret_tensor"):
        assert not archive.is_allowed("aten", name)
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if "::" in schema.name]
    allowed = [s for s in schemas if archive.is_allowed(*s.name.split("::", 1))]
    assert len(allowed) > 200
    files = ("file", "path", "url", "library")
    texts = [a.name for s in allowed for a in s.arguments if str(a.type) == "str"]
    assert not [name for name in texts if any(part in name for part in files)]


# Pickles


def tensor(item: str, key: str, items: int, offset: int, shape: str, strides: str) -> bytes:
    """The pickle of one tensor, as text opcodes that C++ does not read, too."""
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storage"
        + f"ctorch\n{item}Storage\n".encode()
        + b"X"
        + struct.pack("<I", len(key))
        + key.encode()
        + b"X\x03\x00\x00\x00cpu"
        + b"J"
        + struct.pack("<i", items)
        + b"tQJ"
        + struct.pack("<i", offset)
        + pickle_tuple(shape)
        + pickle_tuple(strides)
        + b"\x89ccollections\nOrderedDict\n)RtR\x85."
    )


def pickle_tuple(numbers: str) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", int(n)) for n in numbers.split()) + b"t"


def test_a_tensor_within_its_record_is_taken(script: Path, tmp_path: Path) -> None:
    content = tensor("Float", "9", 3, 1, "2", "1")

    def plant(records: dict[str, bytes]) -> None:
        records["archive/constants.pkl"] = content
        records["archive/constants/9"] = bytes(12)

    torchscript_check.read(forge(script, tmp_path / "model.pt", plant))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (tensor("Float", "9", 3, 2, "2", "1"), "beyond its record"),
        (tensor("Float", "9", 3, 0, "2", "1000"), "beyond its record"),
        (tensor("Float", "9", 3, -1, "2", "1"), "of no size"),
        (tensor("Float", "9", 3, 0, "2", "-1"), "of no size"),
        (tensor("Float", "9", 4, 0, "2", "1"), "is not what it says"),
        (tensor("Double", "9", 3, 0, "2", "1"), "is not what it says"),
        (tensor("Float", "8", 3, 0, "2", "1"), "is not what it says"),
        (tensor("Evil", "9", 3, 0, "2", "1"), "asks for torch.EvilStorage"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.", "asks for os.system"),
        (b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.", "asks for builtins.eval"),
        (b"\x80\x02c__torch__.torch.classes.xnnpack\nConv2dOpContext\n)\x81.", "asks for "),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "opcode SHORT_BINUNICODE"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a memo larger than the file"),
        (b"(S'id'\nios\nsystem\n.", "opcode STRING"),
        (b"\x80\x02", "not a program"),
        (b"", "not a program"),
    ],
)
def test_a_pickle_that_asks_for_more_is_refused(
    script: Path, tmp_path: Path, content: bytes, says: str
) -> None:
    def plant(records: dict[str, bytes]) -> None:
        records["archive/constants.pkl"] = content
        records["archive/constants/9"] = bytes(12)

    refused(forge(script, tmp_path / "model.pt", plant), says)


# Archives


@pytest.mark.parametrize(
    "name",
    ["archive/../../x", "/etc/x", "archive/code/x.so", "other/data.pkl", "archive/extra/model.pkl"],
)
def test_another_record_is_refused(script: Path, program: Path, tmp_path: Path, name: str) -> None:
    for source in (script, program):
        path = tmp_path / f"model{source.suffix}"
        refused(forge(source, path, lambda records: records.update({name: b"x"})), name)


def test_one_name_for_two_records_is_refused(script: Path, tmp_path: Path) -> None:
    """Two readers of the archive may take different ones."""
    path = tmp_path / "model.pt"
    path.write_bytes(script.read_bytes())
    for name in ("archive/data.pkl", "archive/DATA.PKL"):
        with (
            zipfile.ZipFile(path, "a") as archive,
            pytest.warns() if name.islower() else (pytest.MonkeyPatch.context()),
        ):
            archive.writestr(name, b"")
        refused(path)
        path.write_bytes(script.read_bytes())


def test_torch_reads_what_was_checked_and_not_the_file(script: Path, tmp_path: Path) -> None:
    """Whatever lies around the archive, or in front of it, is not there for torch."""
    path = tmp_path / "model.pt"
    path.write_bytes(b"PK\x03\x04 something else" + script.read_bytes())
    found = torchscript.load(path).predict(IMAGES)
    assert np.array_equal(found, torchscript.load(script).predict(IMAGES))


def test_a_bomb_is_refused_before_it_unpacks(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(program.read_bytes())
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("archive/data/weights/model_more_config.json", "w") as record,
    ):
        for _ in range(130):
            record.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    refused(path, "more than can be")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a zip", bytes(1000)])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("model.pt", "model.pt2"):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "not an archive, or damaged")


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
def test_a_program_that_names_more_than_operators_is_refused(
    program: Path, tmp_path: Path, old: str, new: str
) -> None:
    def plant(records: dict[str, bytes]) -> None:
        text = records["archive/models/model.json"].decode()
        if old == '"as_float": 255.0':
            changed = re.sub(r'"as_float": [\d.e-]+', new, text, count=1)
        else:
            changed = text.replace(old, new)
        assert changed != text
        records["archive/models/model.json"] = changed.encode()

    refused(forge(program, tmp_path / "model.pt2", plant))


def test_weights_of_another_file_are_refused(program: Path, tmp_path: Path) -> None:
    name = "archive/data/weights/model_weights_config.json"

    def plant(records: dict[str, bytes]) -> None:
        records[name] = records[name].replace(b'"weight_0"', b'"../../../etc/passwd"')

    refused(forge(program, tmp_path / "model.pt2", plant), "path_name")


# What we write is not refused


@pytest.mark.parametrize(
    "overrides",
    [
        ("backend=torch", "backend.freeze=false", "backend.debug_records=true"),
        ("backend=torch", "backend.freeze=false"),
        ("backend=torch", "per_channel=true"),
        ("backend=torch", "method=dynamic", "backend.freeze=false"),
        ("backend=torch", "dtype=fp32"),
    ],
    ids=" ".join,
)
def test_every_kind_of_ours_is_loaded(quantize: Quantize, overrides: tuple[str, ...]) -> None:
    cell: Cell = quantize(*overrides)
    assert cell.predict(images=2).shape == (2, 10)


MANY = (
    *("Sigmoid", "HardSwish", "LeakyRelu", "Tanh", "Elu", "Abs", "Exp", "Sqrt", "Neg", "Erf"),
    *("Softplus", "Selu", "HardSigmoid", "Round", "Floor", "Identity", "Reciprocal", "Softsign"),
)


def test_networks_of_others_are_loaded(shapes_model, tmp_path: Path) -> None:
    """What onnx2torch makes of ordinary operators is among those allowed, in both files."""
    from resnet8ptq.backends.torch import pt2e
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
    example = torch.zeros(1, 32, 32, 3)
    for freeze in (True, False):
        script = tmp_path / f"{freeze}.pt"
        torchscript.save(load_torch_module(path), example, script, freeze)
        assert torchscript.load(script).predict(IMAGES).shape == (2, 10)
    pt2e.save(pt2e.export(load_torch_module(path), example), tmp_path / "many.pt2")
    assert torch_program.load(tmp_path / "many.pt2").predict(IMAGES).shape == (2, 10)
