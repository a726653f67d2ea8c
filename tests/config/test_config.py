"""Every option composes, and every refusal names the key, what it got and what it takes."""

import shlex
import shutil
from operator import attrgetter

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from resnet8ptq.backends.torch.options import TorchConfig
from resnet8ptq.config.loading import CONFIG_FILE, load_config, parse_config, save_config
from resnet8ptq.core import command
from resnet8ptq.core.errors import ConfigError
from tests.helpers.calling import REPO
from tests.helpers.configs import compose_whole, make_config

CONF = REPO / "conf"
DEFAULTS = (CONF / "config.yaml").read_text()
OPTIONS = sorted(
    # A group that the defaults do not name is added to them by a plus.
    f"{'' if f'- {path.parent.name}:' in DEFAULTS else '+'}{path.parent.name}={path.stem}"
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "hydra"
)
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
EXPERIMENTS.remove("auto")  # no cells: test_search.py runs it


def complaint(*overrides: str) -> str:
    """Return what Hydra or we say of `overrides`, with the cause where Hydra keeps it there."""
    with pytest.raises((HydraException, ConfigError)) as caught:
        parse_config(compose_whole(*overrides, return_hydra_config=False))
    return f"{caught.value}: {caught.value.__cause__ or ''}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["backend=torch", "backend.engine=fbgemm", "nodes_to_exclude=[a,b]", "seed=7"],
        ["calib.percentile=99", "calib=percentile", "threads=null", "data.root='a b'"],
        ["experiment=published", "+analysis=sensitivity", "symmetric.weights=false"],
        [
            "hydra/launcher=processes",
            "hydra.launcher.cpus_per_task=3",
            "+per_backend.onnx.slim=true",
        ],
    ],
)
def test_what_the_tests_compose_is_what_hydra_composes(overrides):
    containers = [OmegaConf.to_container(compose_whole(*overrides)) for _ in range(2)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        expected = compose("config", overrides, return_hydra_config=True)
    assert containers == [OmegaConf.to_container(expected)] * 2


def test_every_group_has_options():
    groups = {option.removeprefix("+").partition("=")[0] for option in OPTIONS}
    assert groups >= {"backend", "dtype", "calib", "model", "data", "experiment"}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_parses(option):
    group, _, name = option.partition("=")
    config = make_config(option)
    if group == "experiment":
        return  # test_every_value_of_a_named_sweep_parses
    named = getattr(config, group.removeprefix("+")).name
    assert named == ("torch" if name.startswith("torch_") else name)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_saved_config_keeps_every_setting_of_an_option(option, tmp_path, caplog):
    """`deploy` and the timing of the finalists read the config of a run."""
    path = tmp_path / CONFIG_FILE
    config = make_config(option)
    save_config(config, path)
    assert load_config(path) == config
    assert "no such setting" not in caplog.text


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_value_of_a_named_sweep_parses(name):
    params = compose_whole(f"experiment={name}").hydra.sweeper.params or {}
    first = {key: str(values).split(",")[0] for key, values in params.items()}
    others = [first | {key: value} for key in first for value in str(params[key]).split(",")[1:]]
    cells = [
        make_config(f"experiment={name}", *(f"{key}={value}" for key, value in cell.items()))
        for cell in (first, *others)
    ]
    assert len({str(cell) for cell in cells}) == len(cells)  # every value has an effect


def test_defaults():
    config = make_config()
    assert (config.backend.name, config.dtype.name, config.calib.name) == ("onnx", "int8", "minmax")
    assert (config.per_channel, config.seed, config.calib.samples_per_class) == (False, 42, 100)
    assert config.model.fold
    assert config.data.name == "cifar10"


def test_published_experiment_resolves_per_backend():
    onnx = make_config("experiment=published", "backend=onnx")
    torch = make_config("experiment=published", "backend=torch_fbgemm")
    assert (onnx.calib.name, onnx.per_channel) == ("minmax", False)
    assert (torch.calib.name, torch.per_channel) == ("histogram", True)
    assert isinstance(torch.backend, TorchConfig)
    assert torch.backend.engine == "fbgemm"
    assert not onnx.model.fold
    assert not torch.model.fold


def test_options_of_one_backend_on_the_command_line():
    """As docs/settings.md has it."""
    shown = (REPO / "docs/settings.md").read_text().splitlines()
    runs = [line for line in shown if line.startswith("    resnet8ptq run -m")]
    [line] = [line for line in runs if "per_b" in line]
    *_, kept, pointing = shlex.split(line)
    for backend, format_ in (("onnx", "qoperator"), ("torch", None)):
        assert make_config(f"backend={backend}", kept, pointing).format == format_


def test_a_key_set_on_the_command_line_wins_over_a_named_sweep():
    assert make_config("experiment=published", "per_channel=true").per_channel is True


@pytest.mark.parametrize(
    ("overrides", "key", "got", "takes"),
    [
        (["calib.percentile=120"], "calib.percentile", "120.0", "50 < p <= 100"),
        (["calib.percentile=50"], "calib.percentile", "50.0", "50 < p <= 100"),
        (["calib.percentile=nan"], "calib.percentile", "nan", "50 < p <= 100"),
        (["calib.samples_per_class=0"], "calib.samples_per_class", "0", ">= 1"),
        (["calib.samples_per_class=-5"], "calib.samples_per_class", "-5", ">= 1"),
        (["calib.batch_size=0"], "calib.batch_size", "0", ">= 1"),
        (["evaluate.batch_size=0"], "evaluate.batch_size", "0", ">= 1"),
        (["calib.num_bins=2047"], "calib.num_bins", "2047", "even number > 2"),
        (["calib.num_bins=256"], "calib.num_bins", "256", "= 256"),
        (["calib.num_quantized_bins=1"], "calib.num_quantized_bins", "1", ">= 2"),
        (["calib.num_quantized_bins=2000"], "calib.num_bins", "2048", "= 4000"),
        (["seed=-1"], "seed", "-1", "0 <= seed < 2**32"),
        ([f"seed={2**32}"], "seed", str(2**32), "0 <= seed < 2**32"),
        (["threads=0"], "threads", "0", ">= 1"),
        (["data.on_missing=foo"], "data.on_missing", "'foo'", "shapes | error"),
        (["backend=torch", "backend.engine=foo"], "backend.engine", "'foo'", "fbgemm"),
        (["dtype.name=foo"], "dtype.name", "'foo'", "u8s8"),
        (["report.max_drop=1.5"], "report.max_drop", "1.5", "a fraction"),
        (["max_drop=1"], "max_drop", "1.0", "0 to 0.5: 1 point is 0.01"),
        (["precision.max_drop=1"], "precision.max_drop", "1.0", "0 to 0.5: 1 point is 0.01"),
        (["report.min_accuracy=-0.1"], "report.min_accuracy", "-0.1", "a fraction"),
        (["nodes_to_quantize=[]"], "nodes_to_quantize", "[]", "null or a list"),
        (["tracking.experiment_name=' '"], "tracking.experiment_name", "' '", "a name"),
        (["method=static8"], "method", "'static8'", "static | dynamic | mixed"),
        (["format=qqd"], "format", "'qqd'", "auto | qdq | qoperator (nearest: qdq)"),
        (["nodes_to_exclude=automatic"], "nodes_to_exclude", "'automatic'", "a list"),
        (["nodes_to_exclude=[1]"], "nodes_to_exclude", "[1]", "a list"),
        (["op_types=[]"], "op_types", "[]", "null or a list"),
        (["calib.averaging_constant=0"], "calib.averaging_constant", "0.0", ""),
        (["backend=torch", "backend.flow=jit"], "backend.flow", "'jit'", "fx | pt2e"),
        (["qat.learning_rate=0"], "qat.learning_rate", "0.0", "a number > 0"),
        (["evaluate.split=train"], "evaluate.split", "'train'", "test | held_out"),
    ],
)
def test_a_value_out_of_range_is_refused(overrides, key, got, takes):
    with pytest.raises(ConfigError) as caught:
        make_config(*overrides)
    message = str(caught.value)
    assert message.startswith(f"{key}: got {got}, expected ")
    assert takes in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("calib.percentile", "50.1"),
        ("calib.percentile", "100"),
        ("calib.samples_per_class", "1"),
        ("calib.num_bins", "258"),
        ("seed", "0"),
        ("seed", str(2**32 - 1)),
        ("threads", "1"),
        ("threads", "null"),
    ],
)
def test_a_value_at_the_edge_is_taken(key, value):
    config = attrgetter(key)(make_config(f"{key}={value}"))
    assert str(config).removesuffix(".0") == ("None" if value == "null" else value)


@pytest.mark.parametrize(
    "override",
    ["calib.percentile=abc", "seed=1.5", "per_channel=maybe", "threads=many", "model.fold=2.5"],
)
def test_a_wrong_type_is_refused_by_key_and_value(override):
    key, _, value = override.partition("=")
    said = complaint(override)
    assert key in said
    assert value in said


@pytest.mark.parametrize("group", ["backend", "dtype", "calib", "model", "data", "experiment"])
def test_an_unknown_option_is_refused_with_those_there_are(group):
    said = complaint(f"{group}=nope")
    assert f"{group}/nope" in said
    for path in (CONF / group).glob("*.yaml"):
        assert path.stem in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model=my/net.onnx",
            "model: got 'my/net.onnx', expected resnet8; model.path= takes a path",
        ),
        (
            "dtype=int4",
            "dtype: got 'int4', expected fp16 | fp32 | int8 | u8s8 | uint8 | w4 | w4a8 | w8 | "
            "w8a16; try dtype=w4a8",
        ),
        ("hydra/launcher=proceses", "hydra/launcher: got 'proceses', expected "),
    ],
)
def test_an_option_that_a_group_lacks_is_one_line(override, said):
    with pytest.raises(HydraException) as caught:
        compose_whole(override)
    assert command.explain(caught.value).startswith(said)


@pytest.mark.parametrize(
    "key", ["nope", "calib.nope", "tracking.nope", "backend.engine", "evaluate.nope"]
)
def test_an_unknown_key_is_refused(key):
    """`backend.engine` is a key of torch, not of the default backend."""
    assert key.rpartition(".")[2] in complaint(f"{key}=1")


def test_a_key_that_the_schema_of_an_option_lacks_is_one_line(tmp_path):
    """As in the file of a new option whose `defaults` are missing."""
    conf = tmp_path / "conf"
    shutil.copytree(CONF, conf)
    (conf / "task" / "regression.yaml").write_text("name: regression\nresamples: 9999\n")
    with (
        initialize_config_dir(str(conf), version_base="1.3"),
        pytest.raises(HydraException) as caught,
    ):
        compose("config", ["task=regression"])
    explained = command.explain(caught.value)
    assert explained.startswith("task/regression.yaml: task.resamples: no such key; expected ")
    assert "[/hydra/schema/NAME@_here_]" in explained


def test_a_missing_value_is_refused_by_its_key():
    assert "dtype.name" in complaint("dtype.name=???")


def test_torch_options_only_come_with_their_schema():
    """`backend.name=torch` alone would give a torch run that has none of torch's options."""
    with pytest.raises(ConfigError, match=r"backend\.name"):
        make_config("backend.name=torch")


def test_a_config_without_the_schema_is_refused(tmp_path):
    tmp_path.joinpath("config.yaml").write_text("seed: 1\n")
    with (
        initialize_config_dir(str(tmp_path), version_base="1.3"),
        pytest.raises(ConfigError, match="schema"),
    ):
        parse_config(compose("config"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["calib.table=a.json", "method=dynamic"], r"calib\.table: has no effect"),
        (["calib.table=a.json", "calib=histogram", "backend=torch"], r"calib\.table: torch's own"),
        (
            ["method=qat", "corrections.equalization=true"],
            r"corrections\.equalization: got true, expected false",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        make_config(*overrides)


def test_a_setting_of_an_earlier_version_is_dropped_with_a_warning(tmp_path, caplog):
    path = tmp_path / CONFIG_FILE
    save_config(make_config(), path)
    kept = OmegaConf.load(path)
    kept.gone = 1
    kept.report.reference = "tools.csv"
    OmegaConf.save(kept, path)
    assert load_config(path) == make_config()
    assert "gone=1" in caplog.text
    assert "report.reference=tools.csv" in caplog.text


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize(
    "content", ["5", "text", "- a", "backend: onnx", "backend:", "backend: [a]"]
)
def test_a_damaged_config_of_a_run_is_refused(content, trusted, tmp_path):
    path = tmp_path / CONFIG_FILE
    path.write_text(content)
    with pytest.raises(ConfigError, match="not the config of a run"):
        load_config(path, trusted)
