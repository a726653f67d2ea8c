"""Prints `--help`: the most common keys, the pages of groups and keys, or the page of `all`.

The short page shows `FIRST`. The other pages are made from the YAML files of the configuration: the
comment on a key's line explains the key, and the first comment of an option's file explains the
option.
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from resnet8ptq.core import invocation
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import no_such_name

WIDTH = 120  # most characters of a line
_LEFT = 34  # characters of the left column
_GLOBAL = "# @package _global_"
_INTERNAL = ("hydra", "defaults")


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        name: the full name, with dots.
        default: the first line of the value, as in the file; empty for a key with keys below it.
        comment: the comment on the key's line; empty without one.
    """

    name: str
    default: str
    comment: str


# The keys that people set first, each with its meaning.
FIRST = (
    ("model.path=my.onnx", "the FP32 network: .onnx, .h5, .keras, .tflite, .pt2, or a SavedModel"),
    ("data.root=pictures", "its samples: class folders, .npz, .csv, ...; data= names the source"),
    ("preprocess=unit", "the same as in its training: raw 0..255, unit 0..1, symmetric -1..1, ..."),
    ("preprocess.size=96", "height and width of pictures, if the network leaves them free"),
    ("backend=torch", "the framework that quantizes; -m backend=onnx,torch runs both"),
    ("dtype=u8s8", "integers of activations and weights: int8, uint8, u8s8, w4a8, ..."),
    ("per_channel=true", "a scale for each channel of the weights, in place of one"),
    ("calib=percentile", "the ranges of activations: minmax, percentile, entropy, mse, ..."),
    ("report.max_drop=0.005", "the limit of the loss against FP32: 0.01 is 1 point"),
    ("latency.enabled=false", "leave out the measurement of speed"),
)


def print_page(conf: Path, words: Sequence[str], own: Path | None = None) -> None:
    """Print the short page, the page of `all`, or the pages of the topics and options in the words.

    Raises:
        ConfigError: see `show_topic`.
    """
    chosen = {}
    topics = []
    for word in words:
        name, equals, option = word.lstrip("+").partition("=")
        if equals:
            chosen[name] = option
        elif not word.startswith("-"):
            topics.append(word)

    # Choose the page
    if "all" in topics:
        page = show_all(conf, chosen, own)
    elif topics or chosen:
        pages = [show_topic(conf, topic, own=own) for topic in topics]
        for group, option in chosen.items():
            pages.append(show_topic(conf, group, option, own))
        page = "\n\n".join(pages)
    else:
        page = show_first(conf, own)
    print(invocation.adapt(page), flush=True)


def show_first(conf: Path, own: Path | None = None) -> str:
    """Return the short page: the most common keys, the groups, and how to see more."""
    words = yaml.safe_load((conf / "config.yaml").read_text("utf-8"))["hydra"]["help"]
    groups = _groups_of(_find_options(conf, own)) - {"hydra"}
    lines = [words["header"], "", "The keys that people set first:", ""]
    lines += [f"  {example:24}{meaning}" for example, meaning in FIRST]
    lines += [
        "",
        "More: resnet8ptq run --help GROUP, of " + ", ".join(sorted(groups)),
        "      resnet8ptq run --help KEY, such as latency, report or corrections",
        "      resnet8ptq run --help all",
    ]
    return "\n".join([*lines, "", words["footer"]])


def show_topic(conf: Path, topic: str, option: str = "", own: Path | None = None) -> str:
    """Return the options of a group and the keys of one option, or a key and the keys below it.

    A key that only options of a group have is shown for each of these.

    Args:
        option: an option of the group; empty for the default option.

    Raises:
        ConfigError: the topic is neither a group nor a key of `config.yaml` or of an option.
    """
    # Find the keys of the topic in `config.yaml`
    text = (conf / "config.yaml").read_text("utf-8")
    listed, defaults = _read_defaults(text)
    options = _find_options(conf, own)
    groups = _groups_of(options)
    all_keys = read_keys(text)
    keys = _find_below(topic, all_keys)

    # Show a group with its options, or the keys alone
    lines = []
    if topic in groups:
        plus = "" if topic in listed else "+"
        default = defaults.get(topic, "")
        lines += _show_group(topic, options, default, _width(), plus)
        option = option or default
        if f"{topic}/{option}" in options:
            keys += _read_option(options, topic, option)
    if keys:
        owner = f"{topic}={option}" if option else topic
        lines += ["", *_show_owned(keys, owner)]

    if lines:
        return "\n".join(lines)

    # A key that only options have is listed once for those that describe it equally
    keys_of = _read_group(topic.partition(".")[0], options)
    for described, owners in _find_owners(topic, keys_of).items():
        lines += ["", *_show_owned(described, ", ".join(owners))]
    if not lines:
        known = {"all", *groups, *(key.name.partition(".")[0] for key in all_keys)} - {"hydra"}
        for own_keys in keys_of.values():
            known.update(key.name for key in own_keys)
        raise ConfigError(no_such_name("--help", topic, sorted(known)))
    return "\n".join(lines)


def _read_group(group: str, options: Mapping[str, Path]) -> dict[str, list[Key]]:
    """Return the keys of each option of a group, by group=option; empty for another word."""
    keys_of = {}
    for name in sorted(options):
        of_group, _, option = name.partition("/")
        if of_group == group:
            keys_of[f"{group}={option}"] = _read_option(options, group, option)
    return keys_of


def _find_owners(
    topic: str, keys_of: Mapping[str, Sequence[Key]]
) -> dict[tuple[Key, ...], list[str]]:
    """Return the options that have a key, by their descriptions of it and of the keys below it."""
    owners: dict[tuple[Key, ...], list[str]] = {}
    for option, keys in keys_of.items():
        described = _find_below(topic, keys)
        if described:
            owners.setdefault(tuple(described), []).append(option)
    return owners


def _find_below(topic: str, keys: Iterable[Key]) -> list[Key]:
    """Return the key `topic`, and those below it."""
    return [key for key in keys if key.name == topic or key.name.startswith(f"{topic}.")]


def _show_owned(keys: Sequence[Key], owner: str) -> list[str]:
    return [f"Keys of {owner}", "", *_show_keys(keys, _width())]


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _read_defaults(text: str) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the defaults list of `config.yaml` by group, and the default options of groups."""
    listed: dict[str, str | None] = {}
    for entry in yaml.safe_load(text)["defaults"]:
        if isinstance(entry, dict):
            listed.update(entry)
    defaults = {}
    for name, option in listed.items():
        if option is not None and not name.startswith("override "):
            defaults[name] = str(option)
    return listed, defaults


def show_all(conf: Path, chosen: Mapping[str, str], own: Path | None = None) -> str:
    """Return the page of `--help all`: all groups with their options, then keys.

    The keys are those of `config.yaml`, and those of an option in each group: the chosen one, or
    else the default, if any.

    Args:
        conf: the folder of the configuration, whose `config.yaml` has the header and the footer
            below `hydra.help`.
        chosen: options by group, such as `data: arrays`.
        own: the user's folder of further options, if any.
    """
    text = (conf / "config.yaml").read_text("utf-8")
    words = yaml.safe_load(text)["hydra"]["help"]
    listed, defaults = _read_defaults(text)
    width = _width()

    # First the groups, then the keys of all runs, then those of the options
    lines = [words["header"], "", "Groups: choose by group=option, sweep by -m group=option,option"]
    options = _find_options(conf, own)
    for group in sorted(_groups_of(options)):
        plus = "" if group in listed else "+"  # Hydra adds a group that `defaults` does not list
        lines += ["", *_show_group(group, options, defaults.get(group, ""), width, plus)]
    lines += ["", "Keys: set by key=value", "", *_show_keys(read_keys(text), width)]
    for name, option in {**defaults, **chosen}.items():
        if f"{name}/{option}" not in options:
            continue
        keys = _read_option(options, name, option)
        if keys:
            lines += ["", f"Keys of {name}={option}", "", *_show_keys(keys, width)]
    return "\n".join([*lines, "", words["footer"]])


def _find_options(*folders: Path | None) -> dict[str, Path]:
    """Return the files of the options by group/option, each from the first folder that has it."""
    options = {}
    for folder in reversed(folders):
        if folder is None:
            continue
        for path in sorted(folder.glob("*/*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            options[name] = path
    return options


def _groups_of(options: Iterable[str]) -> set[str]:
    """Return the groups of options that are named group/option."""
    return {name.partition("/")[0] for name in options}


def read_keys(text: str, prefix: str = "") -> list[Key]:
    """Return the keys of a YAML text in its order, with the comments on their lines.

    A key that has keys below it is listed only if it has a comment. `hydra` and `defaults` are left
    out.

    >>> read_keys("a: 1 # one\\nb: # two\\n  c: [x]\\n")
    [Key(name='a', default='1', comment='one'), Key(name='b', default='', comment='two'), \
Key(name='b.c', default='[x]', comment='')]
    """
    node = yaml.compose(text, yaml.SafeLoader)
    if node is None:
        return []
    return list(_walk(node, prefix, text.splitlines()))


def _walk(node: yaml.Node, prefix: str, lines: Sequence[str]) -> Iterator[Key]:
    assert isinstance(node, yaml.MappingNode)
    for named, value in node.value:
        name = f"{prefix}{named.value}"
        begin = value.start_mark
        end = value.end_mark
        if name in _INTERNAL or named.value == "defaults":  # `defaults` of an option names others
            continue
        # A key with keys below it, or a key with a value
        if isinstance(value, yaml.MappingNode) and value.value:
            comment = _comment(lines[named.end_mark.line], named.end_mark.column)
            if comment:
                yield Key(name, "", comment)
            yield from _walk(value, f"{name}.", lines)
        else:
            line = lines[begin.line]
            last = end.column if end.line == begin.line else None
            yield Key(name, line[begin.column : last].strip(), _comment(line, end.column))


def _comment(line: str, column: int) -> str:
    return line[column:].partition("# ")[2].strip()


def _show_group(
    group: str, options: Mapping[str, Path], default: str, width: int, plus: str
) -> list[str]:
    rows = []
    for name, path in sorted(options.items()):
        if name.startswith(f"{group}/"):
            mark = " (default)" if path.stem == default else ""
            rows.append((f"{plus}{group}={path.stem}{mark}", Key("", "", _describe(path))))
    return _columns(rows, width)


def _show_keys(keys: Sequence[Key], width: int) -> list[str]:
    rows = []
    for key in keys:
        if key.comment.startswith("|"):  # the comment lists the other values
            key = replace(key, comment=f"{key.default} {key.comment}")
        left = key.name
        if key.default:
            left += f"={key.default}"
        rows.append((left, key))
    return _columns(rows, width)


def _describe(path: Path) -> str:
    """Return a file's first block of whole-line comments as one line, without `# @package`."""
    comments: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("# ") and line != _GLOBAL:
            comments.append(line[2:])
        elif comments:
            break
    return " ".join(comments)


def _read_option(options: Mapping[str, Path], group: str, option: str) -> list[Key]:
    """Return the keys of an option, with those of the options that it extends."""
    text = options[f"{group}/{option}"].read_text("utf-8")
    prefix = "" if text.startswith(_GLOBAL) else f"{group}."
    listed = read_keys(text, prefix)
    own = f"{group}.name"  # repeats the option, so it is shown only with a comment
    keys = {key.name: key for key in listed if key.comment or key.name != own}

    # The option's own values replace those that it inherits
    content = yaml.safe_load(text) or {}
    for parent in content.get("defaults", []):
        if f"{group}/{parent}" in options:
            inherited = {key.name: key for key in _read_option(options, group, parent)}
            keys = inherited | keys
    return list(keys.values())


def _columns(rows: Sequence[tuple[str, Key]], width: int) -> list[str]:
    """Return wrapped rows of two columns: a text and a comment."""
    lines = []
    for left, key in rows:
        head = f"  {left}"
        if len(head) >= _LEFT:
            lines.append(head)
            head = ""
        body = textwrap.wrap(key.comment, max(20, width - _LEFT)) or [""]
        lines.append(f"{head:{_LEFT}}{body[0]}".rstrip())
        lines += [" " * _LEFT + more for more in body[1:]]
    return [line for line in lines if line]
