"""Networks that come as an exported program or as a torch module."""

import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from resnet8ptq.core.errors import ModelError, ParityError
from resnet8ptq.graph.links import input_names, output_names
from resnet8ptq.models import conversion
from resnet8ptq.models.gates import exported_program as gate
from resnet8ptq.models.sources import torch_module
from resnet8ptq.models.sources.exported_program import from_program
from resnet8ptq.models.sources.exported_program import read as read_program
from tests.helpers import converted
from tests.helpers.configs import make_config  # noqa: F401  by its name
from tests.helpers.torch_archives import forge

SAMPLES = np.random.default_rng(0).normal(size=(12, 8, 6, 3)).astype(np.float32)


class Network(torch.nn.Module):
    """Takes [N, 3, 8, 6]; returns scores [N, classes]."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.dense = torch.nn.Linear(4 * 48, classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        result = torch.relu(self.norm(self.convolution(features)))
        return self.dense(result.view(result.shape[0], -1))


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    made = Network().eval()
    made.norm.running_mean.uniform_(-1, 1)
    return made


Take = Callable[..., conversion.Conversion]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Convert here, not in a process of its own."""

    def run(path: Path, module: str | None = None, **arguments: Any) -> conversion.Conversion:
        settings = {"module": module, "module_args": arguments}
        return converted.convert(path, tmp_path / "made", SAMPLES, **settings)

    return run


def export(network: Network, path: Path, batch: int | None) -> Path:
    features = torch.zeros(batch or 2, 3, 8, 6)
    free = ({0: torch.export.Dim("batch", min=1, max=64)},) if batch is None else None
    torch.export.save(torch.export.export(network, (features,), dynamic_shapes=free), path)
    return path


@pytest.fixture(scope="module")
def program(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose batch is fixed at 1, as it is where nothing is said."""
    return export(network, tmp_path_factory.mktemp("program") / "network.pt2", 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, None])
def test_an_exported_program_is_taken(take, network, program, tmp_path, batch):
    path = program if batch == 1 else export(network, tmp_path / "free.pt2", batch)
    record = take(path)
    assert [str(item) for item in record.contract.inputs] == ["features [3, 8, 6] float32"]
    assert record.contract.batch is None
    assert record.final == "logits"
    assert len(record.parity) == 4
    assert max(record.parity.values()) < 1e-5


class Blocks(torch.nn.Module):
    """Has what library code has around its layers; takes [N, 3, 8, 6]."""

    def __init__(self) -> None:
        super().__init__()
        normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(3, 4, 3, padding=1))
        self.convolution = normed
        self.dense = torch.nn.Linear(4, 5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = features.new_ones(1) * 2
        with torch.autocast("cpu", enabled=False):
            maps = self.convolution(features.float()) * scale
        empty = torch.empty_like(maps, memory_format=torch.contiguous_format).fill_(1)
        return self.dense((maps + empty + torch.empty(1).zero_()).mean((2, 3)))


def test_weight_normalization_is_spelled_out_in_operators_that_check_sizes(tmp_path):
    """torch's kernel for it writes beyond a scale that is too small."""
    network = Blocks().eval()
    path = export(network, tmp_path / "network.pt2", None)
    graph = gate.read_network(path)["archive/models/model.json"].decode()
    assert b"_weight_norm.default" in path.read_bytes()
    assert "_weight_norm.default" not in graph
    assert "norm_except_dim" in graph

    def shrink(records):
        [name] = [name for name in records if name.endswith("model.json")]
        records[name] = (
            records[name]
            .replace(b'"_weight_norm"', b'"other"')
            .replace(b'{"name": "g", ', b'{"name": "h", ')
        )

    with pytest.raises(ModelError, match=r"not a program of torch\.export"):
        gate.read_network(forge(path, tmp_path / "forged.pt2", shrink))


@pytest.mark.slow
def test_blocks_and_unfilled_memory_of_a_program_are_taken(take, tmp_path):
    path = export(Blocks().eval(), tmp_path / "network.pt2", None)
    record = take(path)
    assert [str(output) for output in record.contract.outputs] == ["linear [5] float32"]
    assert max(record.parity.values()) < 1e-5


def test_a_difference_of_the_exporter_names_the_other_exporter(take, program, monkeypatch):
    def differ(*_: object) -> None:
        raise ParityError("differs")

    monkeypatch.setattr(conversion, "_convert_network", differ)
    with pytest.raises(ParityError, match=r"differs; .*dynamo=False"):
        take(program)


@dataclass
class Scores:
    """Outputs as a library returns them."""

    logits: torch.Tensor
    hidden: torch.Tensor


@pytest.mark.slow
def test_outputs_in_a_class_of_a_library_are_taken(take, tmp_path):
    """The program names the class, which torch would import."""

    class Named(Network):
        def forward(self, features: torch.Tensor) -> Scores:
            return Scores(super().forward(features), features.mean((2, 3)))

    pytree = torch.utils._pytree
    pytree.register_dataclass(Scores, serialized_type_name=f"{__name__}.Scores")
    try:
        path = export(Named().eval(), tmp_path / "network.pt2", None)
    finally:
        pytree._deregister_pytree_node(Scores)
    record = take(path)
    assert [output.shape for output in record.contract.outputs] == [(5,), (3,)]


class Attention(torch.nn.Module):
    """Attention with a learned bias, as T5's and Swin's; takes [N, 3, 8, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 24)
        self.bias = torch.nn.Parameter(torch.ones(2, 1, 1))
        self.dense = torch.nn.Linear(8, 5)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        rows = features.flatten(2).transpose(1, 2).reshape(-1, 18, 8)
        query, key, value = self.project(rows).view(-1, 18, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = self.bias * torch.ones(18, 18)
        attend = torch.nn.functional.scaled_dot_product_attention
        return self.dense(
            attend(query, key, value, bias).transpose(1, 2).reshape(-1, 18, 8).mean(1)
        )


@pytest.mark.slow
def test_attention_with_a_learned_bias_is_taken(take, tmp_path):
    """Its output has another order in memory than the products that torch makes of it."""
    record = take(export(Attention().eval(), tmp_path / "network.pt2", None))
    assert [str(output) for output in record.contract.outputs] == ["linear_1 [5] float32"]
    assert max(record.parity.values()) < 1e-5


def test_an_operator_without_onnx_is_named(tmp_path):
    class Inverse(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.pinv(x)

    program = torch.export.export(Inverse(), (torch.ones(2, 3, 3),))
    with pytest.raises(ModelError, match="linalg_pinv") as caught:
        from_program(program, tmp_path / "a.pt2", np.ones((2, 3, 3), np.float32))
    assert "\x1b" not in str(caught.value)


def test_memory_of_a_program_is_filled_with_zeros(tmp_path):
    """It would hold what the process had there before."""
    path = export(Blocks().eval(), tmp_path / "network.pt2", None)
    graph = gate.read_network(path)["archive/models/model.json"].decode()
    assert "empty" in str(torch.export.load(path).graph)
    assert "aten.empty" not in graph
    assert "aten.zeros_like.default" in graph


class Touches:
    """Unpickled, it touches a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.target,)


def plant_samples(records: dict[str, bytes], target: Path) -> None:
    [name] = [name for name in records if "sample_inputs" in name]
    records[name] = pickle.dumps(Touches(target))


@pytest.mark.slow
def test_pickled_samples_of_a_program_are_never_unpickled(take, program, tmp_path):
    target = tmp_path / "target"
    path = forge(program, tmp_path / "a.pt2", lambda records: plant_samples(records, target))
    assert take(path).final == "logits"
    assert not target.exists()


def hostile_changes(target: Path) -> Iterator[tuple[str, Callable[[dict[str, bytes]], None]]]:
    def graph(old: str, new: str) -> Callable[[dict[str, bytes]], None]:
        def change(records: dict[str, bytes]) -> None:
            [name] = [name for name in records if name.endswith("models/model.json")]
            changed = records[name].decode().replace(old, new)
            assert changed != records[name].decode()
            records[name] = changed.encode()

        return change

    def add(name: str) -> Callable[[dict[str, bytes]], None]:
        return lambda records: records.update({name: b"x"})

    yield "target", graph("torch.ops.aten.relu.default", "torch.os.system")
    yield "torch.onnx.export", graph("torch.ops.aten.relu.default", "torch.ops.aten.bernoulli.p")
    yield "target", graph("torch.ops.aten.relu.default", "torch.ops.higher_order.run_and_save")
    yield "as_expr", graph('"as_int": 3}', '"as_expr": {"expr_str": "__import__(\'os\')"}}')
    yield "data/aotinductor/model.so", add("network/data/aotinductor/model.so")
    yield "records of two programs", add("other/byteorder")


@pytest.mark.parametrize("index", range(6))
def test_a_program_with_more_than_a_network_is_refused(take, program, tmp_path, index):
    says, change = list(hostile_changes(tmp_path))[index]
    path = forge(program, tmp_path / "a.pt2", change)
    with pytest.raises(ModelError) as caught:
        take(path)
    assert str(caught.value).startswith(f"{path}: not a program of torch.export")
    assert says in str(caught.value) or says == "as_expr"
    assert str(caught.value).isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_module_is_taken_by_its_dotted_path(take, network, tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    weights = network.state_dict()
    save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
    record = take(path, f"{__name__}.Network", classes=5)
    assert [str(item) for item in record.contract.inputs] == ["features [3, 8, 6] float32"]
    assert record.contract.batch is None
    assert max(record.parity.values()) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is None, reason="needs torchvision")
def test_a_module_may_import_torchvision(take, tmp_path, monkeypatch):
    """Beside a CPU build of torch, its import alone fails on an operator that did not load."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "network_of_torchvision.py").write_text(
        "import torch\n"
        "from torchvision.ops import Conv2dNormActivation\n"
        "class Network(torch.nn.Sequential):\n"
        "    def __init__(self):\n"
        "        pool, flat = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()\n"
        "        super().__init__(Conv2dNormActivation(3, 4), pool, flat, torch.nn.Linear(4, 5))\n"
    )
    first = (torch.nn.Conv2d(3, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4))
    layers = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 5))
    same = torch.nn.Sequential(torch.nn.Sequential(*first), *layers)
    torch.save(same.state_dict(), tmp_path / "weights.pt")
    record = take(tmp_path / "weights.pt", "network_of_torchvision.Network")
    assert [str(output) for output in record.contract.outputs] == ["linear [5] float32"]
    assert max(record.parity.values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("Network", {"classes": 6}, "model.state_dict: "),
        ("Network", {"colour": 6}, "model.module: got "),
        ("Nothing", {}, "model.module: got "),
        ("np", {}, "model.module: got "),
        ("make_config", {}, "expected a torch.nn.Module"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_by_its_key(
    take, network, tmp_path, name, arguments, says
):
    path = tmp_path / "weights.pt"
    torch.save(network.state_dict(), path)
    with pytest.raises(ModelError) as caught:
        take(path, f"{__name__}.{name}", **arguments)
    assert says in str(caught.value)
    assert str(caught.value).startswith("model.")


def test_pickled_code_in_weights_is_never_run(take, tmp_path):
    path, target = tmp_path / "weights.pt", tmp_path / "target"
    torch.save({"convolution.weight": Touches(target)}, path)
    with pytest.raises(ModelError, match=r"^model\.state_dict: "):
        take(path, f"{__name__}.Network")
    assert not target.exists()


@pytest.mark.parametrize(
    "layer", [torch.nn.BatchNorm2d(4), torch.nn.Dropout(), torch.nn.Dropout(inplace=True)]
)
def test_a_program_in_training_mode_is_refused_as_such(tmp_path, layer):
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), layer)
    exported = torch.export.export(network, (torch.zeros(2, 3, 4, 4),))
    with pytest.raises(ModelError, match="training mode"):
        from_program(exported, tmp_path / "a.pt2", None)


class Masked(torch.nn.Module):
    """Takes tokens [N, length], and two further inputs that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 3)

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        kinds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = self.table(ids)
        if mask is not None:
            rows = rows * mask[:, :, None]
        if kinds is not None:
            rows = rows + kinds[:, :, None]
        return self.head(rows.sum(1))


def test_an_example_by_name_may_have_another_order_than_the_parameters():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    program = torch_module.export(Masked(), {"mask": torch.ones(2, 5), "ids": ids}, {})
    assert program.graph_signature.user_inputs == ("ids", "mask")
    with pytest.raises(ModelError, match=r"^example: got 'maks', expected .*mask"):
        torch_module.export(Masked(), {"maks": torch.ones(2, 5), "ids": ids}, {})


def test_inputs_that_skip_a_parameter_do_not_take_its_place():
    tokens = np.zeros((2, 5), np.int64)
    with pytest.raises(ModelError, match="got 'kinds', expected 'mask' before it"):
        torch_module.export(Masked(), None, {"ids": tokens, "kinds": tokens})


class Named(torch.nn.Module):
    """Returns its outputs by name, as modules of libraries do."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind(scores=self.layer(x), values=2 * self.layer(x))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (dict, ["scores", "values"]),
        (OrderedDict, ["scores", "values"]),
        (namedtuple("Named", "scores values"), None),
        (lambda scores, values: {"x": scores, "y": values}, None),  # the input is x
        (lambda scores, values: {"a": scores, "b": scores}, None),
        (lambda scores, values: {1: scores, "1": values}, None),  # equal as text
        (lambda scores, values: {"": scores, "a": values}, None),
        (
            lambda scores, values: {"linear": values, "mul": scores},
            ["linear", "mul"],
        ),  # as inner tensors
    ],
)
def test_a_module_may_return_its_outputs_by_name(tmp_path, kind, names):
    path = tmp_path / "a.pt2"
    x = np.ones((2, 4), np.float32)
    torch.export.save(torch_module.export(Named(kind), None, {"x": x}), path)
    network = read_program(path, x[:1])
    assert [output.shape for output in network.predict(x)] == [(2, 3)] * 2
    assert names in (None, output_names(network.proto.graph))
    assert input_names(network.proto.graph) == ["x"]
