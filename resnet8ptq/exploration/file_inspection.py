"""`+analysis=inspect backend=file`: describes a quantized file; scores no sample."""

from collections import Counter
from pathlib import Path

from resnet8ptq.backends.file import reading
from resnet8ptq.backends.file.contents import Contents, Port
from resnet8ptq.core.console import print_table, say, stdout

NAMED = 12  # layers behind one line


def run_inspection(path: Path, cache_root: Path) -> None:
    """Print format, producer, inputs and outputs of a file, and the bits of its layers.

    Raises:
        ConfigError: the file is missing, unsafe, damaged, or cannot be run.
    """
    admitted = reading.admit(path, cache_root)
    contents = admitted.contents
    console = stdout(None, 130)
    made_by = f", made by {contents.producer}" if contents.producer else ""
    batch = "" if contents.batch is None else f", batches of {contents.batch}"
    say(
        console,
        f"{path}: {contents.format}{made_by}, {admitted.path.stat().st_size:,} bytes, "
        f"{sum(contents.operators.values())} operators, {len(contents.layers)} layers with "
        f"weights{batch}",
    )
    say(console, f"{_say_dtypes(contents)}; execution: {contents.execution}")

    # Inputs and outputs
    ports = [_row("input", port) for port in contents.inputs]
    ports += [_row("output", port) for port in contents.outputs]
    print_table(console, ("", "name", "shape (without batch)", "dtype", "values"), ports)

    # Layers with weights, then the other operators
    kinds = [(layer.operator, layer.weights, layer.activations) for layer in contents.layers]
    layers = [(*kind, str(number)) for kind, number in Counter(kinds).most_common()]
    print_table(console, ("layer", "weights", "computed in", "number"), layers)
    for line in _in_float(contents):
        say(console, line)
    others = Counter(contents.operators) - Counter(layer.operator for layer in contents.layers)
    listed = [f"{name} {others[name]}" for name in contents.operators if name in others]
    say(console, f"other operators: {', '.join(listed) or 'none'}")


def _say_dtypes(contents: Contents) -> str:
    ranges = "measured while it runs" if contents.dynamic else "fixed"
    if not contents.quantized:
        return f"weights {contents.weight_dtype}"
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
    """Return a line about the layers that the quantizer left in float."""
    left = [layer.name or layer.operator for layer in contents.layers if not layer.is_quantized]
    if not left or not contents.quantized:
        return []
    more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return [
        f"in float, {len(left)} of {len(contents.layers)} layers: {', '.join(left[:NAMED])}{more}"
    ]
