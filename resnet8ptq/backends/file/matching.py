"""Matches a file's inputs and outputs to those of the FP32 network.

The result has the form of the settings `backend.inputs` and `backend.outputs`. A run's config
therefore holds it, and a user resolves an ambiguous match with the same settings.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resnet8ptq.backends.file.contents import Port
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import no_such_name
from resnet8ptq.models.contract import Shape, Tensor

Match = dict[str, dict[str, Any]]  # values of `_KEYS`, by the name in the FP32 network
_KEYS = ("name", "axes", "scale", "zero_point", "shape")
# TensorFlow adds these to the names of a signature.
_AFFIXES = re.compile(r"^serving_default_|:\d+$|^Statefulpartitionedcall:?", re.IGNORECASE)


def match_inputs(tensors: Sequence[Tensor], ports: Sequence[Port], asked: Any, path: Any) -> Match:
    """Return the input of the file for each input of the FP32 network that the file takes.

    Args:
        asked: the value of the setting; None if it is not set.
        path: the file's path, for messages.

    Raises:
        ConfigError: the setting is invalid, an input of the file has no match, or its axes fit in
            no order or in several; the message names the setting.
    """
    matched = _pair("backend.inputs", tensors, ports, asked=asked)
    taken = _taken_ports(matched)
    for port in ports:
        if port.name not in taken:
            raise _open("backend.inputs", tensors, ports, path=path, why=f"nothing fills {port}")
    for tensor in tensors:
        if tensor.name in matched:
            _complete(matched[tensor.name], tensor, ports, is_input=True, path=path)
    return matched


def match_outputs(tensors: Sequence[Tensor], ports: Sequence[Port], asked: Any, path: Any) -> Match:
    """Return the output of the file for each output of the FP32 network; see `match_inputs`.

    Raises:
        ConfigError: the setting is invalid, an output of the network has no match, or its axes fit
            in no order or in several; or 8- or 16-bit integers stand for floats and have no scale.
    """
    matched = _pair("backend.outputs", tensors, ports, asked=asked)
    for tensor in tensors:
        if tensor.name not in matched:
            raise _open("backend.outputs", tensors, ports, path=path, why=f"nothing is {tensor}")
    for tensor in tensors:
        _complete(matched[tensor.name], tensor, ports, is_input=False, path=path)
    return matched


def _pair(key: str, tensors: Sequence[Tensor], ports: Sequence[Port], asked: Any) -> Match:
    """Pair tensors and ports by setting, name or shape, or as the only ones.

    The result has the order of `tensors`, without those that the file lacks.
    """
    names = [tensor.name for tensor in tensors]
    matched = _read_all(key, names, ports, asked=asked)
    # The surest way first: names may differ, and shapes may be equal by chance
    ways = (
        lambda tensor, port: tensor.name == port.name,
        lambda tensor, port: _plain(tensor.name) == _plain(port.name),
        lambda tensor, port: bool(_ways(port.shape, tensor.shape)),
        lambda tensor, port: len(tensors) == len(ports) == 1,
    )
    for fits in ways:
        taken = _taken_ports(matched)
        free = [port for port in ports if port.name not in taken]
        left = [tensor for tensor in tensors if _port_of(matched, tensor.name) is None]
        for tensor, port in _find_unique(left, free, fits):
            matched.setdefault(tensor.name, {})["name"] = port.name

    # In the network's order, without the tensors that the file lacks
    ordered = {}
    for name in names:
        if _port_of(matched, name) is not None:
            ordered[name] = matched[name]
    return ordered


def _taken_ports(matched: Match) -> set[Any]:
    """Return the names of the matched ports; includes None if a tensor has no port yet."""
    return {pair.get("name") for pair in matched.values()}


def _port_of(matched: Match, name: str) -> Any:
    """Return the name of a tensor's port; None if the tensor has no port yet."""
    return matched.get(name, {}).get("name")


def _read_all(
    key: str, names: Sequence[str], ports: Sequence[Port], asked: Any
) -> dict[str, dict[str, Any]]:
    """Return the pairs that the setting names, by tensor of the network.

    Raises:
        ConfigError: the setting names an unknown tensor or port, or a port twice, or has an invalid
            value.
    """
    matched = {}
    for name, value in (asked or {}).items():
        matched[name] = _read(key, name, value)
    known = [port.name for port in ports]
    for name, pair in matched.items():
        if name not in names:
            raise ConfigError(no_such_name(key, name, names, in_help=False))
        if pair.get("name") is not None and pair["name"] not in known:
            raise ConfigError(no_such_name(f"{key}.{name}", pair["name"], known, in_help=False))
    for port in known:
        sharing = [name for name, pair in matched.items() if pair.get("name") == port]
        if len(sharing) > 1:
            raise ConfigError(
                f"{key}: got {port} for {' and '.join(sharing)}, expected one of them"
            )
    return matched


def _find_unique(
    tensors: Sequence[Tensor], ports: Sequence[Port], fits: Callable[[Tensor, Port], bool]
) -> list[tuple[Tensor, Port]]:
    """Return the pairs of a tensor and a port that fit each other and nothing else."""
    pairs = []
    for tensor, port in itertools.product(tensors, ports):
        if fits(tensor, port):
            pairs.append((tensor, port))
    unique = []
    for tensor, port in pairs:
        rivals = [pair for pair in pairs if pair[0] is tensor or pair[1] is port]
        if len(rivals) == 1:
            unique.append((tensor, port))
    return unique


def _read(key: str, name: str, value: Any) -> dict[str, Any]:
    """Return a setting's value as a dict: a name is short for `{name: ...}`.

    Raises:
        ConfigError: the value is neither a name nor a dict, or has an unknown key or an invalid
            value.
    """
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, Mapping) or not {*value} <= {*_KEYS} or not _is_plain(value):
        raise ConfigError(
            f"{key}.{name}: got {value}, expected a name or {{name: ..., axes: [...], scale: ..., "
            "zero_point: ...}"
        )
    return dict(value)


def _is_plain(value: Mapping[str, Any]) -> bool:
    """Return whether the values that are set are valid.

    `axes` is a permutation of all axes, `scale` is positive, and `zero_point` is an integer.
    """
    axes = value.get("axes")
    if axes is not None:
        if not isinstance(axes, list):
            return False
        if any(axes.count(axis) != 1 for axis in range(len(axes))):
            return False
    for name, kinds in (("name", str), ("scale", int | float), ("zero_point", int)):
        given = value.get(name)
        if given is not None and (isinstance(given, bool) or not isinstance(given, kinds)):
            return False
    scale = value.get("scale")
    return scale is None or scale > 0


def _plain(name: str) -> str:
    """Return the last part of a name in lower case, without TensorFlow's additions."""
    _, _, last = name.rpartition("/")
    return _AFFIXES.sub("", last).casefold()


def _complete(
    pair: dict[str, Any], tensor: Tensor, ports: Sequence[Port], is_input: bool, path: Any
) -> None:
    """Complete a pair in place: the order of the axes, and for integers the scale.

    Raises:
        ConfigError: the order of the axes is wrong, unknown or ambiguous, or an output of 8- or
            16-bit integers stands for floats and has no scale.
    """
    network = tensor.shape
    side = "inputs" if is_input else "outputs"
    key = f"backend.{side}.{tensor.name}"
    by_name = {port.name: port for port in ports}
    port = by_name[pair["name"]]
    if "axes" not in pair:
        _find_axes(pair, key, tensor, port, is_input=is_input, path=path)
    elif pair["axes"] is not None:
        have = tuple(pair.get("shape") or port.shape)
        takes = network
        if is_input:
            have = network
            takes = port.shape
        _check_axes(key, pair["axes"], have, takes, between=f"{tensor} and {port} of {path}")

    # Integers that stand for floats need a scale
    rounded = port.dtype in ("int8", "uint8", "int16", "uint16") and not tensor.is_integer
    if rounded and pair.get("scale") is None:
        if port.scale is None and not is_input:
            raise ConfigError(
                f"{key}: {path} returns {port.dtype} and no scale; try "
                f"{key}={{name: {port.name}, scale: ..., zero_point: ...}}"
            )
        # An input without a scale takes whole numbers, such as pixels; see `predictor`.
        pair["scale"] = port.scale
        pair["zero_point"] = port.zero_point


def _find_axes(
    pair: dict[str, Any], key: str, tensor: Tensor, port: Port, is_input: bool, path: Any
) -> None:
    """Set the order of the axes, and for an output the shape if only the shape differs, in place.

    Raises:
        ConfigError: the shapes do not match, or match in several orders under different names.
    """
    network = tensor.shape
    if is_input:
        ways = _ways(network, port.shape)
    else:
        ways = _ways(port.shape, network)
        if not ways and _same_values(port.shape, network):
            pair["shape"] = list(network)
            ways = [None]

    # Another network has other sizes; another layout has them in another order
    if not ways and _differ_in_sizes(port.shape, network):
        raise ConfigError(
            f"{key}: {path} has {port}, the network {tensor}; expected the same sizes: is the "
            "file of another network, or of other classes?"
        )
    if not ways:
        raise ConfigError(
            f"{key}: {path} has {port}, the network {tensor}; expected the same sizes in any "
            f"order of the axes: {key}={{name: {port.name}, axes: [...]}}"
        )

    # Free sizes may fit in several orders; an equal name means the same order
    if len(ways) > 1 and port.name != tensor.name:
        raise ConfigError(
            f"{key}: {port} of {path} may be {tensor} in {len(ways)} orders of its axes; try "
            f"{key}={{name: {port.name}, axes: {[*range(len(network))]}}}"
        )
    axes = ways[0]
    pair["axes"] = None if axes is None else list(axes)


def _check_axes(key: str, axes: list[int], have: Shape, takes: Shape, between: str) -> None:
    """Check that the axes of a setting turn one shape into another.

    Args:
        have, takes: the shapes before and after `preprocessing.arrange` permutes the axes. If
            `axes` has one entry more than `have`, an axis of size 1 is added at the end. If it has
            one entry less, the last axis is dropped, whose size must be 1 or free.
        between: the input or output on both sides, for the message.

    Raises:
        ConfigError: the axes do not turn `have` into `takes`.
    """
    before = have
    if len(axes) == len(have) + 1:
        before = (*have, 1)
    elif len(axes) == len(have) - 1 and have[-1] in (1, None):
        before = have[:-1]
    if len(axes) == len(before) and _fits(before, tuple(axes), takes):
        return

    # Propose an order that fits, if there is one
    mend = ""
    ways = _ways(have, takes)
    if ways:
        same = tuple(range(len(takes)))
        right = ways[0] or same
        mend = f"; try axes: {list(right)}"
    raise ConfigError(
        f"{key}: got axes {axes}, expected the order of {len(takes)} axes between {between}{mend}"
    )


def _ways(have: Shape, takes: Shape) -> list[tuple[int, ...] | None]:
    """Return the orders of axes that turn one shape into another; None keeps the order.

    The candidates are the same order, the last axis first, and the first axis last. A free size
    fits every size. The first order that makes the shapes equal excludes the others.
    """
    if have == takes:
        return [None]
    rank = len(have)
    axes = tuple(range(rank))
    moves: list[tuple[int, ...] | None] = [None]
    if rank > 1:
        moves += [axes[-1:] + axes[:-1], axes[1:] + axes[:1]]
    distinct = dict.fromkeys(moves)
    fitting = [move for move in distinct if _fits(have, move, takes)]
    certain = [move for move in fitting if _fits(have, move, takes, exactly=True)]
    return certain[:1] or fitting


def _fits(have: Shape, axes: tuple[int, ...] | None, takes: Shape, exactly: bool = False) -> bool:
    """Return whether an order of the axes turns one shape into another.

    Args:
        exactly: whether a free size fits only another free size.
    """
    if len(have) != len(takes):
        return False
    order = range(len(have)) if axes is None else axes
    for axis, size in zip(order, takes, strict=True):
        is_free = have[axis] is None or size is None
        if have[axis] != size and (exactly or not is_free):
            return False
    return True


def _same_values(have: Shape, takes: Shape) -> bool:
    """Return whether two known shapes may hold the same values in the same order.

    They may if they differ only in axes of size 1, such as [1, 1, 10] and [10]. They also may if
    `have`, the file's shape, has only such axes or none.
    """
    if None in have or None in takes:
        return False
    long = [size for size in have if size != 1]
    return long == [size for size in takes if size != 1] or not long


def _differ_in_sizes(have: Shape, takes: Shape) -> bool:
    """Return whether no order of the axes makes two shapes equal.

    With free sizes, only the number of axes is compared.
    """
    if None in have or None in takes:
        return len(have) != len(takes)
    return sorted(filter(None, have)) != sorted(filter(None, takes))


def _open(
    key: str, tensors: Sequence[Tensor], ports: Sequence[Port], path: Any, why: str
) -> ConfigError:
    """Return the error for a port or tensor without a match; it shows the setting to complete."""
    listed = ", ".join(map(str, ports))
    pairs = ", ".join(f"{tensor.name}: ..." for tensor in tensors)
    return ConfigError(f"{key}: {why}; {path} has {listed}; try '{key}={{{pairs}}}'")
