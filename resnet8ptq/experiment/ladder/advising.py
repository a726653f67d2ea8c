"""Configurations worth trying on this CPU, before any sweep; nothing is run or quantized.

    resnet8ptq advise                       for any network
    resnet8ptq advise FILE                  for this network (or model.path=FILE)

Lists the configurations to try, and those that are slow, possibly wrong or impossible here, each
with its reason and source. The commands of sweeps follow. `model.path` takes the same files as in
`resnet8ptq run`; `cache_dir=` is the folder of converted networks.
"""

from dataclasses import dataclass, field

from resnet8ptq.config import limits
from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, command, machine
from resnet8ptq.core.console import print_table, say, stdout
from resnet8ptq.experiment.ladder import candidates
from resnet8ptq.models.network_path import locate
from resnet8ptq.models.summary import Summary, summarize


@dataclass
class Network:
    """The network's file."""

    path: str | None = None


@dataclass
class Arguments:
    """The words of the command."""

    model: Network = field(default_factory=Network)
    cache_dir: str | None = None


def main(words: list[str]) -> None:
    """Read the network, if one is named, and print the advice.

    Raises:
        ConfigError: there is no such key.
        ModelError: the network is missing, not a model, unsafe, or has nothing to quantize.
    """
    settings = command.parse_words(words, Arguments, __doc__, plain="model.path")
    limits.check(settings)
    network = None
    if settings.model.path is not None:
        path = locate(ModelConfig(path=settings.model.path), "")
        network = summarize(path, cache.folder(settings.cache_dir))
    print_advice(*machine.cpu(), network)


def print_advice(cpu: str, flags: tuple[str, ...], network: Summary | None) -> None:
    """Print the advice as a table on stdout, and the commands."""
    console = stdout(None, 130)
    say(console, candidates.describe_cpu(cpu, flags))
    if network is not None:
        layers = f"{network.layers} layers with weights, {network.depthwise} of them depthwise"
        say(console, f"{network.path}: {network.format}, {layers}")
    advices = candidates.advise(flags, network)
    rows = [(entry.settings, entry.verdict, entry.why, entry.source) for entry in advices]
    print_table(console, ("configuration", "verdict", "why", "known from"), rows)
    say(console, "Nothing was run. These commands measure the configurations to try:")
    for line in candidates.sweeps(flags, network):
        say(console, f"  {line}")
