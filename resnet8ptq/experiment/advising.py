"""What is worth trying on this CPU, before any sweep: nothing is run or quantized.

    python -m resnet8ptq advise                       whatever the network is
    python -m resnet8ptq advise FILE                  for this network (or model.path=FILE)

Which configurations to try, which are slow or may be wrong here, which are impossible, each with
its reason and where it is known from; then the commands of sweeps. `model.path` takes what
`python run.py model.path=` takes; `cache_dir=` keeps what it is converted to.
"""

from dataclasses import dataclass, field

from resnet8ptq.config import limits
from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, command, machine
from resnet8ptq.core.console import stdout
from resnet8ptq.core.text import show
from resnet8ptq.experiment import candidates
from resnet8ptq.models.locate import locate
from resnet8ptq.models.summary import Summary, summarize


@dataclass
class Network:
    """Where the network lies."""

    path: str | None = None


@dataclass
class Settings:
    """What the command takes."""

    model: Network = field(default_factory=Network)
    cache_dir: str | None = None


def main(words: list[str]) -> None:
    """Read the network, where one is named, and print what is known.

    Raises:
        ConfigError: there is no such key.
        ModelError: the network is missing, no model, unsafe, or nothing to quantize.
    """
    settings = command.parse_words(words, Settings, __doc__, plain="model.path")
    limits.check(settings)
    network = None
    if settings.model.path is not None:
        path = locate(ModelConfig(path=settings.model.path), "")
        network = summarize(path, cache.folder(settings.cache_dir))
    print_advice(*machine.cpu(), network)


def print_advice(cpu: str, flags: tuple[str, ...], network: Summary | None) -> None:
    """Print the findings as a table on stdout, and the commands."""
    from rich.table import Table
    from rich.text import Text

    console = stdout(None, 130)
    console.print(Text(show(candidates.describe_cpu(cpu, flags))), soft_wrap=True)
    if network is not None:
        layers = f"{network.layers} layers with weights, {network.depthwise} of them depthwise"
        console.print(Text(show(f"{network.path}: {network.format}, {layers}")), soft_wrap=True)
    table = Table("configuration", "verdict", "why", "known from")
    for found in candidates.advise(flags, network):
        cells = (found.settings, found.verdict, found.why, found.source)
        table.add_row(*(Text(show(cell)) for cell in cells))
    console.print(table)
    console.print("Nothing was run here. What is to be tried is measured by:")
    for line in candidates.sweeps(flags, network):
        console.print(Text(show(f"  {line}")), soft_wrap=True)
