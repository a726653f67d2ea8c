"""Printed commands and model cards: no text from a store ends a word, a line or a code span."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import resnet8ptq
from resnet8ptq.config import words
from resnet8ptq.core import invocation
from resnet8ptq.core.text import code_span, printable
from resnet8ptq.deploy import card
from resnet8ptq.deploy.card import Facts
from resnet8ptq.deploy.interface import FileTensor, Interface
from resnet8ptq.deploy.source import SourceRun
from resnet8ptq.deploy.vectors import Vectors
from resnet8ptq.results import summaries
from resnet8ptq.tracking import origin
from resnet8ptq.tracking.journal import Journal
from resnet8ptq.tracking.record import RunRecord
from tests.helpers.configs import make_config

PACKAGE = Path(resnet8ptq.__file__).parent
NASTY = "'; touch x #`$(touch y)`</code><img src=x onerror=y> \"&lt;|*_[a](b)\\ \x1b[31m \u202e"
TEXTS = st.one_of(st.text(), st.text(alphabet="`'\"$;<>!& \n\\x-"), st.just(NASTY))
RUN_ID = "0" * 32


@given(st.lists(TEXTS, min_size=1), TEXTS)
def test_a_shell_reads_the_words_that_were_meant(texts, value):
    assert shlex.split(invocation.shell(*texts)) == texts
    named = shlex.split(invocation.shell("serve", NAME=value))
    assert named == [f"NAME={value}", "serve"]
    line = invocation.command("deploy", *(f"root={text}" for text in texts))
    assert shlex.split(line)[-len(texts) :] == [f"root={text}" for text in texts]


def test_one_function_quotes():
    """Two that quote are one too many: the second forgets."""
    quoting = [
        path.relative_to(PACKAGE).as_posix()
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"shlex\.(quote|join)", path.read_text())
    ]
    assert quoting == ["core/invocation.py"]


PROGRAMS = r"resnet8ptq|mlflow|curl|pip|python3?|export|cd"


def test_no_template_writes_a_command_with_values_of_its_own():
    for path in sorted(PACKAGE.rglob("*.j2")):
        for line in path.read_text().splitlines():
            assert not re.match(rf" *`?({PROGRAMS}) .*\{{\{{", line), f"{path.name}: {line}"


# Model cards


def live_html(markdown: str) -> list[str]:
    """Return the HTML that a browser would see as elements."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = [
        inner for token in parser.parse(markdown) for inner in [token, *(token.children or [])]
    ]
    return [token.content for token in tokens if token.type in ("html_block", "html_inline")]


def code_of(markdown: str) -> list[str]:
    (inline,) = MarkdownIt("commonmark").parseInline(markdown)
    return [token.content for token in inline.children or [] if token.type == "code_inline"]


@given(TEXTS)
def test_a_code_span_is_closed_by_no_text(text):
    span = code_span(text)
    assert code_of(f"a {span} b") == [printable(text) or " "] and not live_html(f"a {span} b")


def render(text: str) -> str:
    """Return a card in which each text that comes from a store or a file is `text`."""
    config = make_config("data=shapes")
    config.model.name = text
    name = printable(text) or "x"
    kinds = np.dtype([(name, "<f4", (3,))])
    vectors = Vectors(np.zeros(1, kinds), np.zeros(1, kinds), (np.zeros((1, 2), "f4"),), (0.1,))
    texts = ("calib", "op_types", "nodes_to_exclude", "calibration_samples", "dataset", "dtype")
    params = {"backend": "onnx", **dict.fromkeys(texts, text)}
    tags = dict.fromkeys(("cpu", "platform", "test_digest", "calibration_digest"), text)
    tags["class_names"] = json.dumps([text, f"{text}b"])
    metrics = {"accuracy": 0.5, "total": 10.0}
    record = RunRecord.of(RUN_ID, params, metrics, tags, verdict_text=text)
    model = Path(__file__)  # any file
    tensor = FileTensor(text, ("n", text), text)
    facts = Facts(Interface((tensor,), (tensor,)), vectors, text, text, change=text)
    return card.render_card(
        SourceRun(record, config, model.with_suffix(".onnx"), text), model, facts
    )


@given(TEXTS)
def test_a_card_holds_no_html_and_its_commands_keep_their_words(text):
    rendered = render(text)
    assert live_html(rendered) == []
    assert all(c.isprintable() or c == "\n" for c in rendered)
    yaml.safe_load(rendered.split("---\n")[1])
    (line,) = [line for line in rendered.splitlines() if line.startswith("    curl ")]
    sent = shlex.split(line)
    assert sent[:2] == ["curl", "http://127.0.0.1:5001/invocations"] and len(sent) == 6
    assert json.loads(re.sub(r"\[ \.\.\..*\.\.\. \]", "0", sent[-1])) == {
        "inputs": {printable(text) or "x": 0}
    }


# Commands that reproduce a run


@pytest.mark.parametrize(
    "word",
    [
        *("+hydra.launcher._target_=os.system", "++hydra.run.dir=/x", "hydra.searchpath=[/x]"),
        *(
            "hydra/launcher=x",
            "~hydra.sweeper",
            "--config-dir=/x",
            "-m",
            "x; touch y",
            "--multirun",
        ),
        *("model.module=subprocess.Popen", "+model.module_args.args=[touch,x]", "tracking.uri=x"),
        *("task.metric._target_=os.system", "+task.metric={_target_:os.system}", "cache_dir=/x"),
        *("model.name=${oc.env:HOME}", "model.inputs={_target_:os.system}", "no_such_key=1"),
        *("+x=1", "~data", "dtype=int8,uint8", "@x", "", "tracking.root=x"),
        *("model={module: subprocess.Popen}", "+model={path: a, module_args: {args: [x]}}"),
        *("task={metric: {name: x}}", "task={'metric': x}"),
    ],
)
def test_only_plain_settings_of_others_are_repeated(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tags = {"job_overrides": invocation.shell("dtype=int8", word), "folder": "/home/others"}
    record = RunRecord.of(RUN_ID, {}, {}, tags)
    reproduced = summaries._reproduce(record)
    if word.lstrip("+~").startswith("hydra"):
        assert reproduced is not None
        assert shlex.split(reproduced)[-2:] == ["dtype=int8", "hydra.mode=RUN"]
    else:
        assert not words.is_plain(word)
        assert reproduced is None


@pytest.mark.parametrize(
    "word",
    [
        *("dtype=int8", "backend=onnx", "calib.percentile=99.9", "+analysis=sensitivity"),
        *("nodes_to_exclude=[conv2d,'a b']", "model.path='/my models/a.onnx'", "experiment=grid"),
        *(
            "data.root=null",
            "precision.plan={conv2d: 4}",
            "model={path: a.onnx}",
            "report.max_drop=0.01",
            "model=resnet8",
        ),
    ],
)
def test_plain_settings_of_others_are_repeated(word):
    assert words.is_plain(word)


def test_settings_of_a_run_made_here_are_repeated_from_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    mine = ["model.module=my.Net", "dtype=int8"]
    kept = Journal("a run", "resnet8ptq", tags={"job_overrides": invocation.shell(*mine)})
    kept.save(folder)
    tags = {"record": kept.key, "folder": str(folder), "job_overrides": "dtype=fp32 x=1"}
    assert origin.find_overrides(RunRecord.of(RUN_ID, {}, {}, tags)) == mine
