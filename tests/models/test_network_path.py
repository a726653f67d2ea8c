"""The path of the network: the settings that name it, sizes that are refused, and its hash."""

import sys

import pytest

from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core.errors import ModelError
from resnet8ptq.models import network_path
from tests.helpers.configs import make_config


def config_of(**settings: object) -> ModelConfig:
    return ModelConfig(name="own", **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"module": "a.B"}, "model.state_dict: not set"),
        ({"module": "a.B", "state_dict": "/gone.pt"}, "model.state_dict: got /gone.pt, no such"),
        ({"module": "a.B", "state_dict": "w.pt", "path": "x"}, "model.path: set together with"),
    ],
)
def test_a_module_is_named_with_its_weights_alone(settings, says):
    with pytest.raises(ModelError) as caught:
        network_path.locate(config_of(**settings), "cifar10")
    assert str(caught.value).startswith(says)


def test_weights_larger_than_any_network_are_not_hashed(tmp_path):
    path = tmp_path / "weights.pt"
    with path.open("wb") as file:
        file.truncate(2**43)  # of holes
    with pytest.raises(ModelError, match=r"weights\.pt: larger than 2 GiB"):
        network_path.locate(config_of(module="a.B", state_dict=str(path)), "cifar10")


def test_a_module_s_identity_is_its_code_arguments_and_weights(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code, weights = tmp_path / "networks_of_mine.py", tmp_path / "weights.pt"
    result = []
    for text, content, arguments in [
        ("x = 1", b"1", {}),
        ("x = 2", b"1", {}),
        ("x = 1", b"2", {}),
        ("x = 1", b"1", {"classes": 2}),
        ("x = 1", b"1", {}),
    ]:
        code.write_text(text)
        weights.write_bytes(content)
        config = config_of(module="networks_of_mine.Network", module_args=arguments)
        result.append(network_path.hash_network(config, weights))
    assert result[0] == result[-1]
    assert len(set(result)) == 4
    assert "networks_of_mine" not in sys.modules  # hashed, not run


@pytest.mark.parametrize("module", ["time.Network", "os.Network", "time"])
def test_a_module_without_a_file_of_its_own_is_not_found(tmp_path, module):
    """Python's built-in modules hide a file of the same name in the current folder."""
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"1")
    with pytest.raises(ModelError, match=f"got '{module}', which is not found"):
        network_path.hash_network(config_of(module=module), weights)


def test_a_folder_s_identity_is_every_file_in_it(tmp_path):
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"1")
    before = network_path.hash_network(config_of(), tmp_path)
    (tmp_path / "variables" / "index").write_bytes(b"1")
    assert network_path.hash_network(config_of(), tmp_path) != before


@pytest.mark.parametrize("name", ["network.onnx", "network/saved_model.pb"])
def test_a_file_with_holes_is_refused_before_it_is_hashed(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(2**34)
    monkeypatch.setattr(network_path.files, "sha256", None)
    top = path if name.endswith(".onnx") else path.parent
    with pytest.raises(ModelError, match=r"^\S+: larger than \d GiB"):
        network_path.locate(config_of(path=str(top)), "own")


def test_config_takes_a_module():
    config = make_config("model.module=a.B", "model.state_dict=w.pt", "model.module_args={n: 3}")
    assert (config.model.module, config.model.module_args) == ("a.B", {"n": 3})
