"""`--help`: every group, option and key is listed, with its own comment from conf/."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from resnet8ptq.config import help_page
from tests.helpers.calling import REPO
from tests.helpers.configs import compose_whole

CONF = REPO / "conf"
OPTIONS = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))


@pytest.mark.parametrize("chosen", [{}, {"data": "arrays", "backend": "torch"}], ids=str)
def test_every_key_is_listed_once(chosen: dict[str, str]) -> None:
    words = [f"{group}={option}" for group, option in chosen.items()]
    config = OmegaConf.to_container(compose_whole(*words, return_hydra_config=False))
    assert isinstance(config, dict)
    shown = help_page.show(CONF, chosen).splitlines()
    listed = [line.split("=")[0].strip() for line in shown if line.startswith("  ")]
    for key in flatten(config):
        if key.endswith(".name") and key.split(".")[0] in ("backend", "data", "dtype", "task"):
            continue  # set by the option
        assert key in listed, key


def flatten(config: dict[str, object], prefix: str = "") -> list[str]:
    keys = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            keys += flatten(value, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


@pytest.mark.parametrize("path", OPTIONS, ids=str)
def test_every_option_is_explained(path: Path) -> None:
    if path.parts[0] == "hydra":
        pytest.skip("Hydra's own")
    assert help_page._describe(CONF / path)


@given(st.text(alphabet="ab #|", max_size=20), st.integers(0, 9))
def test_a_key_has_the_comment_of_its_line(comment: str, value: int) -> None:
    (key,) = help_page.read_keys(f"key: {value} # {comment}\n")
    assert (key.name, key.default, key.comment) == ("key", str(value), comment.strip())
