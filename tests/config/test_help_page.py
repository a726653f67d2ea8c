"""`--help`: short at first, by topic, and whole with every key and its comment from conf/."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from resnet8ptq.config import help_page
from resnet8ptq.config.words import check_and_arrange
from resnet8ptq.core.errors import ConfigError
from tests.helpers.calling import REPO
from tests.helpers.configs import compose_whole

CONF = REPO / "conf"
OPTIONS = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))


def list_keys(chosen: dict[str, str]) -> list[str]:
    lines = help_page.show_all(CONF, chosen).splitlines()
    return [line.split("=")[0].strip() for line in lines if line.startswith("  ")]


def test_every_key_is_listed():
    config = OmegaConf.to_container(compose_whole(return_hydra_config=False))
    assert isinstance(config, dict)
    listed = list_keys({})
    for key in flatten(config):
        if key.startswith("analysis."):  # no option is chosen
            continue
        group, _, name = key.partition(".")
        if name == "name" and (CONF / group).is_dir() and group != "model":
            continue  # the option's own
        assert key in listed, key


def test_the_keys_of_chosen_options_are_listed():
    keys = {"data.split_seed", "backend.engine"}
    assert keys <= {*list_keys({"data": "arrays", "backend": "torch_fbgemm"})}
    assert keys.isdisjoint(list_keys({}))


def test_the_first_page_is_short_and_its_examples_are_taken():
    page = help_page.show_first(CONF)
    assert len(page.splitlines()) < 45
    for example, _ in help_page.FIRST:
        assert f"  {example} " in page
        if "path" not in example and "root" not in example:  # files of the reader
            check_and_arrange([example], CONF)


@pytest.mark.parametrize(
    ("topic", "key"),
    [("backend", "backend.path"), ("latency", "latency.repeats"), ("threads", "threads")],
)
def test_a_topic_has_its_keys(topic, key):
    assert f"  {key}=" in help_page.show_topic(CONF, topic)


def test_a_key_of_options_is_shown_once_for_those_that_describe_it_equally():
    page = help_page.show_topic(CONF, "data.root")
    assert "Keys of data=folder, data=huggingface" in page
    assert page.count("  data.root=") == page.count("Keys of ") > 1
    assert "Keys of backend=" not in page


def test_every_option_has_a_topic():
    for path in OPTIONS:
        if path.parts[0] != "hydra":
            group = path.parts[0]
            assert f"{group}={path.stem}" in help_page.show_topic(CONF, group, path.stem)


@pytest.mark.parametrize(
    ("topic", "nearest"), [("bakend", "backend"), ("calib.percent", "calib.percentile")]
)
def test_an_unknown_topic_names_the_nearest(topic, nearest):
    with pytest.raises(ConfigError, match=rf"--help: got '{topic}', .*nearest: {nearest}\)"):
        help_page.show_topic(CONF, topic)


def flatten(config: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            keys += flatten(value, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


@pytest.mark.parametrize("path", OPTIONS, ids=str)
def test_every_option_is_explained(path):
    if path.parts[0] == "hydra":
        pytest.skip("Hydra's own")
    assert help_page._describe(CONF / path)


@given(st.text(alphabet="ab #|", max_size=20), st.integers(0, 9))
def test_a_key_has_the_comment_of_its_line(comment, value):
    (key,) = help_page.read_keys(f"key: {value} # {comment}\n")
    assert (key.name, key.default, key.comment) == ("key", str(value), comment.strip())
