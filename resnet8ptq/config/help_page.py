"""`--help`: the groups with their options, then every key with its default and its comment.

The YAML files of `conf/` are the one source: a key is explained by the comment on its line, an
option by the comment above its keys.
"""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from resnet8ptq.core import invocation

WIDTH = 120  # of a line at most
_LEFT = 34  # characters of the left column
_GLOBAL = "# @package _global_"
_INTERNAL = ("hydra", "defaults")


@dataclass(frozen=True)
class Key:
    """A key of the configuration.

    Attributes:
        default: the value as written in the file; empty for a key with keys below it.
    """

    name: str
    default: str
    comment: str


def print_page(conf: Path, words: Sequence[str], own: Path | None = None) -> None:
    """Print the help page, with the keys of the options chosen on the command line."""
    chosen = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    print(invocation.adapt(show(conf, chosen, own)), flush=True)


def show(conf: Path, chosen: Mapping[str, str], own: Path | None = None) -> str:
    """Return the help page.

    Args:
        conf: the folder of the configuration, whose `config.yaml` has the header and the footer
            below `hydra.help`.
        chosen: options by their groups, such as `data: arrays`; their keys are listed too.
        own: the user's folder of further options, if any.
    """
    text = (conf / "config.yaml").read_text("utf-8")
    config = yaml.safe_load(text)
    listed = dict(
        item for entry in config["defaults"] if isinstance(entry, dict) for item in entry.items()
    )
    defaults = {
        name: str(option)
        for name, option in listed.items()
        if option is not None and not name.startswith("override ")
    }
    words = config["hydra"]["help"]
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    lines = [words["header"], "", "Groups: choose by group=option, sweep by -m group=option,option"]
    options = _find_options(conf, own)
    for group in sorted({name.partition("/")[0] for name in options}):
        plus = "" if group in listed else "+"  # Hydra adds a group that `defaults` does not list
        lines += ["", *_show_group(group, options, defaults.get(group, ""), width, plus)]
    lines += ["", "Keys: set by key=value", "", *_show_keys(read_keys(text), width)]
    for name, option in {**defaults, **chosen}.items():
        keys = _read_option(options, name, option) if f"{name}/{option}" in options else []
        if keys:
            lines += ["", f"Keys of {name}={option}", "", *_show_keys(keys, width)]
    return "\n".join([*lines, "", words["footer"]])


def _find_options(*folders: Path | None) -> dict[str, Path]:
    """Return the files of the options by group/option, each from the first folder that has it."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for folder in reversed(folders)
        if folder
        for path in sorted(folder.glob("*/*.yaml"))
    }


def read_keys(text: str, prefix: str = "") -> list[Key]:
    """Return the keys of a YAML text in its order, with the comments on their lines.

    A key with keys below it is listed where it has a comment.

    >>> read_keys("a: 1 # one\\nb: # two\\n  c: [x]\\n")
    [Key(name='a', default='1', comment='one'), Key(name='b', default='', comment='two'), \
Key(name='b.c', default='[x]', comment='')]
    """
    node = yaml.compose(text, yaml.SafeLoader)
    return list(_walk(node, prefix, text.splitlines())) if node is not None else []


def _walk(node: yaml.Node, prefix: str, lines: Sequence[str]) -> Iterator[Key]:
    assert isinstance(node, yaml.MappingNode)
    for named, value in node.value:
        name, begin, end = f"{prefix}{named.value}", value.start_mark, value.end_mark
        if name in _INTERNAL:
            continue
        if isinstance(value, yaml.MappingNode) and value.value:
            if comment := _comment(lines[named.end_mark.line], named.end_mark.column):
                yield Key(name, "", comment)
            yield from _walk(value, f"{name}.", lines)
        else:
            line, last = lines[begin.line], end.column if end.line == begin.line else None
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
        if key.comment.startswith("|"):  # the file lists the default first
            key = replace(key, comment=f"{key.default} {key.comment}")
        rows.append((f"{key.name}={key.default}" if key.default else key.name, key))
    return _columns(rows, width)


def _describe(path: Path) -> str:
    """Return the first comment of a file that fills whole lines."""
    comments: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("# ") and line != _GLOBAL:
            comments.append(line[2:])
        elif comments:
            break
    return " ".join(comments)


def _read_option(options: Mapping[str, Path], group: str, option: str) -> list[Key]:
    """Return the keys of an option, after those of the option that it extends."""
    text = options[f"{group}/{option}"].read_text("utf-8")
    prefix = "" if text.startswith(_GLOBAL) else f"{group}."
    listed = read_keys(text, prefix)
    own = f"{group}.name"  # of the option itself, where no comment says otherwise
    keys = {key.name: key for key in listed if key.comment or key.name != own}
    for parent in (yaml.safe_load(text) or {}).get("defaults", []):
        if f"{group}/{parent}" in options:
            keys = {key.name: key for key in _read_option(options, group, parent)} | keys
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
