"""`+analysis=inspect backend=file`: describes a quantized file without scoring samples."""

from collections import Counter
from pathlib import Path

from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.contents import Contents, Port
from resnet8ptq.core.console import print_table, say, stdout

NAMED = 12  # largest number of layers that a line names


def run_inspection(path: Path, cache_root: Path) -> None:
    """Print format, producer, inputs, outputs and operators of a file, and dtypes of its layers.

    Raises:
        ConfigError, UnsupportedError: see `reading.admit`.
    """
    # Print the facts of the whole file
    admitted = reading.admit(path, cache_root)
    contents = admitted.contents
    console = stdout(None, 130)
    facts = [contents.format]
    if contents.producer:
        facts.append(f"made by {contents.producer}")
    facts.append(f"{admitted.path.stat().st_size:,} bytes")
    facts.append(f"{sum(contents.operators.values())} operators")
    facts.append(f"{len(contents.layers)} layers with weights")
    if contents.batch is not None:
        facts.append(f"batches of {contents.batch}")
    say(console, f"{path}: {', '.join(facts)}")
    say(console, f"{_say_dtypes(contents)}; execution: {contents.execution}")

    # Print inputs and outputs
    ports = []
    for port in contents.inputs:
        ports.append(_row("input", port))
    for port in contents.outputs:
        ports.append(_row("output", port))
    print_table(console, ("", "name", "shape (without batch)", "dtype", "values"), ports)

    # Print the layers with weights, then the other operators
    kinds: Counter[tuple[str, str, str]] = Counter()
    others = Counter(contents.operators)
    for layer in contents.layers:
        kinds[layer.operator, layer.weights, layer.activations] += 1
        others[layer.operator] -= 1
    layers = [(*kind, str(number)) for kind, number in kinds.most_common()]
    print_table(console, ("layer", "weights", "computed in", "number"), layers)
    for line in _in_float(contents):
        say(console, line)
    listed = [f"{name} {number}" for name, number in others.items() if number > 0]
    say(console, f"other operators: {', '.join(listed) or 'none'}")


def _say_dtypes(contents: Contents) -> str:
    if not contents.quantized:
        return f"weights {contents.weight_dtype}"
    ranges = "measured while it runs" if contents.dynamic else "fixed"
    return (
        f"weights {contents.weight_dtype}, activations {contents.activation_dtype}, their ranges "
        f"{ranges}"
    )


def _row(kind: str, port: Port) -> tuple[str, ...]:
    shape = str(list(port.shape)).replace("None", "?")
    values = ""
    if port.low is not None and port.high is not None:
        values = f"{port.low:.4g} to {port.high:.4g}"
    return kind, port.name, shape, port.dtype, values


def _in_float(contents: Contents) -> list[str]:
    """Return a line on the layers in float of a quantized file; empty without such layers."""
    left = []
    for layer in contents.layers:
        if not layer.is_quantized:
            left.append(layer.name or layer.operator)
    if not left or not contents.quantized:
        return []
    listed = ", ".join(left[:NAMED])
    if len(left) > NAMED:
        listed += f" and {len(left) - NAMED} more"
    return [f"in float, {len(left)} of {len(contents.layers)} layers: {listed}"]
