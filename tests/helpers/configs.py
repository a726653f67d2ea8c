"""conf/, composed with overrides."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from resnet8ptq.config.loading import parse_config, register_schemas
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.experiment.settings import fill_defaults
from tests.helpers import composing
from tests.helpers.calling import REPO

register_schemas()


def make_config(*overrides: str) -> RunConfig:
    """Compose conf/ with `overrides`, and fill the dependent defaults, as run.py does."""
    return fill_defaults(parse_config(compose_whole(*overrides, return_hydra_config=False)))


def compose_whole(*overrides: str, return_hydra_config: bool = True) -> DictConfig:
    """Compose conf/ by Hydra, with Hydra's own settings as the sweeper sees them."""
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"), composing.once():
        return compose("config", list(overrides), return_hydra_config)
