"""Valid files changed along their structure: read, or refused in one printable line.

A short, fixed draw of what `python -m fuzz` goes on with; see fuzz/README.md.
"""

import copy
import string
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fuzz.mutation import mutate
from fuzz.targets import TARGETS, Target
from resnet8ptq.config.loading import parse_config
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core.errors import ConfigError
from tests.helpers.configs import compose_whole


@cache
def target(name: str) -> Target:
    return TARGETS[name]()


@pytest.mark.parametrize("name", TARGETS)
def test_the_valid_file_is_taken(name):
    assert target(name).check(target(name).seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32))
def test_a_changed_file_is_read_or_refused(name, seed):
    target(name).check(mutate(target(name).seed, seed))


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(name, content):
    target(name).check(content)


# The config: arbitrary values for each key


@cache
def composed() -> DictConfig:
    return compose_whole("backend=torch", "+analysis=sensitivity", return_hydra_config=False)


def keys(config: DictConfig, prefix: str = "") -> list[str]:
    result = []
    for key in config:
        node = config._get_node(key)
        inner = isinstance(node, DictConfig) and not node._is_none()
        result += keys(node, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return result


TEXT = st.text(max_size=20) | st.sampled_from(
    [
        "",
        "???",
        "${nope}",
        "${oc.env:NOPE}",
        "${",
        "../../x",
        "auto",
        "a\0b",
        "\x1b[31m",
        "x" * 9999,
    ]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**30, -(10**30), 2**31, 0, -1])
PLAIN = TEXT | NUMBERS | st.none() | st.booleans() | st.binary(max_size=4)
VALUES = (
    PLAIN
    | st.lists(PLAIN, max_size=3)
    | st.dictionaries(st.sampled_from(string.ascii_letters), PLAIN)
)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_value_of_any_setting_is_taken_or_refused_by_its_key(data):
    key = data.draw(st.sampled_from(keys(composed())))
    changed = copy.deepcopy(composed())
    try:
        OmegaConf.update(changed, key, data.draw(VALUES), merge=False)
    except OmegaConfBaseException:  # as Hydra says it on the command line
        return
    try:
        assert isinstance(parse_config(changed), RunConfig)
    except ConfigError as error:
        assert key.rpartition(".")[2] in str(error)
        assert str(error).isprintable()
