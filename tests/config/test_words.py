"""What a person mistypes behind `run.py` and `python -m resnet8ptq`: one line, before any work."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st

from resnet8ptq.config import words
from resnet8ptq.config.schema import RunConfig, find_fields
from resnet8ptq.core import command
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import nearest
from tests.helpers.calling import NO_REAL_FILES, QUICK, REPO, call, call_beside, clean_environment
from tests.helpers.configs import compose_whole

CONF = REPO / "conf"
CPUS = os.cpu_count() or 1
LIST = "got a list, [{0}], expected one option; to run each: -m {1}={0}"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("dtype=[int8,uint8]", "dtype: " + LIST.format("int8,uint8", "dtype")),
        ("calib=[minmax]", "calib: " + LIST.format("minmax", "calib")),
        ("+analysis=[profile]", "analysis: " + LIST.format("profile", "analysis")),
        ("hydra/launcher=[slurm]", "hydra/launcher: " + LIST.format("slurm", "hydra/launcher")),
        ("-m|backend=onnx,|torch", "torch: got a word without a key, expected key=value; a space "
                                   "has "
         "split a value; leave it out: backend=onnx,torch"),
        ("seed|=|3", "seed: got a word without a key, expected key=value; a space has split it; "
                     "leave "
         "it out: seed=3"),
        ("seed=|3", "3: got a word without a key, expected key=value; a space has split a value; "
         "leave it out: seed=3"),
        ("nodes_to_exclude=[a,|b]", "put it in quotes: 'nodes_to_exclude=[a, b]'"),
        ("precision.plan={conv2d:|4}", "put it in quotes: 'precision.plan={conv2d: 4}'"),
        ("torch", "torch: got a word without a key, expected key=value; try backend=torch"),
        ("tfilte", "; try backend=tflite"),
        ("qqqqqq", "; try qqqqqq=VALUE"),
        ("--mulitrun", "--mulitrun: no such option (nearest: --multirun)"),
        ("--seed=3", "--seed=3: no such option (settings have no dash: seed=3)"),
        ("-m|--cfg|job", "options: got '--multirun --cfg', expected one of them"),
        ("backnd=torch", "(nearest: backend)"),
        ("backnd=torch", "(nearest: backend)"),
        ("experimnt=flagship", "(nearest: experiment)"),
        ("DTYPE=int8", "(nearest: dtype)"),
        ("++sed=3", "(nearest: seed)"),
        ("dtype=INT8", "dtype: got 'INT8', expected fp16 | fp32 | int8 | u8s8 | uint8 | w4 | "
         "w4a8 | w8 | w8a16 (nearest: int8)"),
        ("-m|dtype=int8,unit8", "dtype: got 'unit8', expected "),
        ("-m|calib.percentile=99,120", "calib.percentile: got 120, expected 50 < p <= 100"),
        ("-m|calib.percentile=choice(99,120)", "calib.percentile: got 120, expected "),
        ("task=verification|task.primary=iou", "task.primary: got 'iou', expected mae | rmse; or "),
        ("format=QDQ", "format: got 'QDQ', expected auto | qdq | qoperator (nearest: qdq)"),
        ("backend.flow=PT2E", "(nearest: pt2e)"),
        ("report.max_drop=1", "report.max_drop: got 1, expected a fraction, 0 to 0.5: 1 point is "
                              "0"),
        ("max_drop=1", "max_drop: got 1, expected a fraction, 0 to 0.5: 1 point is 0.01"),
        ("precision.max_drop=2", "precision.max_drop: got 2, expected a fraction, 0 to 0.5: 1 "
                                 "point"),
        (f"threads={CPUS + 1}", f"threads: got {CPUS + 1}, expected at most {CPUS}: the CPUs of "
                                "this"),
        (f"latency.threads={CPUS + 1}", f"latency.threads: got {CPUS + 1}, expected at most "
                                        f"{CPUS}"),
        ("model.path=/no/net.h5", "model.path: got /no/net.h5 (not there), expected a file or "),
        ("-m|data.root=/no,/", "data.root: got /no (not there), expected a file or folder"),
        ("data.root=", "data.root: got nothing (not there), expected a file or folder"),
        ("-m|backend=onnx,torch|backend.provider=CPUExecutionProvider", "backend.provider: no such "
         "key with backend=torch; try backend=onnx backend.provider=CPUExecutionProvider"),
        ("-m|backend=tflite,torch_pt2e|backend.integer_io=true", "backend.integer_io: no such key "
         "with backend=torch_pt2e; try backend=tflite backend.integer_io=true"),
        ("-m|backend=torch,torch_pt2e|backend.engine=x86", "backend.engine: no such key with "
         "backend=onnx, with which Hydra begins a sweep; try backend.engine=choice(x86)"),
        ("-m|data=huggingface,shapes|data.pairs=apart", "data.pairs: no such key with data=shapes"),
        ("-m|data=arrays,shapes|data.labels=none", "data.labels: no such key with data=shapes"),
        ("backend:torch", "; try backend=torch"),
        ("run.py", "; leave the name of the program out"),
        ("more.npz", "; a file needs its key, such as model.path=more.npz or data.root=more.npz"),
        ("help", "; try --help"),
        ("op_types=Conv,Gemm", "got Conv,Gemm, expected a list; try op_types=[Conv,Gemm]"),
        ("preprocess.mean=1,2,3", "one or a list; try preprocess.mean=[1,2,3]; to run each"),
        ("data.classes=cat,dog", "expected a list; try data.classes=[cat,dog]"),
        ("-m|dtype=int8,", "got 'int8,', expected a comma between values only; try dtype=int8"),
        ("-m|dtype=int8,,u8s8", "; try dtype=int8,u8s8"),
        ("-m|seed=,1,2", "; try seed=1,2"),
        ("-m|backend=onnx;torch", "; try backend=onnx,torch"),
        ("goal=smallest", "goal: no such key; it belongs to ship: try ship goal=fastest"),
        ("minutes=5", "; it belongs to ship: try ship minutes=10; for a run, max_seconds=600"),
        ("foo.bar=1", "foo: no such key; expected one of"),
        ("model.path=a b(.h5", "model.path: got 'a b(.h5', which Hydra's grammar refuses; "
         "put text with spaces or signs into two pairs of quotes: \"model.path='a b(.h5'\""),
    ],
)  # fmt: skip
def test_a_mistyped_word_is_refused(typed, said):
    with pytest.raises(ConfigError) as caught:
        words.check_and_arrange(typed.split("|"), CONF)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_of_the_user_is_swept_beside_one_of_the_package(tmp_path):
    option = tmp_path / "backend" / "mine.yaml"
    option.parent.mkdir()
    option.write_text("defaults: [onnx]\n")
    assert "backend=mine,onnx" in words.check_and_arrange(
        ["backend=mine,onnx", "-m"], CONF, tmp_path
    )


def test_a_dict_is_taken_beside_an_option_of_the_user(tmp_path):
    option = tmp_path / "data" / "mine.yaml"
    option.parent.mkdir()
    option.write_text("defaults: [folder]\n")
    typed = ["data={root: pictures}"]
    assert words.check_and_arrange(typed, CONF, tmp_path) == typed


@pytest.mark.parametrize(
    "name", ["1.10", "1_0", "12", "null", "True", "NaN", "\u00e9", "a;b", "conv/1:0"]
)
def test_a_listed_name_is_read_back_unchanged(name):
    listed = words.as_list([name])
    assert words.parse(f"nodes_to_exclude={listed}").value() == [name]


@pytest.mark.parametrize("typed", ["seed=range(1,5,0)", "seed=range(1.5,5,0)"])
def test_a_range_without_values_is_refused(typed):
    with pytest.raises(ConfigError, match=r"seed: got range\(1"):
        words.check_and_arrange([typed, "-m"], CONF)


def test_words_that_another_task_takes_too_are_listed_once():
    with pytest.raises(ConfigError) as caught:
        words.check_and_arrange(["task.join=median"], CONF)
    message = "task.join: got 'median', expected mean | max | vote (nearest: mean)"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "typed",
    [
        "seed=1,2,3|-m",
        "backend=torch,torch_pt2e|backend.engine=choice(x86)|-m",
        "backend=torch,tflite|backend.flow=convert,fx|-m",
        "backend=onnx,file|backend.path=/|-m",
        "threads=null",
        f"threads={CPUS}",
        "report.max_drop=0.5",
        "benchmark=null",
        "--cfg|job|-p|dtype",
        "--info|all",
        "dtype=int8,uint8|--multirun",
        "~per_backend",
        "+analysis=sensitivity",
        "hydra/launcher=processes",
        "hydra.sweep.dir=here",
        "op_types=[Conv,Gemm]",
        "precision.plan={conv2d: 4}",
        "per_backend.onnx.format=qdq",
        "data.test_fraction=1",  # data=coco takes it
        "seed=range(1,5)|-m",
        "dtype=glob(*)|-m",
        "format=${per_backend.onnx.format}",
        "hydra/launcher=slurm|-m|threads=1000|model.path=/on/the/cluster.h5",
        "backend=mine|--config-dir=conf",
    ],
)
def test_a_word_that_hydra_takes_is_taken(typed):
    given_words = typed.split("|")
    arranged = words.check_and_arrange(given_words, CONF)
    assert sorted(arranged) == sorted(given_words)


def test_settings_may_stand_on_both_sides_of_an_option():
    assert words.check_and_arrange(["seed=1", "-m", "dtype=int8"], CONF) == [
        "seed=1",
        "dtype=int8",
        "-m",
    ]
    assert words.check_and_arrange(["-c", "job", "seed=1"], CONF) == ["seed=1", "-c", "job"]


def is_taken(word: str) -> bool:
    """Return whether a word is taken; a refusal is one line that begins with its key."""
    try:
        words.check_and_arrange([word], CONF)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(f"{word.partition('=')[0]}: ")
        return False
    return True


@given(st.integers(-(2**33), 2**33))
def test_a_seed_is_taken_within_its_range(seed):
    assert is_taken(f"seed={seed}") is (0 <= seed < 2**32)


@given(st.floats(0, 200, allow_subnormal=False))
def test_a_percentile_is_taken_within_its_range(percentile):
    assert is_taken(f"calib.percentile={percentile!r}") is (50 < percentile <= 100)


@given(st.sampled_from(["auto", "qdq", "qoperator"]) | st.from_regex("[a-z]{1,9}", fullmatch=True))
def test_only_the_listed_words_are_taken(name):
    assert is_taken(f"format={name}") is (name in ("auto", "qdq", "qoperator"))


@given(st.text())
def test_an_unknown_key_is_refused_with_any_value(value):
    assert not is_taken(f"nosuch={value}")


@given(st.sampled_from(["advise", "deploy", "report", "sync", "server"]), st.integers(0, 4))
def test_two_letters_changed_places(name, where):
    where = min(where, len(name) - 2)
    swapped = name[:where] + name[where + 1] + name[where] + name[where + 2 :]
    assert nearest(swapped, ["advise", "deploy", "report", "sync", "server"]) == name


def test_no_word_is_close_to_an_empty_one():
    assert nearest("", ["id", "_id"]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        ["model.path=/no/net.h5"],
        ["data=folder", "data.root=/no"],
        ["data=folder"],
        ["-m", "calib=minmax,percentile", "calib.percentile=99,120"],
        ["data=shapes", "model.path=README.md"],
    ],
)
def test_a_wrong_input_leaves_no_run(tmp_path, typed):
    (tmp_path / "README.md").write_text("no network")
    ended = call(tmp_path, *QUICK[1:], *typed, **NO_REAL_FILES)
    assert (ended.code, len(ended.errors)) == (2, 1)
    assert ended.err.splitlines()[-1] == ended.errors[0]
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["depoly"], "depoly: no such command; expected init | run | ship | ui | advise | deploy | "
         "measured | report | verdict | judge | sync (nearest: deploy)"),
        (["report", "abc"], "run_id: got 'abc', expected the id of a run"),
        (["deploy", "uze=smallest"], "(nearest: use=)"),
        (["advise", "missing.onnx"], "model.path: got missing.onnx (not there)"),
    ],
)  # fmt: skip
def test_a_mistyped_command_is_one_line(tmp_path, typed, said):
    ended = call_beside(tmp_path, *typed)
    assert (ended.code, len(ended.errors)) == (2, 1)
    assert said in ended.errors[0]


def test_advise_takes_a_plain_file(tmp_path):
    file = REPO / "resnet8ptq" / "data" / "shapes" / "resnet8.h5"
    ended = call_beside(tmp_path, "advise", str(file))
    assert ended.code == 0
    assert "resnet8.h5" in ended.out


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_ui_names_the_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = ["make", "-o", ".venv/.run", f"BIN={Path(sys.executable).parent}", f"PORT={port}"]
        env = clean_environment()  # a test in this process may have asked for tracebacks
        ended = subprocess.run(
            [*made, "ui"], cwd=REPO, env=env, capture_output=True, text=True, timeout=60
        )
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[0].startswith(f"error: port: got {port}, which cannot be used")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["calib.percentile=99"], "calib.percentile: has no effect with calib=minmax; try "
         "calib=percentile"),
        (["calib=entropy", "calib.percentile=99"], "calib.percentile: has no effect with "
         "calib=entropy; try calib=percentile"),
        (["calib=percentile", "calib.percentile=99"], ""),
        (["calib=minmax,percentile", "calib.percentile=99"], ""),
        (["calib=minmax,entropy", "calib.percentile=99"], "calib.percentile: has no effect with "
         "calib=minmax | entropy; try calib=percentile"),
        (["calib=mse", "method=dynamic"], "calib: has no effect with method=dynamic; try "
         "method=static | mixed | qat"),
        (["per_channel=true", "dtype=fp32"], "per_channel: has no effect with dtype=fp32; try "
         "dtype=int8 | uint8 | u8s8 | w4a8 | w8a16 | w4 | w8"),
        (["per_channel=true", "dtype=fp32,int8"], ""),
        (["qat.epochs=1"], "qat.epochs: has no effect with method=static; try method=qat"),
        (["corrections.adaround_iterations=5"], "corrections.adaround_iterations: has no effect "
         "with corrections.adaround=false; try corrections.adaround=true"),
        (["latency.enabled=false", "latency.repeats=5"], "latency.repeats: has no effect with "
         "latency.enabled=false; try latency.enabled=true"),
        (["max_drop=0.1"], "max_drop: has no effect with nodes_to_exclude=[]; try "
         "nodes_to_exclude=auto, or report.max_drop, the limit of the verdict"),
        (["max_drop=0.1", "nodes_to_exclude=auto"], ""),
        (["preprocess.pad=3"], "preprocess.pad: has no effect with preprocess.resize=squash; try "
         "preprocess.resize=letterbox"),
        (["experiment=qat", "qat.epochs=1"], ""),
        (["experiment=grid", "calib.percentile=99"], ""),
        (["model.state_dict=/"], "model.state_dict: has no effect with model.module=null; try "
         "model.module=a value"),
    ],
)  # fmt: skip
def test_a_typed_setting_without_effect_is_named(typed, line):
    parsed = [words.parse(word) for word in typed]
    cfg = compose_whole(*(p.input_line for p in parsed if not p.is_sweep_override()))
    params = cfg.hydra.sweeper.params or {}
    swept = [words.parse(f"{key}={value}") for key, value in params.items()]
    assert words.find_idle(cfg, parsed, swept) == ([line] if line else [])


def test_a_sweeps_only_value_of_a_setting_counts():
    """Hydra composes a sweep's own settings into its jobs only."""
    typed = words.parse("calib.percentile=99")
    composed = compose_whole(typed.input_line)
    assert words.find_idle(composed, [typed], [words.parse("calib=percentile")]) == []


def test_conditions_name_settings_that_exist():
    def walk(cls: type, prefix: str = "") -> None:
        for item in vars(cls)["__dataclass_fields__"].values():
            for key in item.metadata.get("only", {}):
                assert find_fields(key), f"{prefix}{item.name}: {key}"
            for way in find_fields(f"{prefix}{item.name}"):
                assert way[-1].name == item.name

    walk(RunConfig)
    for name in ("calib", "latency", "corrections", "data", "model", "preprocess", "backend"):
        [*_, last] = find_fields(f"{name}.name") or find_fields(name)
        assert last


@pytest.mark.slow
def test_a_run_warns_of_a_setting_without_effect(tmp_path):
    quick = (*QUICK, "dtype=fp32", "threads=1")
    ended = call(tmp_path, *quick, "calib.percentile=99", **NO_REAL_FILES)
    assert ended.code == 0
    assert "calib.percentile: has no effect with dtype=fp32" in " ".join(ended.err.split())


def test_one_value_for_a_list_gets_the_list():
    with pytest.raises(HydraException) as caught:
        compose_whole("op_types=Conv")
    said = command.explain(caught.value)
    assert said == "op_types: got 'Conv', expected a list; try op_types=[Conv]"


def test_a_decimal_comma_gets_the_number():
    with pytest.raises(HydraException) as caught:
        compose_whole("report.max_drop=0,01")
    assert "; numbers have a decimal point: report.max_drop=0.01; " in command.explain(caught.value)


@pytest.mark.parametrize("typed", ["dtype=int8,uint8", "seed=range(1,3)"])
def test_several_values_without_a_sweep_get_the_sweep(typed):
    with pytest.raises(HydraException) as caught:
        compose_whole(typed)
    said = command.explain(caught.value)
    key = typed.partition("=")[0]
    assert said == f"{key}: got several values, expected one; to run each: -m {typed}"
