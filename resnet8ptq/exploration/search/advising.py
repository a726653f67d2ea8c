"""Configurations worth trying on this CPU, before any sweep; nothing is run or quantized.

    resnet8ptq advise                       for any network
    resnet8ptq advise FILE                  for this network (or model.path=FILE)
    resnet8ptq advise FILE pictures preprocess=unit preprocess.size=96

Lists the configurations to try, and those that are slow, possibly wrong or impossible here, each
with its reason and source. Commands of sweeps follow, which repeat the settings of the command
line. The settings are those of `resnet8ptq run`, except backend, dtype, method, per_channel and
reduce_range, which the advice chooses. For the network of `model.path`, its properties and the
steps of `resnet8ptq ship` come last. `model.path` takes the same files as in `resnet8ptq run`;
`cache_dir=` is the folder of converted networks.
"""

from collections.abc import Sequence
from pathlib import Path

from resnet8ptq.config import folders
from resnet8ptq.config import words as grammar
from resnet8ptq.config.schema import ModelConfig
from resnet8ptq.core import cache, invocation, machine
from resnet8ptq.core.console import print_table, say, stdout
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.experiment import path_words
from resnet8ptq.experiment.network_properties import find_properties
from resnet8ptq.exploration.search import candidates
from resnet8ptq.models.network_path import locate
from resnet8ptq.models.summary import Summary, load_graph, summarize

_PATH = "data.root=PATH"  # for commands of a network whose data are not set
_VARIED = ("backend", "dtype", "per_channel", "reduce_range", "method")
_READ = ("model.path", "model.inputs", "cache_dir")  # to read the network


def main(words: list[str]) -> None:
    """Read the network of `model.path`, if set, and print the advice; with `--help`, only the help.

    Raises:
        ConfigError: a setting is wrong, or the advice chooses it.
        ModelError: the network is missing or refused, see `locate` and `summarize`.
    """
    if {"-h", "--help"} & {*words}:
        return print(invocation.adapt(__doc__ or ""))
    settings = _check(words)
    values = {}
    for override in map(grammar.parse, settings):
        values[override.key_or_group] = override.value()

    # Read the network, if one is named
    network = None
    properties = None
    path = values.get("model.path")
    if path is not None:
        root = values.get("cache_dir")
        if root is not None:
            root = str(root)
        config = ModelConfig(path=str(path), inputs=values.get("model.inputs"))
        source = locate(config, "")
        cache_root = cache.folder(root)
        network = summarize(source, cache_root, config)
        properties = find_properties(load_graph(source, cache_root, config))

    # Keep the words that the printed commands repeat
    kept = [word for word in settings if grammar.key_of(word) != "model.path"]
    has_data = any(key.partition(".")[0] == "data" for key in values)
    if network is not None and not has_data:
        kept.append(_PATH)
    name, flags = machine.cpu()
    print_advice(name, flags, network, settings=kept)
    if properties is not None:
        _print_steps(properties, [f"model.path={values['model.path']}", *kept])


def _print_steps(properties: Sequence[str], settings: Sequence[str]) -> None:
    """Print the properties of a network, the command of `ship`, and its steps as a table."""
    console = stdout(None, 130)
    say(console, f"Properties of the network: {', '.join(properties) or 'none that adds a step'}")
    command = invocation.command("ship", *settings)
    say(console, f"The steps of this command, in order, until a model passes:\n  {command}")
    print_table(console, ("step", "why"), candidates.steps(properties))


def _check(words: Sequence[str]) -> list[str]:
    """Return the settings of the command line, checked like those of `resnet8ptq run`.

    Raises:
        ConfigError: a setting is wrong, or the advice chooses it.
    """
    # A word without a key names the network
    conf = folders.find_conf()
    own = folders.find_own_conf(Path.cwd())
    named = []
    for word in words:
        is_plain = "=" not in word and not word.startswith("-")
        if is_plain and not Path(word).exists():  # `complete` gives existing files a key
            word = grammar.assign("model.path", word)
        named.append(word)

    # Refuse the settings that the advice varies, and several networks
    settings = grammar.check_and_arrange(path_words.complete(named, conf, own), conf, own)
    for override in map(grammar.parse, settings):
        if override.key_or_group in _VARIED:
            raise ConfigError(
                f"{override.key_or_group}: got {override.value()}, but the advice chooses it; try "
                "without it"
            )
        if override.key_or_group in _READ and override.is_sweep_override():
            raise ConfigError(
                f"{override.key_or_group}: got {override.get_value_string()}, expected one value; "
                "try each alone"
            )
    return settings


def print_advice(
    cpu: str, flags: tuple[str, ...], network: Summary | None, settings: Sequence[str] = ()
) -> None:
    """Print CPU, network, the table of the advice, and the commands of `candidates.sweeps`.

    Args:
        cpu: the CPU's name.
        flags: the CPU's flags.
        settings: the words that the commands repeat.
    """
    console = stdout(None, 130)
    say(console, candidates.describe_cpu(cpu, flags))
    if network is not None:
        layers = f"{network.layers} layers with weights, {network.depthwise} of them depthwise"
        say(console, f"{network.path}: {network.format}, {layers}")

    # List the configurations, then the commands
    advices = candidates.advise(flags, network)
    rows = []
    for entry in advices:
        rows.append((entry.settings, entry.verdict, entry.why, entry.source))
    print_table(console, ("configuration", "verdict", "why", "known from"), rows)
    say(console, "Nothing was run. These commands measure the configurations to try:")
    if _PATH in settings:
        say(console, f"(data: not set; {_PATH} stands for your samples, see docs/data.md)")
    for line in candidates.sweeps(flags, network, settings):
        say(console, f"  {line}")
