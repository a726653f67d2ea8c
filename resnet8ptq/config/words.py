"""The words behind `python run.py`, checked before Hydra reads them.

A typo is one line, and costs neither the import of a framework nor a run in the store. The values
of all jobs of a sweep are checked before the first job starts.
"""

import argparse
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, ValueType
from hydra.errors import HydraException

from resnet8ptq.config import limits
from resnet8ptq.config.schema import RunConfig, find_fields
from resnet8ptq.core import command
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import nearest, no_such_key

_ELSEWHERE = ("slurm", "ray_cluster")  # launchers whose jobs see other files and CPUs
_MODES = ("run", "multirun", "cfg", "info", "shell_completion")


def arrange(words: Sequence[str], conf: Path, own: Path | None = None) -> list[str]:
    """Return the words, checked, in the order that Hydra takes: settings, then its own options.

    Args:
        conf: the folder of the config groups.
        own: the user's folder of further options, if any.

    Raises:
        ConfigError: a word is no setting, or its value is not what the setting takes.
    """
    parser = get_args_parser()
    known, unknown = parser.parse_known_intermixed_args(list(words))
    settings = list(known.overrides)
    for word in unknown:
        raise ConfigError(_no_such_flag(word, parser))
    modes = [f"--{name}" for name in _MODES if getattr(known, name)]
    limits.require("options", " ".join(modes), len(modes) < 2, "one of them")
    groups, added = _find_groups(conf), _find_groups(own) if own else {}
    twice = {name: {*options} & {*groups.get(name, ())} for name, options in added.items()}
    for name, options in added.items():
        groups[name] = [*groups.get(name, ()), *options]
    _check_spaces(settings, groups)
    typed = [parse(word) for word in settings]
    # Folders of the user's own may add options to the groups.
    searched = known.config_dir or known.config_path
    searched = searched or any(override.key_or_group == "hydra.searchpath" for override in typed)
    launchers = [o.value() for o in typed if o.key_or_group == "hydra/launcher"]
    for override in typed:
        _check_key(override, groups)
        _check_group(override, groups, whole=not searched)
        _check_once(override, twice)
        _check_values(override, here=all(name not in _ELSEWHERE for name in launchers))
    return [*settings, *_without(words, settings)]


def values(override: Override) -> list[Any]:
    """Return the values that the jobs of a sweep get; none of a range of numbers or a glob."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
        return []
    return [
        value.text if isinstance(value, QuotedString) else value
        for value in override.sweep_iterator()
    ]


def _no_such_flag(word: str, parser: argparse.ArgumentParser) -> str:
    """Return the message for an option that Hydra lacks, with the closest match, if any."""
    near = nearest(word, parser._option_string_actions)
    mend = f"nearest: {near}" if near else "settings have no dash"
    mend = f"settings have no dash: {word.lstrip('-')}" if "=" in word else mend
    return f"{word}: no such option ({mend}); --hydra-help lists them"


def _find_groups(conf: Path) -> dict[str, list[str]]:
    """Return the options of each config group."""
    groups: dict[str, list[str]] = {}
    for path in sorted(conf.glob("*/**/*.yaml")):
        groups.setdefault(path.parent.relative_to(conf).as_posix(), []).append(path.stem)
    return groups


def _check_spaces(settings: Sequence[str], groups: dict[str, list[str]]) -> None:
    """Raise `ConfigError` for a word without a key, most often behind a space."""
    for i, word in enumerate(settings):
        before, after = settings[i - 1] if i else "", "".join(settings[i + 1 : i + 3])
        if "=" in word[1:] or word.startswith("~"):
            continue
        if before and _is_open(before):
            mend = f"a space has split a value; put it in quotes: '{before} {word}'"
        elif before.endswith((",", "=")) or word.startswith(","):
            mend = f"a space has split a value; leave it out: {before}{word}"
        elif after.startswith("="):
            mend = f"a space has split it; leave it out: {word}{after}"
        else:
            mend = _find_option(word, groups)
        raise ConfigError(f"{word}: got a word without a key, takes key=value; {mend}")


def _find_option(word: str, groups: dict[str, list[str]]) -> str:
    """Return the settings that choose the option of that name, or of the nearest one."""
    if ":" in word:
        return f"try {word.replace(':', '=', 1)}"
    near = nearest(word, [option for options in groups.values() for option in options])
    owners = [f"{name}={near}" for name, options in groups.items() if near in options]
    return f"try {' or '.join(owners)}" if owners else f"try {word}=VALUE"


def _is_open(word: str) -> bool:
    """Tell whether brackets or quotes of a word are not closed."""
    unbalanced = any(word.count(a) != word.count(b) for a, b in ("[]", "{}", "()"))
    return unbalanced or word.count("'") % 2 == 1 or word.count('"') % 2 == 1


def parse(word: str) -> Override:
    """Return a setting as Hydra reads it; raise `ConfigError` where it cannot."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        key, _, value = word.partition("=")
        raise ConfigError(
            f"{key}: got {value!r}, which Hydra's grammar does not take; text with spaces or "
            f"""signs takes quotes inside of the shell's: "{key}='{value}'\""""
        ) from None


def _check_key(override: Override, groups: Collection[str]) -> None:
    """Raise `ConfigError` for a key whose first part is neither a setting nor a group."""
    key = override.key_or_group
    first = key.partition(".")[0].partition("/")[0]
    known = [item.name for item in fields(RunConfig)]
    known += [name for name in groups if "/" not in name and name not in known]
    if first not in [*known, "hydra"]:
        raise ConfigError(no_such_key(first, known))


def _check_group(override: Override, groups: dict[str, list[str]], whole: bool) -> None:
    """Raise `ConfigError` for a list, of which Hydra takes the last, and for an unknown option.

    Args:
        whole: these are all options that there are.
    """
    group = override.key_or_group
    if group not in groups:
        return
    got = override.value()
    if isinstance(got, list):
        options = ",".join(map(str, got))
        raise ConfigError(
            f"{group}: got a list, [{options}], takes one option; to run each: -m {group}={options}"
        )
    for value in values(override):
        own = whole and not group.startswith("hydra/")  # to those, plugins add options
        if own and isinstance(value, str) and "${" not in value and value not in groups[group]:
            raise ConfigError(command.no_such_option(value, group, groups[group]))


def _check_once(override: Override, twice: Mapping[str, Collection[str]]) -> None:
    """Raise `ConfigError` for an option of the user that has the name of the package's own."""
    group = override.key_or_group
    for value in values(override):
        if value in twice.get(group, ()):
            raise ConfigError(
                f"{group}: got {value!r}, an option of the package and conf/{group}/{value}.yaml "
                "here, expected one of them; try another name for that file"
            )


def _check_values(override: Override, here: bool) -> None:
    """Raise `ConfigError` for a value beyond its setting's limits, or for a missing file.

    Args:
        here: the jobs run on this machine; else its files and CPUs tell nothing.
    """
    key = override.key_or_group
    ways = find_fields(key)
    for value in values(override):
        if value is None or (isinstance(value, str) and "${" in value):
            continue
        faults = [fault for way in ways if (fault := _fault(key, way[-1].metadata, value, here))]
        if faults and len(faults) == len(ways):
            raise faults[0]


def _fault(key: str, metadata: Any, value: Any, here: bool) -> ConfigError | None:
    """Return what is wrong with a value, if anything."""
    try:
        for limit in metadata.get("limits", ()):
            limit.check(key, value)
        if here and metadata.get("is_path"):
            there = value != "" and Path(str(value)).expanduser().exists()
            takes = "a file or folder that exists"
            if not there:
                raise ConfigError(f"{key}: got {value or 'nothing'} (not there), takes {takes}")
        if here:
            check_threads(key, value)
    except ConfigError as fault:
        return fault
    except (TypeError, ValueError):  # of another type, which OmegaConf says in its own words
        pass
    return None


def check_threads(key: str, value: int | None) -> None:
    """Raise `ConfigError` for more threads than this machine has CPUs."""
    most = os.cpu_count() or 1
    if key in ("threads", "latency.threads") and value is not None:
        limits.require(key, value, value <= most, f"at most {most}: the CPUs of this machine")


def _without(words: Sequence[str], settings: Sequence[str]) -> Iterator[str]:
    """Yield the words that are no settings; those come in the same order among the words."""
    left = list(settings)
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            yield word
