"""Prints the path of the converted network in the cache; converts it first if it is missing."""

from hydra import compose, initialize_config_dir

from benchmarks.setting import REPO
from resnet8ptq.config.loading import parse_config, register_schemas
from resnet8ptq.core import cache
from resnet8ptq.data import locate, registry
from resnet8ptq.models import model


def main() -> None:
    """Convert the network as a run does."""
    register_schemas()
    with initialize_config_dir(str(REPO / "conf"), version_base="1.3"):
        config = parse_config(compose("config", overrides=["data.on_missing=error"]))
    settled = locate.find_data(config.data)
    dataset = registry.load(settled.name, settled.root)
    print(model.load_network(config.model, dataset, cache.folder(config.cache_dir)).onnx_path)


if __name__ == "__main__":
    main()
