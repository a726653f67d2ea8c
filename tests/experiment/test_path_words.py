"""The network and the data that a command line names: completed, or refused in one line."""

from pathlib import Path

import pytest
from PIL import Image

from resnet8ptq.config import words as grammar
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data import shapes
from resnet8ptq.experiment.path_words import complete, require_data
from tests.helpers.calling import REPO
from tests.helpers.own_data import write_data, write_network

CONF = REPO / "conf"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network and data of each kind, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RESNET8_H5", raising=False)
    write_network(Path("my.onnx"))
    write_data(Path("a.npz"), 12)
    Path("rows.csv").write_text("a,b,label\n1,2,0\n")
    for name in ("classes/cat/1.png", "flat/1.png"):
        Path(name).parent.mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(name)
    Path("boxes.json").write_text('{"images": [], "annotations": []}')
    for name, file in (("cifar", "data_batch_1"), ("saved", "dataset_info.json")):
        Path(name).mkdir()
        Path(name, file).touch()
    Path("empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("root", "added"),
    [
        ("data.root=a.npz", ["data=arrays"]),
        ("data.root=rows.csv", ["data=table"]),
        ("data.root=classes", ["data=folder"]),
        ("data.root=flat", ["data=folder", "data.labels=none"]),
        ("data.root=flat data.masks=masks", ["data=folder"]),
        ("data.root=saved", ["data=huggingface"]),
        ("data.root=cifar", ["data=cifar10"]),
        ("data.images=flat", ["data=coco"]),
    ],
)
def test_a_path_without_data_takes_the_source_that_fits(root, added, capsys):
    words = ["model.path=my.onnx", *root.split()]
    assert complete(words, CONF) == [*words, *added]
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert added[0] in err


def test_two_networks_are_refused():
    """Hydra took the last one, without a word."""
    write_network(Path("other.onnx"))
    with pytest.raises(ConfigError, match=r"got my\.onnx and other\.onnx, expected one"):
        complete(["my.onnx", "other.onnx", "a.npz"], CONF)


@pytest.mark.parametrize(
    ("words", "is_said"),
    [
        (["data.root=a.npz"], True),
        (["data=folder", "data.root=FOLDER"], True),
        (["experiment=auto", "data.root=a.npz"], True),  # of ship
        (["data.root=a.npz", "model.path=net.onnx"], False),
        (["data.root=a.npz", "experiment=mine"], False),
        (["data.root=cifar"], False),
        (["data=shapes"], False),
        (["data=mine"], False),
        (["dtype=int8"], False),
    ],
)
def test_a_forgotten_network_is_named(words, is_said, capsys):
    """The user's pictures were scored by ResNet8, with a void verdict as the only sign."""
    complete(words, CONF)
    assert ("model.path: not set; the network is" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize("name", ["größe", "a (1)", "it's mine", "夏"])
def test_a_path_that_exists_needs_no_quotes_of_hydra(name):
    """Hydra's grammar refuses letters beyond ASCII, brackets and single quotes."""
    Path(name).mkdir()
    Path("classes").rename(Path(name, "cats"))
    (root,) = [word for word in complete([f"data.root={name}"], CONF) if "root" in word]
    assert grammar.parse(root).value() == name


def test_other_values_stay_as_they_are_typed():
    words = ["data.root=gräßlich", "dtype=int8,uint8", "-m"]
    assert complete(words, CONF) == words


def test_a_folder_with_annotations_is_coco():
    completed = complete(["data.root=flat", "data.annotations=boxes.json"], CONF)
    assert completed == ["data.images=flat", "data.annotations=boxes.json", "data=coco"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["my.onnx", "a.npz"], ["model.path=my.onnx", "data.root=a.npz", "data=arrays"]),
        (["my.onnx", "data=arrays"], ["model.path=my.onnx", "data=arrays"]),
        (["-m", "my.onnx", "data=arrays"], ["-m", "model.path=my.onnx", "data=arrays"]),
    ],
)
def test_a_path_without_a_key_gets_it(words, completed):
    assert complete(words, CONF) == completed


@pytest.mark.parametrize(
    "words",
    [
        ["model.path=my.onnx"],
        ["-m", "model.path=my.onnx", "dtype=int8,uint8"],
        ["experiment=auto", "model.path=my.onnx"],
        ["experiment=grid", "model.path=my.onnx"],
        ["model.module=nets.Net", "model.state_dict=my.onnx"],
        [f"model.path={shapes.WEIGHTS}"],
        ["model.path=my.onnx", "data.labels=none"],
    ],
)
def test_a_network_of_ones_own_without_data_is_refused(words):
    with pytest.raises(ConfigError) as caught:
        require_data(complete(words, CONF), CONF)
    said = str(caught.value)
    assert said.startswith("data: not set")
    for way in ("folder", "arrays", "table", "coco", "huggingface"):
        assert f"data={way}" in said


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-m", "dtype=int8,uint8"],
        ["model=resnet8"],
        ["model.path=my.onnx", "data=cifar10"],
        ["-m", "model.path=my.onnx", "data=folder,table"],
        ["experiment=detector", "model.path=my.onnx"],
        ["benchmark=ic", "model.path=my.onnx"],
        ["+analysis=inspect", "model.path=my.onnx"],
        ["--cfg", "job", "model.path=my.onnx"],
        ["model.path=missing.onnx"],
        ["data.root=missing"],
        ["-p", "my.onnx"],
        ["dtype=int8,", "flat"],
        ["--config-dir=flat", "experiment=mine", "model.path=my.onnx"],
    ],
)
def test_other_words_stay_as_they_are(words):
    assert complete(words, CONF) == words
    require_data(words, CONF)


def test_the_projects_own_network_keeps_its_data(monkeypatch):
    monkeypatch.setenv("RESNET8_H5", "my.onnx")
    require_data(["model.path=my.onnx"], CONF)


def test_an_experiment_of_ones_own_may_name_the_data():
    own = Path("conf")
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text("defaults:\n  - override /data: arrays\n")
    (own / "experiment" / "more.yaml").write_text("defaults:\n  - mine\n")
    (own / "experiment" / "block.yaml").write_text("data:\n  root: mine.npz\n")
    for name in ("mine", "more", "block"):
        words = [f"experiment={name}", "model.path=my.onnx"]
        assert complete(words, CONF, own) == words
        require_data(words, CONF, own)


def test_experiments_that_extend_each_other_are_left_to_hydra():
    own = Path("conf")
    (own / "experiment").mkdir(parents=True)
    for name, other in (("mine", "more"), ("more", "mine")):
        (own / "experiment" / f"{name}.yaml").write_text(f"defaults:\n  - {other}\n")
    assert complete(["experiment=mine"], CONF, own) == ["experiment=mine"]


@pytest.mark.parametrize("text", ["a: [1", "- a", "defaults: 3"])
def test_a_broken_experiment_is_left_to_hydra(text):
    own = Path("conf")
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text(text)
    assert complete(["experiment=mine"], CONF, own) == ["experiment=mine"]


@pytest.mark.parametrize(
    ("root", "says"),
    [
        ("empty", "data=folder"),
        ("my.onnx", "data=arrays"),
        ("boxes.json", "data.annotations=boxes.json"),
        ("a.npz,classes", "arrays and folder"),
    ],
)
def test_a_path_that_no_source_reads_is_refused(root, says):
    with pytest.raises(ConfigError) as caught:
        complete(["-m", f"data.root={root}"], CONF)
    assert str(caught.value).startswith("data.root: got ")
    assert says in str(caught.value)
