"""Finds the arrays that hold inputs, labels and groups, by their names."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from resnet8ptq.config.schema import ArraysConfig, DataConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, PtqError
from resnet8ptq.core.text import list_names
from resnet8ptq.data.dataset import SIDES
from resnet8ptq.data.sources.array_files import Arrays, find_names
from resnet8ptq.data.sources.labels import NO_LABELS
from resnet8ptq.data.splitting import TEST_NAMES

log = logging.getLogger(__name__)

INPUTS = ("x", "inputs", "images", "features", "data")
LABELS = ("y", "labels", "targets", "label", "target")
GROUPS = ("groups", "clips")
CLASSES = ("classes", "class_names")
STEPS = {"scale": "data.scale", "zero_point": "data.offset", "offset": "data.offset"}
KEYS = ("data.inputs", "data.labels", "data.groups")
_MNIST = re.compile(r"(train|t10k)-(images|labels)(-idx\d-ubyte)?")  # MNIST's file names


class Chosen(NamedTuple):
    """The arrays for `KEYS`, each by its name or by the path of its file.

    Attributes:
        inputs: one array, or a dict of arrays by input name.
        labels, groups: None for samples without them.
    """

    inputs: Any
    labels: str | None
    groups: str | None


def name_inputs(data: DataConfig, find_takes: Callable[[], Sequence[str]]) -> DataConfig:
    """Return the settings, with `data.inputs` set if the network's names identify the inputs.

    Without this, an array with a usual name, such as `x`, would be the only input of a network of
    several inputs. Settings of other sources, and those that set `data.inputs`, stay unchanged.
    Errors of data and network are suppressed here, because loading them raises them again.

    Args:
        data: the located data set, of any source.
        find_takes: returns the names of the network's inputs; called only if usual names do not
            identify the inputs, because it is slow.
    """
    if data.name != "arrays" or not isinstance(data, ArraysConfig) or data.inputs is not None:
        return data

    # After an error, the settings stay as they are
    inputs = None
    with suppress(PtqError, OSError):
        inputs = _match_names(Path(str(data.root)), find_takes)
    if inputs is None:
        return data
    log.info("data.inputs: got null; the network names its inputs: %s", inputs)
    return replace(data, inputs=inputs)


def _match_names(root: Path, find_takes: Callable[[], Sequence[str]]) -> Any:
    """Return `data.inputs` by the names of the network's inputs.

    Returns:
        One name, or a dict of names; None if an input has no array of its name, or if usual names
        identify the inputs.
    """
    names = find_names(root)

    # Usual names identify the inputs in two cases: labels have one and no input has, so that all
    # other arrays are inputs; or the only array that may be an input has one
    others = {*LABELS, *GROUPS, *CLASSES, *STEPS}
    simple = {_without_side(_simple(name)) for name in names}
    candidates = simple - others
    all_are_inputs = candidates.isdisjoint(INPUTS) and not simple.isdisjoint(LABELS)
    at_most_one = len(candidates) < 2 and candidates <= {*INPUTS}
    if all_are_inputs or at_most_one:
        return None

    # Each input of the network needs an array, or one on each side of a split
    takes = sorted(find_takes())
    train = _of_own_names(names, "train", ())
    test = _of_own_names(names, "test", ())
    split = train.keys() & test.keys()
    has_all = split.issuperset(takes) or {*names}.issuperset(takes)
    if not takes or not has_all:
        return None
    if len(takes) == 1 and takes[0] not in split:
        return takes[0]
    return {name: name for name in takes}


def choose(arrays: Arrays, config: ArraysConfig, root: Path) -> list[Chosen]:
    """Return the arrays for `KEYS` of both sides, training first, or of samples without a split.

    Raises:
        ConfigError: a name in the settings is neither an array nor a file (names in a dict of
            inputs are not checked here), inputs or labels are not recognized, several arrays have a
            usual name, or `data.groups` is set for a split.
    """
    for key in KEYS:
        name = getattr(config, key.removeprefix("data."))
        if isinstance(name, str) and name != NO_LABELS:
            check_name(key, name, root, arrays)
    return _find_split(arrays, config, root) or [_find_one(arrays, config, root)]


def take_validation_as_test(arrays: Arrays, root: Path) -> Arrays:
    """Return the arrays, with those of validation renamed if there are no test arrays.

    `x_val` becomes `x_test`, for example. Without training arrays, nothing is renamed.
    """
    if not _of_own_names(arrays, "train", ()):
        return arrays
    for name in arrays:
        if "test" in _simple(name).split("_"):
            return arrays

    # Rename the arrays of the first name of validation that occurs
    for validation in TEST_NAMES[1]:
        own = _of_own_names(arrays, validation, ())
        if own:
            log.info("%s: has no test arrays; tested: %s", root, list_names(own.values()))
            renamed = {name: f"{base}_test" for base, name in own.items()}
            return {renamed.get(name, name): read for name, read in arrays.items()}
    return arrays


def _find_split(arrays: Arrays, config: ArraysConfig, root: Path) -> list[Chosen] | None:
    """Return the arrays for `KEYS` of both sides, training first.

    Training samples may lack labels, because an anomaly detector trains on normal samples only.

    Returns:
        The arrays; None if they form no split, or if the settings name a single input or the
        labels.

    Raises:
        ConfigError: labels are not recognized, `data.groups` is set, or several arrays of a side
            have a usual name for inputs, labels or groups.
    """
    if isinstance(config.inputs, str) or config.labels not in (None, NO_LABELS):
        return None
    sides: list[Chosen] = []
    for side in SIDES:
        chosen = _find_side(arrays, config, root, side)
        if chosen is None:
            return None
        sides.append(chosen)

    # Both sides need the same inputs, and `data.groups` names one array, not two
    train, test = sides
    if list_keys(train.inputs) != list_keys(test.inputs):
        return None
    if config.labels is None and test.labels is None:
        _ask_for_labels_of_split(arrays, config, root, sides)
    if config.groups is not None:
        raise ConfigError(
            f"data.groups: got {config.groups}, and {root} holds a split; expected "
            f"{' | '.join(GROUPS)} with _train and _test"
        )
    return sides


def list_keys(inputs: Any) -> list[str]:
    """Return the input names if `inputs` is a dict by them; empty for one array."""
    return list(inputs) if isinstance(inputs, dict) else []


def _find_side(arrays: Arrays, config: ArraysConfig, root: Path, side: str) -> Chosen | None:
    """Return the arrays for `KEYS` on one side of a split; None if the side lacks an input."""
    left = _find_left(arrays, config)
    usual = _list_usual(side)
    single = pick(left, usual.inputs, root)
    labels = pick(left, usual.labels, root)
    groups = pick(left, usual.groups, root)
    own = _of_own_names(arrays, side, {labels, groups})
    if config.labels is not None:
        labels = None

    # A usual name is the only input; otherwise all arrays of this side are inputs
    if config.inputs is None and single is not None:
        return Chosen(single, labels, groups)
    inputs = own
    if config.inputs is not None:
        inputs = {}
        for key, base in config.inputs.items():
            if base not in own:
                return None
            inputs[key] = own[base]
    if not inputs:
        return None
    if len(inputs) == 1:
        [single] = inputs.values()
        return Chosen(single, labels, groups)
    return Chosen(inputs, labels, groups)


def _ask_for_labels_of_split(
    arrays: Arrays, config: ArraysConfig, root: Path, sides: Sequence[Chosen]
) -> None:
    """Raise `ConfigError` if an array may hold the labels.

    With `data.inputs=null`, several inputs are a guess, so that one of them may hold labels.
    """
    is_guessed = config.inputs is None and isinstance(sides[-1].inputs, dict)
    used = {config.groups}
    for side in sides:
        used.add(side.groups)
        if not is_guessed:
            used.update(_list_arrays(side.inputs))
    _ask_for_labels(arrays, used, root, " | ".join(f"{name}_test" for name in LABELS))


def _find_left(arrays: Arrays, config: ArraysConfig) -> list[str]:
    """Return the names of the arrays that `data.inputs` does not name.

    `x` in `data.inputs` also names `x_train` and `x_test`.
    """
    inputs: list[str] = []
    if config.inputs is not None:
        inputs = _list_arrays(config.inputs)
    left = []
    for name in arrays:
        if name not in inputs and _without_side(name) not in inputs:
            left.append(name)
    return left


def _without_side(name: str) -> str:
    for side in SIDES:
        name = name.removesuffix(f"_{side}").removeprefix(f"{side}_")
    return name


def _of_own_names(
    arrays: Iterable[str], side: str, others: Collection[str | None]
) -> dict[str, str]:
    """Return the names of one side's arrays by their names without the side.

    The names in `others` are left out.

    >>> _of_own_names(["x_train", "y_train", "x_test"], "train", others=["y_train"])
    {'x': 'x_train'}
    """
    own = {}
    for name in arrays:
        base = name.removesuffix(f"_{side}").removeprefix(f"{side}_")
        if base != name and name not in others:
            own[base] = name
    return dict(sorted(own.items()))


class _Usual(NamedTuple):
    """The usual names of arrays for each of `KEYS`."""

    inputs: Sequence[str] = INPUTS
    labels: Sequence[str] = LABELS
    groups: Sequence[str] = GROUPS


def _list_usual(side: str) -> _Usual:
    """Return the usual names on one side of a split."""
    usual = []
    for names in _Usual():
        of_side = []
        for name in names:
            of_side += [f"{name}_{side}", f"{side}_{name}"]
        usual.append(of_side)
    return _Usual(*usual)


def _find_one(arrays: Arrays, config: ArraysConfig, root: Path) -> Chosen:
    """Return the arrays for `KEYS` of samples without a split.

    Raises:
        ConfigError: inputs or labels are not recognized, or several arrays have a usual name for
            inputs, labels or groups.
    """
    usual = _Usual()
    alone = []  # the usual names in a file that holds only one side
    for side in SIDES:
        of_side = _list_usual(side)
        if pick(arrays, of_side.inputs, root):
            alone.append(of_side)
    if config.inputs is None and pick(arrays, INPUTS, root) is None and len(alone) == 1:
        [usual] = alone

    # Names in the settings have precedence over usual names
    left = _find_left(arrays, config)
    groups = config.groups or pick(left, usual.groups, root)
    labels = config.labels or pick(left, usual.labels, root)
    inputs = config.inputs or pick(left, usual.inputs, root)
    if inputs is None and labels is not None:
        inputs = _find_unnamed(arrays, (labels, groups))

    # Ask for the names that are still missing
    if inputs is None:
        held = list_names(arrays) or "nothing"
        raise ConfigError(
            f"data.inputs: got null, and {root} holds {held}; expected the name of one, or one "
            f"named {' | '.join(INPUTS)}, or x_train and x_test with y_train and y_test, or "
            "{input: name, ...} for a network of several inputs, or data.labels=none if each array "
            "is an input"
        )
    if labels is None:
        named = f"the name of one, or one named {' | '.join(LABELS)}, or an .npy or idx file"
        _ask_for_labels(arrays, {*_list_arrays(inputs), groups}, root, named)
    if labels == NO_LABELS:
        labels = None
    return Chosen(inputs, labels, groups)


def _find_unnamed(arrays: Arrays, used: Collection[str | None]) -> Any:
    """Return the arrays that are not in `used` as `data.inputs`.

    Returns:
        One name, or a dict of several by their own names; None if no array is left, or if an array
        is named after a side of a split.
    """
    if _of_own_names(arrays, "train", ()) or _of_own_names(arrays, "test", ()):
        return None
    unnamed = _list_unused(arrays, used)
    if not unnamed:
        return None
    if len(unnamed) == 1:
        return unnamed[0]
    return {name: name for name in sorted(unnamed)}


def _list_unused(arrays: Arrays, used: Collection[str | None]) -> list[str]:
    """Return the names not in `used` that are not usual for class names, scales or offsets."""
    unused = []
    for name in arrays:
        if name.lower() not in (*CLASSES, *STEPS) and name not in used:
            unused.append(name)
    return unused


def _ask_for_labels(
    arrays: Arrays, used: Collection[str | None], root: Path, expected: str
) -> None:
    """Raise `ConfigError` if an unused array may hold the labels."""
    if _list_unused(arrays, used):
        raise ConfigError(
            f"data.labels: got null, and {root} holds {list_names(arrays)}; expected {expected}, "
            f"or data.labels={NO_LABELS}"
        )


def _list_arrays(inputs: Any) -> list[str]:
    """Return the names in `inputs`, which is one name or a dict of names."""
    return list(inputs.values()) if isinstance(inputs, dict) else [str(inputs)]


def pick(names: Iterable[str], usual: Collection[str], source: object) -> str | None:
    """Return the name among `names` that is in `usual`, ignoring case; None if there is none.

    MNIST's file names count as `train_images` and so on.

    Raises:
        ConfigError: several names are usual.
    """
    known = [name for name in names if _simple(name) in usual]
    if len(known) > 1:
        raise ConfigError(
            f"data.inputs, data.labels: got null, and {source} holds {list_names(known, ' and ')}; "
            "expected the name of one"
        )
    return known[0] if known else None


def _simple(name: str) -> str:
    """Return a name in lower case; MNIST's file names become `train_images` and so on."""
    name = name.lower()
    mnist = _MNIST.fullmatch(name)
    if mnist:
        return f"{mnist[1]}_{mnist[2]}".replace("t10k", "test")
    return name


def check_name(key: str, name: str, root: Path, arrays: Arrays) -> None:
    """Raise `ConfigError` if `name` is neither an array nor a file."""
    if name not in arrays and not files.expand(name).is_file():
        held = list_names(arrays, mistyped=name) or "nothing"
        raise ConfigError(f"{key}: got {name}, expected a file, or one of {held} in {root}")
