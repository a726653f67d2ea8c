"""The commands, settings, tests and links that the documents name are there.

Nothing is run, since the commands take minutes to hours: those of `resnet8ptq run` and `run.py` are
composed and checked, other commands parse their words. `NOT_RUN` has the programs that no test can
hold.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from resnet8ptq import __main__ as beside
from resnet8ptq.core import command
from resnet8ptq.core.errors import PtqError
from resnet8ptq.data.sources import array_names
from resnet8ptq.deploy import deploying
from resnet8ptq.experiment.settings import check_names
from resnet8ptq.judging import Arguments
from resnet8ptq.shipping import to_run
from resnet8ptq.tasks.detection.heads import HEADS
from tests.helpers.calling import REPO
from tests.helpers.configs import make_config

PAGES = [
    *(REPO / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted(
        path for folder in ("docs", "studies", "skills/*") for path in REPO.glob(f"{folder}/*.md")
    ),
]
WITH_COMMANDS = [*PAGES, REPO / "conf/config.yaml", REPO / "resnet8ptq/__main__.py"]
DESIGN = REPO / "docs/design.md"
TEXTS = {path: path.read_text() for path in WITH_COMMANDS}


@dataclass(frozen=True)
class Command:
    """A command of a document."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    def after(self, *start: str) -> list[str] | None:
        """Return its words after `start`; None where it does not start so."""
        matches = self.words[: len(start)] == start
        return list(self.words[len(start) :]) if matches else None

    def after_any(self, *starts: tuple[str, ...]) -> list[str] | None:
        """Return its words after the first of `starts` that it begins with; None without one."""
        rests = (self.after(*start) for start in starts)
        return next((rest for rest in rests if rest is not None), None)


def find_code(text: str) -> Iterator[str]:
    """Go through the code of a text: lines that are indented, and what stands in backticks."""
    yield from re.findall(r"`([^`\n]+)`", text)
    joined = re.sub(r"\s*\\\n\s+", " ", text)
    for line in re.findall(r"^ {4,}(\S.*)", joined, re.M):
        yield re.split(r" {2,}", line)[0]  # an explanation stands to the right


def find_commands() -> Iterator[Command]:
    """Go through the commands of the documents, without the variables that are set for them."""
    for path, text in TEXTS.items():
        for code in find_code(text):
            start = re.search(r"^(?:[A-Z_]+=\S+ )?((?:resnet8ptq|python|make|pip) .*)", code)
            if start and "<<" not in code:
                whole, *others = start[1].split(" | ")  # others in the place of the last word
                for end in ("", *others):
                    words = shlex.split(whole, comments=True)
                    yield Command(path.name, (*words[:-1], end) if end else tuple(words))


COMMANDS = sorted(set(find_commands()), key=str)
RUN = (("python", "run.py"), ("resnet8ptq", "run"), ("python", "-m", "resnet8ptq", "run"))
RUNS = [shown for shown in COMMANDS if shown.after_any(*RUN) is not None]
ANY = (("resnet8ptq",), ("python", "-m", "resnet8ptq"))
JUDGING = [shown for shown in COMMANDS if shown.after_any(("resnet8ptq", "judge")) is not None]
CALLED = [shown for shown in COMMANDS if shown.after_any(*ANY) is not None]
BESIDE = [shown for shown in CALLED if shown not in (*RUNS, *JUDGING)]
OTHERS = [shown for shown in COMMANDS if shown not in (*RUNS, *JUDGING, *BESIDE)]


NOT_RUN = {  # programs of the documents that no test holds, and why not
    "apt-get": "changes the system",
    "su": "changes the system",
    "ray": "starts a cluster",
    "mlflow": "serves until it is stopped; tests/deploy/test_deploy.py serves a model",
    "curl": "asks the server of the line above it",
}


def test_a_command_is_held_or_has_a_reason_why_not():
    known = {"resnet8ptq", "python", "make", "pip", "export", ".", *NOT_RUN}
    for path in PAGES:
        text = re.sub(r"<<'END'.*?\n {4}END$", "", TEXTS[path], flags=re.M | re.S)
        for block in re.findall(r"(?:^ {4}\S.*\n)+", re.sub(r"\\\n\s+", "", text), re.M):
            programs = set(re.findall(r"^ {4}(?:[A-Z_0-9]+=\S+ )*(\S+)", block, re.M))
            assert programs & known == set() or programs <= known, f"{path.name}: {programs}"


def list_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """Return overrides of jobs in which every value of a sweep occurs."""
    parsed = OverridesParser.create().parse_overrides([*overrides])
    values = [
        [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
        if item.is_sweep_override()
        else [item.input_line]
        for item in parsed
    ]
    jobs = [
        [value or choices[0] for value, choices in zip(job, values, strict=True)]
        for job in zip_longest(*values)
    ]
    return jobs or [[]]


@pytest.mark.parametrize("shown", RUNS, ids=str)
def test_what_is_shown_to_run_composes(shown):
    left_out = ("-m", "--help", "experiment=mine")  # which `init` writes: tests/starter runs it
    words = [word for word in shown.after_any(*RUN) or () if word not in left_out]
    jobs = list_jobs(words)
    assert len(jobs) == 1 or "-m" in shown.words or "experiment" in str(shown)
    for job in jobs:
        compose(*job)


def compose(*overrides: str) -> None:
    """Compose and check what one job is.

    Raises:
        PtqError, HydraException: there is no such key, or it does not take this.
    """
    check_names(make_config(*overrides))


class ParsedError(Exception):
    """The words were right; nothing is done with them."""


def parse_only(words: list[str], schema: type[Any], usage: str | None, **options: Any) -> None:
    parse(words, schema, usage, **options)
    raise ParsedError


parse = command.parse_words


@pytest.mark.parametrize("shown", BESIDE, ids=str)
def test_a_command_beside_takes_the_words_shown(shown):
    words = shown.after_any(*ANY) or ()
    assert words in (["--help"], ["--version"]) or is_parsed(*words)


@pytest.mark.parametrize("shown", JUDGING, ids=str)
def test_judge_takes_the_words_shown(shown):
    words = shown.after("resnet8ptq", "judge") or ["--help"]
    assert words == ["--help"] or Arguments.parse(words).to_sweep()


@pytest.mark.parametrize("shown", OTHERS, ids=str)
def test_another_command_calls_what_is_there(shown):
    if words := shown.after("python", "-m"):
        assert find_spec(words[0])
        assert all((REPO / word).is_file() for word in words if word.startswith("tests/"))
    elif words := shown.after("python"):
        assert (REPO / words[0]).is_file()
    elif words := shown.after("make"):
        assert f"\n{words[0]}:" in (REPO / "Makefile").read_text()
    elif words := shown.after("pip"):
        extras = re.findall(r"^(?:\.|CLONE|resnet8ptq)\[(\w+)\]$", words[-1])
        known = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
        assert extras or words[-1] == "CLONE"
        assert set(extras) <= set(known["optional-dependencies"])


def find_settings() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Go through what stands in backticks and is settings alone, with values; by its page."""
    for path in PAGES:
        for code in re.findall(r"`([^`\n]+)`", TEXTS[path]):
            words = tuple(shlex.split(re.sub(r"…|\.\.\.", "x,y" if "[" in code else "x", code)))
            if all(re.fullmatch(r"\+?[a-z][a-z_/.]*=.+", word) for word in words):
                yield path.name, words


SETTINGS = sorted({words: page for page, words in find_settings()}.items())
NEEDS = (  # what settings of one option, or of some, stand beside
    ("backend=torch", "data=arrays", "hydra/launcher=slurm"),
    ("backend=tflite", "data=folder"),
    ("backend=openvino",),
    ("data=table", "task=custom"),
    ("data=coco", "task=detection"),
    ("precision.plan=auto",),
    ("precision.max_bytes=1",),
)
NO_SETTINGS = {  # functions' parameters; what is refused; words in the place of others
    *("allow_pickle=False", "weights_only=True", "backend.name=../../x", "quiet=True"),
    "example=INPUTS",
    *("key=value", "experiment=NAME", "data=pets"),
    # named for the messages that they get
    *("data.classes=cat,dog", "backend=null", "dtype=8", "evaluate=test"),
    *("latency=false", "symmetric=true", "device=gpu"),
}


@pytest.mark.parametrize(("words", "page"), SETTINGS, ids=str)
def test_settings_shown_are_taken(words, page):
    assert (
        not NO_SETTINGS.isdisjoint(words)
        or is_taken(words)
        or any(is_parsed(name, *words) for name in beside.COMMANDS if name != "run")
        or any(is_taken([*needed, *words]) for needed in NEEDS)
    )


def is_taken(words: Sequence[str]) -> bool:
    """Return whether `run.py` takes them."""
    try:
        for job in list_jobs(words):
            compose(*job)
    except (PtqError, HydraException):
        return False
    return True


def is_parsed(*words: str) -> bool:
    """Return whether `python -m resnet8ptq` takes them."""
    if words[:1] == ("ship",):
        return is_taken(to_run(words[1:]))
    if words[:1] == ("advise",):  # it takes paths without a key
        return is_taken([word for word in words[1:] if "=" in word])
    with mock.patch.object(command, "parse_words", parse_only), suppress(PtqError):
        try:
            beside.call([*words])
        except ParsedError:
            return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_files_are_there(path):
    text = TEXTS[path]
    for target, anchor in re.findall(r"\]\(([^):#]*)(?:#([^)]*))?\)", text):
        linked = (path.parent / target).resolve() if target else path
        assert linked.exists(), target
        if anchor:
            assert anchor in find_anchors(linked.read_text()), f"{target}#{anchor}"
    for name in re.findall(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|md|yaml|csv|h5))`", text):
        assert any((REPO / above / name).exists() for above in ("", "resnet8ptq")), name


@cache
def list_files() -> list[Path]:
    """Return the files and folders of the repository, without those of the virtual environment."""
    top = [path for path in REPO.iterdir() if not path.name.startswith(".")]
    return [*top, *(path for folder in top for path in folder.rglob("*"))]


def locate(name: str) -> list[Path]:
    """Return the files and folders that a document names by their last parts."""
    return [path for path in list_files() if path.match(name)]


def test_modules_and_folders_of_the_design_are_there():
    """In backticks, and in the list of the layout."""
    text = TEXTS[DESIGN]
    named = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|j2|js|yaml|md\.j2))`", text))
    named |= set(re.findall(r"`((?:resnet8ptq|tests|backends|hydra_plugins)/[\w/]+/)`", text))
    assert len(named) > 100
    for name in named:
        assert "NAME" in name or locate(name), name


def test_the_layout_has_every_package():
    layout = TEXTS[DESIGN].split("Imports point down only")[0]
    rows = re.findall(r"^ {6}(\w+)(?:/|\.py) ", layout, re.M)
    package = REPO / "resnet8ptq"
    for row in rows:
        assert (package / row).is_dir() or (package / f"{row}.py").is_file(), row
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders - {*rows} == {"api"}  # in the row of `__init__.py`


def test_the_order_of_imports_is_the_one_that_is_checked():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    contract = project["tool"]["importlinter"]["contracts"][0]
    lines = "\n".join(f"    {layer}" for layer in contract["layers"])
    assert f"\n\n{lines}\n\n" in TEXTS[DESIGN]


@pytest.mark.parametrize(
    ("name", "file"),
    re.findall(r"`(\w+)(?:\(\))?`(?: in|,? of) `((?:[a-z_]+/)*[a-z_]+\.py)`", TEXTS[DESIGN]),
)
def test_a_module_has_the_name_that_the_design_places_there(name, file):
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in locate(file))


def find_anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def find_tests() -> Iterator[tuple[str, str]]:
    """Go through the tests that the documents name: a file, and words of its name."""
    for path in PAGES:
        named = r"`((?:tests/(?:\w+/)*)?test_\w+)(?:\.py)?`(?:: ([a-z ]+))?"
        yield from re.findall(named, TEXTS[path])


@pytest.mark.parametrize(("file", "words"), sorted({*find_tests()} - {("test_digest", "")}))
def test_a_test_that_is_named_is_there(file, words):
    (path,) = REPO.glob(f"{file}.py" if "/" in file else f"tests/**/{file}.py")
    text = path.read_text()
    assert re.search(rf"^def test_\w*{'_'.join(words.split())}", text, re.M)


def list_options(group: str) -> set[str]:
    return {path.stem for path in REPO.glob(f"conf/{group}/*.yaml")}


def list_keys(arguments: type[Any]) -> set[str]:
    return {field.name for field in fields(arguments)}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("settings", list_options("backend") | list_options("calib") | list_options("dtype")),
        ("settings", list_options("experiment") | list_options("analysis")),
        ("data", list_options("data") - {"cifar10"} | list_options("preprocess")),
        ("data", list_options("benchmark")),
        (
            "data",
            {*array_names.INPUTS, *array_names.LABELS, *array_names.GROUPS, *array_names.CLASSES},
        ),
        ("tasks", list_options("task")),
        ("scale", list_options("hydra/launcher")),
        ("detection", {*HEADS}),
        ("deploy", list_keys(deploying.Arguments)),
    ],
)
def test_every_option_is_in_its_page(page, names):
    words = set(re.findall(r"\w+", TEXTS[REPO / f"docs/{page}.md"]))
    assert names - words - {word.lower() for word in words} == set()
