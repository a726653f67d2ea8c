"""Completes the words of a command line that name network and data, before Hydra reads them.

Without `data`, Hydra would compose CIFAR-10. A user's own network must not be scored on CIFAR-10 by
default. Therefore, paths of data choose the source that reads them, and a user's own network
without data is refused.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from resnet8ptq.config import words as grammar
from resnet8ptq.core import console, files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data.sources import SOURCES, find_settings, name_file

WAYS = (
    "data=folder data.root=FOLDER | data=arrays data.root=FILE.npz | data=table data.root=FILE.csv"
    " | data=coco data.images=FOLDER data.annotations=FILE.json | data=huggingface "
    "data.root=FOLDER (docs/data.md)"
)
_NETWORK = ("model.path", "model.module")
_CHOOSES_NETWORK = ("model", "experiment", "benchmark")  # groups
_WITH_NETWORK = ("cifar10", "shapes")  # sources with a network of their own
# Modes that need no data; `-h` and `--version` never get here.
_NO_DATA = {"-c", "--cfg", "-i", "--info", "--hydra-help", "-sc", "--shell-completion"}
_OTHER_CONF = ("--config-dir", "-cd", "--config-path", "-cp")
_SWITCHES = ("-m", "--multirun", "-r", "--run")  # options without a value
# Lines of an experiment that choose the data.
_CHOOSES_DATA = re.compile(r"^\s*(- (override )?/)?(data|benchmark|data\.root): ", re.M)


def complete(words: Sequence[str], conf: Path, own: Path | None = None) -> list[str]:
    """Return the words, with the keys of plain paths and the data source that paths choose.

    Existing paths that Hydra's grammar refuses are quoted. Words with other errors are returned
    unchanged, because `config.words` reports them.

    Args:
        conf: the folder of the config groups.
        own: the user's folder of further options, if any.

    Raises:
        ConfigError: no source reads `data.root`, its paths need different sources, or two paths
            get the same key.
    """
    keyed: list[str] = []
    before = ""
    for word in words:
        named = _quote_path(_name_path(word, before, words))
        if named != word and named not in keyed:
            _check_one(named, keyed)
        keyed.append(named)
        before = word

    # Without `data`, the path chooses the source
    typed = list(_parse_all(keyed))
    if not _names_data(typed, conf, own):
        settings = _find_source(typed)
        if settings:
            keyed = _add_source(keyed, settings)
    _say_default_network(list(_parse_all(keyed)))
    return keyed


def require_data(words: Sequence[str], conf: Path, own: Path | None = None) -> None:
    """Raise `ConfigError` if a user's own network needs data, and nothing chooses them."""
    typed = list(_parse_all(words))
    keys = {override.key_or_group for override in typed}
    is_named = _names_data(typed, conf, own) or "data.root" in keys
    # An experiment in another config folder may choose the data
    is_hidden = any(word.startswith(_OTHER_CONF) for word in words)
    is_needed = _NO_DATA.isdisjoint(words) and not any(map(_inspects, typed))
    if is_named or is_hidden or not is_needed:
        return

    for override in typed:
        if override.key_or_group not in _NETWORK:
            continue
        for value in grammar.values(override):
            if value is not None and _is_own(override.key_or_group, value):
                raise ConfigError(
                    f"data: not set, expected the samples of {override.key_or_group}={value}; "
                    f"try {WAYS}"
                )


def _check_one(named: str, keyed: Sequence[str]) -> None:
    """Raise `ConfigError` if an earlier word has the key of a path: Hydra would use the last one.

    Args:
        named: the path with its key, as key=path.
        keyed: the earlier words.
    """
    key = grammar.key_of(named)
    for other in keyed:
        if grammar.key_of(other) == key:
            first = other.partition("=")[2]
            last = named.partition("=")[2]
            raise ConfigError(
                f"{key}: got {first} and {last}, expected one; to run each: -m {key}={first},{last}"
            )


def _say_default_network(typed: Sequence[Override]) -> None:
    """Print which network is scored if the user names data, but no network.

    Without this line, only a void verdict would show that `model.path` is missing. Data with a
    network of their own need no such line.
    """
    chosen = {override.key_or_group: override for override in typed}
    own = {key for key in chosen if key in (*_NETWORK, *_CHOOSES_NETWORK)}
    if "experiment" in own and chosen["experiment"].value() == "auto":  # of `ship`
        own.remove("experiment")
    if own or "data" not in chosen:
        return
    sources = {str(value) for value in grammar.values(chosen["data"])}
    if sources <= SOURCES.keys() - {*_WITH_NETWORK}:
        text = "model.path: not set; the network is MLPerf Tiny's ResNet8, trained on CIFAR-10"
        console.say(console.stderr(), text)


def _inspects(override: Override) -> bool:
    return override.key_or_group == "analysis" and override.value() == "inspect"


def _name_path(word: str, before: str, words: Sequence[str]) -> str:
    """Return an existing path without a key as `model.path=` if it is a network, else `data.root=`.

    Any other word is returned unchanged, also one that begins with `-` or `~`. So is a path whose
    key is among the words, or that may belong to the word before it.

    Args:
        before: the word before `word`; an option may take `word` as its value.
    """
    path = files.expand(word)
    is_plain = "=" not in word and not word.startswith(("-", "~"))
    is_value = before.startswith("-") and before not in _SWITCHES
    is_taken = is_value or before.endswith((",", "="))  # a space may have split a value
    if not is_plain or is_taken or not path.exists():
        return word
    from resnet8ptq.models.sources.formats import find_format  # imports numpy

    key = "model.path" if name_file(path) is None and find_format(path) else "data.root"
    if key in map(grammar.key_of, words):
        return word
    console.say(console.stderr(), f"{word}: taken as {key}={word}")
    return grammar.assign(key, word)


def _quote_path(word: str) -> str:
    """Return a word whose value is an existing path, quoted if Hydra's grammar refuses it.

    For example, Hydra refuses `data.root=größe`. Any other word is returned unchanged.
    """
    key, _, value = word.partition("=")
    if not value or word.startswith("-"):
        return word
    with suppress(OSError):  # raised by texts that are too long for a path
        # Most words need no parsing, which takes milliseconds
        if not files.expand(value).exists():
            return word
        try:
            grammar.parse(word)
        except ConfigError:
            return grammar.assign(key, value)
    return word


def _add_source(words: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    """Return the words with the settings of a data source; print the choice.

    `data.root` becomes the key of the source's path.
    """
    source = settings["data"]
    key = f"data.{SOURCES[source].key}"
    renamed = []
    for word in words:
        if grammar.key_of(word) == "data.root":
            word = word.replace("data.root", key, 1)
        renamed.append(word)
    known = {key, *map(grammar.key_of, renamed)}
    more = [f"{name}={value}" for name, value in settings.items() if name not in known]
    console.say(console.stderr(), f"data: not set; chosen by the path: {' '.join(more)}")
    return [*renamed, *more]


def _parse_all(words: Iterable[str]) -> Iterator[Override]:
    for word in words:
        if "=" in word and not word.startswith("-"):
            try:
                yield grammar.parse(word)
            except ConfigError:
                continue


def _names_data(typed: Sequence[Override], conf: Path, own: Path | None) -> bool:
    """Return whether the words, or an experiment that they name, choose the data.

    The result is also true with `hydra.searchpath`, because its folders may choose the data.
    """
    for override in typed:
        key = override.key_or_group
        if key in ("data", "benchmark", "hydra.searchpath"):
            return True
        if key == "experiment":
            for name in grammar.values(override):
                if _experiment_names_data(str(name), [own, conf]):
                    return True
    return False


def _experiment_names_data(
    name: str, folders: Sequence[Path | None], seen: Collection[str] = ()
) -> bool:
    """Return whether an experiment, or one that it extends, chooses the data.

    Args:
        seen: experiments that are not read again, in case they extend each other.
    """
    text = _read_experiment(name, folders)
    content = _parse(text)
    settings = content.get("data")
    has_root = isinstance(settings, dict) and settings.get("root") is not None
    if has_root or _CHOOSES_DATA.search(text):
        return True

    # An experiment extends the experiments in its defaults
    seen = {*seen, name}
    parents = content.get("defaults")
    for parent in parents if isinstance(parents, list) else []:
        is_other = isinstance(parent, str) and parent not in seen
        if is_other and _experiment_names_data(parent, folders, seen):
            return True
    return False


def _parse(text: str) -> dict[str, Any]:
    """Return the content of an experiment; empty for invalid YAML, which Hydra reports."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _read_experiment(name: str, folders: Sequence[Path | None]) -> str:
    """Return the YAML text of an experiment from the first folder that has it; else empty."""
    for folder in folders:
        path = None if folder is None else folder / "experiment" / f"{name}.yaml"
        if path is not None and path.is_file():
            return path.read_text("utf-8", errors="replace")
    return ""


def _find_source(typed: Sequence[Override]) -> dict[str, str]:
    """Return the settings of the data source for the typed paths; empty if they choose none.

    `data.images` chooses COCO, and so does `data.annotations` without `data.root`. Paths of
    `data.root` choose a source only if all exist.

    Raises:
        ConfigError: no source reads a path, or the paths of a sweep have different sources.
    """
    by_key = {override.key_or_group: override for override in typed}
    if "data.images" in by_key or ("data.annotations" in by_key and "data.root" not in by_key):
        return {"data": "coco"}
    if "data.root" not in by_key:
        return {}
    roots = []
    for value in grammar.values(by_key["data.root"]):
        roots.append(files.expand(value))
    if not roots or not all(path.exists() for path in roots):
        return {}  # the path is missing, or on another machine

    # All paths of a sweep must have one source
    annotated = "data.annotations" in by_key
    settings = [find_settings(path, annotated) for path in roots]
    names = sorted({setting["data"] for setting in settings})
    if len(names) > 1:
        raise ConfigError(
            f"data.root: got paths of {' and '.join(names)}, expected one kind; try a sweep for "
            "each, with data="
        )
    first = settings[0]
    if not {"data.masks", "data.targets"}.isdisjoint(by_key):  # pictures with labels elsewhere
        first.pop("data.labels", None)
    return first


def _is_own(key: str, value: Any) -> bool:
    """Return whether a network is the user's: a module, or an existing path other than ResNet8's.

    ResNet8 is the default network, of MLPerf Tiny.
    """
    path = files.expand(value)
    if key != "model.path" or not path.exists():
        return key != "model.path"  # a missing file gets its own error first
    from resnet8ptq.models.network_path import SHA256  # imports pooch

    known = os.environ.get("RESNET8_H5")
    if known and path.absolute() == Path(known).absolute():
        return False
    return path.is_dir() or files.sha256(path) != SHA256
