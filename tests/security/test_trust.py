"""A store of others: `deploy` runs no code that it names, and writes nothing that it says."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from onnx import helper, numpy_helper

from resnet8ptq.backends.torch.torchscript import known_warnings
from resnet8ptq.config.loading import load_config
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError, TrackingError
from resnet8ptq.deploy import example
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.sweeps import final_timing
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.calling import Called
from tests.helpers.foreign_store import Foreign


@pytest.fixture
def foreign(sweep: Called, tmp_path: Path) -> Foreign:
    return Foreign(sweep, tmp_path)


@pytest.mark.slow
def test_an_onnx_run_of_others_is_deployed_and_a_torch_run_only_if_it_is_trusted(foreign):
    done = foreign.deploy(foreign.run("onnx")[0], "folder=onnx")
    assert done.code == 0, done.err
    run_id, _ = foreign.run("torch")
    refused = foreign.deploy(run_id)
    assert refused.code == 2
    assert refused.errors[0].endswith("if you trust its author, add trust=true")
    assert not (foreign.called.folder / "out").exists()
    trusted = foreign.deploy(run_id, "trust=true")
    assert trusted.code == 0, trusted.err
    assert (foreign.called.folder / "out" / "model.pt").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_an_artifact_of_others_is_loaded_in_a_process_of_its_own(foreign, trusted):
    """Neither ONNX Runtime nor LiteRT is written to withstand hostile files."""
    run_id, paths = foreign.run("onnx")
    record = cast(RunRecord, SimpleNamespace(run_id=run_id))
    for name, apart in (("model.onnx", not trusted), ("model.pt", True)):
        artifact = paths["model.onnx"].with_name(name)
        source = SourceRun(record, cast(RunConfig, None), artifact, trusted=trusted)
        assert (source.call(os.getpid) != os.getpid()) == apart


def test_an_artifact_of_others_that_asks_for_all_memory_is_refused_in_one_line(foreign):
    run_id, paths = foreign.run("onnx")
    proto = onnx.load(paths["model.onnx"])
    graph, name = proto.graph, proto.graph.output[0].name
    graph.initializer.append(numpy_helper.from_array(np.array([2**42]), "size"))
    graph.node.extend(
        [
            helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
            helper.make_node("ReduceSum", ["zeros"], ["sum"], keepdims=0),
            helper.make_node("Add", [name, "sum"], ["more"]),
        ]
    )
    graph.output[0].name = "more"
    onnx.save(proto, paths["model.onnx"])
    foreign.put(run_id, paths["model.onnx"])
    done = foreign.deploy(run_id)
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert f"run {run_id}: model.onnx cannot be run (" in done.errors[0]
    assert not (foreign.called.folder / "out").exists()


def test_a_config_cannot_let_another_framework_load_the_file(foreign):
    run_id, paths = foreign.run("onnx")  # its .onnx file could be TorchScript
    text = paths["config.yaml"].read_text()
    paths["config.yaml"].write_text(text.replace("name: onnx", "name: torch", 1))
    done = foreign.deploy(run_id)
    assert (done.code, len(done.errors)) == (1, 1), done.err
    assert "config.yaml has backend=torch, the run has logged onnx" in done.errors[0]
    assert not (foreign.called.folder / "out").exists()


def test_a_pipe_in_the_place_of_a_file_is_not_read(foreign):
    run_id, paths = foreign.run("onnx")
    paths["predictions.npz"].unlink()
    os.mkfifo(paths["predictions.npz"])
    done = foreign.deploy(run_id)
    assert "no artifact predictions.npz" in done.errors[0]
    assert not (foreign.called.folder / "out").exists()


def test_a_model_of_others_is_registered_only_with_trust(foreign):
    """The registered model is the logged one, whose code runs when it is served."""
    run_id, _ = foreign.run("onnx")
    refused = foreign.deploy(run_id, "register=theirs")
    assert (refused.code, len(refused.errors)) == (2, 1), refused.err
    assert "register: got 'theirs'" in refused.errors[0] and "trust=true" in refused.errors[0]
    assert not foreign.called.client.search_registered_models()
    assert not (foreign.called.folder / "out").exists()


def test_params_of_others_add_nothing_to_the_model_card(foreign):
    run_id, _ = foreign.run("onnx")
    for key in ("calib", "method", "weight_dtype"):
        foreign.set_param(run_id, key, "x`\n\n<img src=x>\n# head\x1b[31m\n```")
    assert foreign.deploy(run_id).code == 0
    card = (foreign.called.folder / "out" / "README.md").read_text("utf-8")
    body = card.split("---\n", 2)[2]
    assert "\x1b" not in card
    assert not re.search(r"^(# head|<img|```)", body, re.M)
    (line,) = re.findall(r"^- Settings: .*$", body, re.M)
    [inline] = [token for token in MarkdownIt().parse(line) if token.type == "inline"]
    kinds = [token.type for token in inline.children or ()]
    assert kinds == ["text", "code_inline", "text", "code_inline"]  # settings, and the run's id


def hostile_settings(mark: Path) -> dict[str, dict[str, object]]:
    """Return what is changed in a `config.yaml`, each of which would write `mark`."""
    touch = {"args": ["touch", str(mark)]}
    popen = {"_target_": "subprocess.Popen", **touch}
    metric = {"_target_": "operator.attrgetter", "attr": popen}
    return {
        "module": {"model": {"module": "subprocess.Popen", "module_args": touch}},
        "arguments": {"model": {"module_args": popen}},
        "metric": {"task": {"name": "custom", "metric": metric}},
        "inputs": {"model": {"inputs": {"a": [popen]}}},
        "unused": {"per_backend": {"a": {"b": popen}}},
        "lookup": {"model": {"name": "${oc.env:HOME}"}},
        "nested lookup": {"per_backend": {"a": ["${oc.create:${oc.env:HOME}}"]}},
        "inputs lookup": {"model": {"inputs": {"a": "${oc.decode:'1'}"}}},
    }


@pytest.mark.parametrize("name", hostile_settings(Path()))
def test_a_config_of_others_runs_nothing_and_writes_nothing(foreign, tmp_path, name):
    mark = tmp_path / "written"
    run_id, paths = foreign.run("onnx")
    config = yaml.safe_load(paths["config.yaml"].read_text())
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    for group, values in hostile_settings(mark)[name].items():
        config[group] |= values
        if name == "module":
            config[group] |= {"path": None, "state_dict": str(weights)}
    paths["config.yaml"].write_text(yaml.safe_dump(config))
    done = foreign.deploy(run_id)
    assert (done.code, len(done.errors)) == (2, 1), done.err
    assert "add trust=true" in done.errors[0]
    assert os.environ["HOME"] not in done.errors[0]
    assert not mark.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 2]\nb: [*a, *a]\n",
        "a: !!python/object/apply:os.system ['touch written']\n",
        "a: !!python/object/apply:pathlib.Path ['x']\n",
        "[" * 1000,
        "- a\n",
        "\0",
    ],
)
def test_yaml_of_others_is_values_alone(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"not the config of a run|could run code"):
        load_config(path, trusted=False)
    assert [kept.name for kept in tmp_path.iterdir()] == ["config.yaml"]


def test_a_cache_that_a_store_names_is_not_used(foreign, tmp_path):
    run_id, paths = foreign.run("onnx")
    config = yaml.safe_load(paths["config.yaml"].read_text())
    paths["config.yaml"].write_text(yaml.safe_dump(config | {"cache_dir": str(tmp_path / "evil")}))
    assert foreign.deploy(run_id).code == 0
    assert not (tmp_path / "evil").exists()


class Writes(torch.nn.Module):
    """Writes a file whenever it runs."""

    path: str

    def __init__(self, path: Path, body: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.path, self.body = str(path), body

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        torch.save(images, self.path)
        return self.body(images)


def make_hostile(path: Path, mark: Path) -> None:
    """Make a run's TorchScript file one that predicts the same, and writes `mark`."""
    with known_warnings():
        body = torch.jit.load(path)
        torch.jit.save(torch.jit.script(Writes(mark, body)), path)


def test_torchscript_of_others_writes_nothing(foreign, tmp_path):
    mark = tmp_path / "written"
    run_id, paths = foreign.run("torch")
    make_hostile(paths["model.pt"], mark)
    foreign.put(run_id, paths["model.pt"])
    assert foreign.deploy(run_id).code == 2
    assert not mark.exists()
    foreign.deploy(run_id, "trust=true")
    assert mark.exists()  # the file does what it was made for


def test_a_folder_of_mine_does_not_vouch_for_another_file(foreign, sweep, tmp_path):
    """A run that was made here, whose model somebody has replaced in the store."""
    shutil.copytree(sweep.folder / "runs", tmp_path / "runs")
    mark = tmp_path / "written"
    run_id, paths = foreign.run("torch")
    (own,) = [
        folder.parent
        for folder in (tmp_path / "runs").rglob("record.json")
        if Journal.load(folder.parent).run_id == run_id
    ]
    foreign.set_tag(run_id, "folder", str(own))
    assert foreign.deploy(run_id, "folder=before").code == 0  # the store has what was made here
    make_hostile(paths["model.pt"], mark)
    foreign.put(run_id, paths["model.pt"])
    done = foreign.deploy(run_id)
    assert done.code == 2 and "trust=true" in done.errors[0]
    assert not mark.exists()


def test_only_a_folder_below_runs_with_the_runs_own_record_was_made_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {name: tmp_path / name for name in ("runs/mine", "mlruns/artifacts/1")}
    kept = Journal("a run", "resnet8ptq", run_id="1")
    for folder in places.values():
        folder.mkdir(parents=True)
        kept.save(folder)
    (tmp_path / "runs" / "other").mkdir()
    Journal("another", "resnet8ptq", run_id="1").save(tmp_path / "runs" / "other")

    def record(folder: str, key: str = kept.key) -> RunRecord:
        return RunRecord.of("1", {}, {}, {"folder": folder, "record": key})

    assert origin.own_folder(record(str(places["runs/mine"]))) == places["runs/mine"]
    for folder in (
        str(places["mlruns/artifacts/1"]),
        f"{tmp_path}/runs/../mlruns/artifacts/1",
        f"{tmp_path}/runs/other",
        f"{tmp_path}/runs/none",
        "",
    ):
        assert origin.own_folder(record(folder)) is None
    assert origin.own_folder(record(str(places["runs/mine"]), "another")) is None


def test_a_race_takes_no_files_from_where_a_store_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep, elsewhere = tmp_path / "sweep", tmp_path / "elsewhere"
    kept = Journal("a run", "resnet8ptq", run_id="1")
    for folder in (sweep / "0", elsewhere):
        folder.mkdir(parents=True)
        kept.save(folder)
    tags = {"folder": str(sweep / "0"), "record": kept.key}
    cell = SimpleNamespace(record=RunRecord.of("1", {}, {}, tags))
    assert final_timing._folder(cell, sweep) == sweep / "0"
    cell.record = cell.record.changed(tags={**tags, "folder": str(elsewhere)})
    with pytest.raises(TrackingError, match="run 1 was not made below"):
        final_timing._folder(cell, sweep)


def test_an_engine_that_a_store_names_does_not_become_code():
    with pytest.raises(TrackingError, match=r"engine: got .*, expected fbgemm"):
        example.check_engine("x{file.__doc__[11]}; import os  # ")
