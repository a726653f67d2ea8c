"""From what Hydra composed to a checked `RunConfig`."""

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.config import limits
from resnet8ptq.config.schema import ArraysConfig, FolderConfig, RunConfig, TorchConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import safe_name

# In `conf/config.yaml`: folders are made before the config is checked, also in another process.
OmegaConf.register_new_resolver("safe_name", lambda text: safe_name(str(text)), replace=True)


def register_schemas() -> None:
    """Tell Hydra the schemas, before it composes.

    `RunConfig` types every group; only a backend or a data set with options of its own needs a
    schema besides, kept below `hydra/`, where it is not offered as an option of the group.
    """
    # Hydra copies the whole store for each group that it lists, which took two thirds of the time
    # of --help. Nothing changes the store later, and what is loaded from it is copied anyway.
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    for name, node in (("torch", TorchConfig), ("arrays", ArraysConfig), ("folder", FolderConfig)):
        store.store(group="hydra/schema", name=name, node=node)


def parse_config(cfg: DictConfig) -> RunConfig:
    """Turn what Hydra composed into a checked `RunConfig`.

    Raises:
        ConfigError: a value is missing, does not resolve, or is out of range.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if not isinstance(config, RunConfig):  # composed without the schema
        raise ConfigError("conf/config.yaml: its defaults must begin with `schema`")
    limits.check_keys(config)
    limits.check(config)
    return config
