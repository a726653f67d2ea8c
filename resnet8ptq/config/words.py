"""Checks the command-line words of `resnet8ptq run`, before Hydra reads them.

Most typos are reported here, in one line, before a framework is imported or a run is recorded.
Hydra and `schema` report the others, such as a wrong type. In a sweep, the listed values of all
jobs are checked. `find_idle` finds settings without effect in a composed config. Further functions
parse and quote single settings.
"""

import argparse
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig

from resnet8ptq.config import limits
from resnet8ptq.config.limits import Limit, shown
from resnet8ptq.config.schema import (
    BackendConfig,
    DataConfig,
    RunConfig,
    TaskConfig,
    find_fields,
    with_subclasses,
)
from resnet8ptq.core import command, files, other_names
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import nearest, no_such_key

_REMOTE = ("slurm", "ray_cluster")  # launchers whose jobs see other files and CPUs
_GROUPS = ("backend", "dtype", "calib", "data", "preprocess", "task", "analysis", "benchmark")
_UNSET = ("benchmark", "experiment")  # groups without a default option
_NETWORKS = (".onnx", ".h5", ".keras", ".tflite", ".pt2")  # suffixes of networks
_MODES = ("run", "multirun", "cfg", "info", "shell_completion")


def check_and_arrange(words: Sequence[str], conf: Path, own: Path | None = None) -> list[str]:
    """Check the words; return them in Hydra's order: settings, then Hydra's options.

    Args:
        conf: the folder of the config groups.
        own: the user's folder of further options, if any.

    Raises:
        ConfigError: a word is wrong, such as an unknown setting, or does not fit another word.
        SystemExit: Hydra's parser refuses the value of an option, such as `--cfg`.
    """
    parser = get_args_parser()
    words = list(map(_complete_analysis, words))
    known, unknown = parser.parse_known_intermixed_args(words)
    settings = list(known.overrides)
    if unknown:
        position = words.index(unknown[0])
        following = "".join(words[position + 1 : position + 2])  # empty after the last word
        raise ConfigError(_no_such_flag(unknown[0], parser, following))
    modes = [f"--{name}" for name in _MODES if getattr(known, name)]
    limits.require("options", " ".join(modes), len(modes) < 2, "one of them")

    # Find each group's options, and refuse names that both folders have
    groups = _find_groups(conf)
    added = _find_groups(own) if own else {}
    twice = {}
    for name, options in added.items():
        ours = groups.get(name, [])
        twice[name] = {*options} & {*ours}
        groups[name] = [*dict.fromkeys([*ours, *options])]
    _check_spaces(settings, groups)

    # A search path may add options that `groups` lacks
    typed = [parse(word) for word in settings]
    is_searched = bool(known.config_dir or known.config_path)
    is_local = True
    for override in typed:
        if override.key_or_group == "hydra.searchpath":
            is_searched = True
        if override.key_or_group == "hydra/launcher" and override.value() in _REMOTE:
            is_local = False

    # Check key, option and value of each setting, then settings together
    for override in typed:
        _check_key(override, groups)
        _check_section(override, groups)
        _check_group(override, groups, whole=not is_searched)
        _check_once(override, twice)
        _check_values(override, local=is_local)
        if not known.multirun:
            _check_brackets(override)
    _check_shared(typed, conf)
    options = [word for word in words if word not in settings]
    return [*settings, *options]


def _complete_analysis(word: str) -> str:
    """Add the `+` that Hydra needs, because the defaults list of `config.yaml` lacks `analysis`."""
    return f"+{word}" if word.startswith("analysis=") else word


def values(override: Override) -> list[Any]:
    """Return the values of a setting over all jobs; empty for an interval of numbers or a glob.

    Raises:
        ConfigError: the values cannot be listed, such as those of a range with a step of 0.
    """
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
        return []
    try:
        return list(map(_unquote, override.sweep_iterator()))
    except (ValueError, HydraException) as error:
        got = override.get_value_string()
        key = override.key_or_group
        raise ConfigError(f"{key}: got {got}, which has no values ({error})") from None


def _unquote(value: Any) -> Any:
    """Return the text of a quoted string, and any other value unchanged."""
    return value.text if isinstance(value, QuotedString) else value


def key_of(word: str) -> str:
    """Return the key of a setting of the command line.

    >>> key_of("+model.path=net.onnx")
    'model.path'
    """
    return word.lstrip("+~").partition("=")[0]


def is_group(key: str) -> bool:
    """Return whether a key chooses an option of a config group, other than an experiment."""
    return key in (*_GROUPS, "model") or "/" in key


def is_plain(word: str) -> bool:
    """Return whether a setting from another person is safe to repeat.

    The key, and each key in a dict, must not name code, a command, a store or a cache. The key must
    be a group or in the schema, and the setting must not delete it. The value must not be a sweep,
    import code or refer to other values (`${...}`). A list is safe if each of its values is.
    """
    try:
        override = parse(word)
    except ConfigError:
        return False
    key = override.key_or_group
    if override.is_delete() or override.is_sweep_override():
        return False
    value = override.value()
    if any(name.startswith(_OF_OTHERS) for name in _list_keys(key, value)):
        return False
    known = key in (*_GROUPS, "model", "experiment") or bool(find_fields(key))
    return known and _is_plain_value(value)


def _list_keys(key: str, value: Any) -> list[str]:
    """Return the key of a setting, and the full keys in a dict that is its value.

    >>> _list_keys("model", {"path": "my.onnx"})
    ['model', 'model.path']
    """
    keys = [key]
    if isinstance(value, dict):
        for name, item in value.items():
            keys += _list_keys(f"{key}.{_unquote(name)}", item)
    return keys


# Prefixes of settings that run code or a command, or name another user's store or cache.
_OF_OTHERS = ("model.module", "task.metric", "target", "tracking", "cache_dir")


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, dict):
        for key, item in value.items():
            if str(key).startswith("_") or not _is_plain_value(item):
                return False
        return True
    if isinstance(value, list):
        return all(map(_is_plain_value, value))
    text = _unquote(value)
    return isinstance(text, str | int | float | None) and "${" not in str(text)


def quote(text: str) -> str:
    """Return a text quoted for Hydra's grammar.

    >>> quote("it's")
    "'it\\\\'s'"
    """
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def assign(key: str, text: str) -> str:
    """Return `key=text`, quoted if Hydra's grammar requires it.

    >>> assign("data.root", "my (own) pictures")
    "data.root='my (own) pictures'"
    >>> assign("model.path", "my.onnx")
    'model.path=my.onnx'
    """
    plain = f"{key}={text}"
    try:
        is_plain = bool(parse(plain).value() == text) and "," not in text
    except ConfigError:
        is_plain = False
    return plain if is_plain else f"{key}={quote(text)}"


def as_list(names: Iterable[str]) -> str:
    """Return names as a list in Hydra's grammar.

    >>> as_list(["conv2d_1/BiasAdd", "a;b"])
    "[conv2d_1/BiasAdd,'a;b']"
    """
    items = []
    for name in names:
        is_word = re.fullmatch(r"[A-Za-z/][\w./:-]*", name, re.ASCII)  # and so no number
        if not is_word or name.casefold() in _CONSTANTS:
            name = quote(name)
        items.append(name)
    return f"[{','.join(items)}]"


_CONSTANTS = ("null", "true", "false", "inf", "nan")  # which Hydra does not read as text


def _no_such_flag(word: str, parser: argparse.ArgumentParser, following: str) -> str:
    """Return the message for an unknown option.

    Args:
        following: the next word, which may be the option's value; empty after the last word.
    """
    key = word.lstrip("-").replace("-", "_").partition("=")[0]
    if key in other_names.ABSENT:
        return f"{word}: no such option; {other_names.ABSENT[key]}"
    value = word.partition("=")[2]
    if not value and "=" not in following:
        value = following

    # The option may be a setting, written as in other programs
    keys = _find_keys(key)
    if key in other_names.KEYS:
        keys = [other_names.KEYS[key]]
    near = nearest(word, parser._option_string_actions)
    if value and keys:
        mend = f"settings have no dash: {keys[0]}={value}"
    elif "=" in word:
        mend = f"settings have no dash: {word.lstrip('-')}"
    elif near:
        mend = f"nearest: {near}"
    else:
        mend = "settings have no dash"
    return f"{word}: no such option ({mend}); --hydra-help lists them"


def _find_keys(name: str) -> list[str]:
    """Return the full keys of the settings with this name, such as `calib.samples_per_class`.

    Only keys of one or two parts are found.
    """
    keys = []
    for item in fields(RunConfig):
        if item.name == name:
            keys.append(name)
        nested = f"{item.name}.{name}"
        if find_fields(nested):
            keys.append(nested)
    return keys


def _find_groups(conf: Path) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path in sorted(conf.glob("*/**/*.yaml")):
        groups.setdefault(path.parent.relative_to(conf).as_posix(), []).append(path.stem)
    return groups


def _check_spaces(settings: Sequence[str], groups: dict[str, list[str]]) -> None:
    """Raise `ConfigError` for a word without a key; most often a space has split a value."""
    padded = ["", *settings, ""]  # so that each word has neighbours
    for i, word in enumerate(settings):
        if "=" in word[1:] or word.startswith("~"):
            continue
        before = padded[i]
        following = padded[i + 2]
        after = "".join(settings[i + 1 : i + 3])

        # The first mend that fits the neighbours is the likeliest
        _, _, value = before.partition("=")
        is_path = value and files.expand(f"{value} {word}").exists()
        if before and (is_path or _is_open(before)):
            mend = f"a space has split a value; put it in quotes: '{before} {word}'"
        elif before.endswith((",", "=")) or word.startswith(","):
            mend = f"a space has split a value; leave it out: {before}{word}"
        elif after.startswith("="):
            mend = f"a space has split it; leave it out: {word}{after}"
        elif find_fields(word) and following and "=" not in following:
            mend = f"try {word}={following}"
        else:
            mend = _find_option(word, groups)
        raise ConfigError(f"{word}: got a word without a key, expected key=value; {mend}")


def _find_option(word: str, groups: dict[str, list[str]]) -> str:
    """Return the mend for a word without `=`, such as the setting that chooses it as an option."""
    if word in ("help", "version"):
        return f"try --{word}"
    if ":" in word:
        return f"try {word.replace(':', '=', 1)}"
    if Path(word).suffix.lower() in _NETWORKS:  # words that name existing files have a key by now
        return "no such file; try model.path=FILE"
    if word.endswith("run.py"):  # from a command that was pasted into another
        return "leave the name of the program out"
    if Path(word).suffix or "/" in word:
        return f"a file needs its key, such as model.path={word} or data.root={word}"

    # The word may be an option without its group
    near = nearest(word, [*itertools.chain.from_iterable(groups.values())])
    owners = [f"{name}={near}" for name, options in groups.items() if near in options]
    if not owners:
        return f"try {word}=VALUE"
    return f"try {' or '.join(owners)}"


def _is_open(word: str) -> bool:
    """Return whether the brackets or quotes in a word are not in pairs."""
    for opening, closing in ("[]", "{}", "()"):
        if word.count(opening) != word.count(closing):
            return True
    return word.count("'") % 2 == 1 or word.count('"') % 2 == 1


def parse(word: str) -> Override:
    """Return a setting as Hydra reads it; raise `ConfigError` if Hydra cannot."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        # The fault may be a list with other separators
        key, _, value = word.partition("=")
        listed = _list_values(key, value)
        if listed:
            raise ConfigError(
                f"{key}: got {value!r}, expected a comma between values only; try {key}={listed}"
            ) from None
        raise ConfigError(
            f"{key}: got {value!r}, which Hydra's grammar refuses; put text with spaces or "
            f"""signs into two pairs of quotes: "{key}='{value}'\""""
        ) from None


def _list_values(key: str, value: str) -> str:
    """Return a value with one comma between its parts; empty if this does not mend it.

    >>> _list_values("dtype", "int8,"), _list_values("backend", "onnx;torch")
    ('int8', 'onnx,torch')
    """
    separators = "[,;|]" if is_group(key) else ","
    parts = [part for part in re.split(separators, value) if part]
    listed = ",".join(parts)
    is_plain = all(re.fullmatch(r"[\w.-]+", part) for part in parts)
    return listed if is_plain and listed != value else ""


def _check_key(override: Override, groups: Collection[str]) -> None:
    """Raise `ConfigError` for a key whose first part is no setting, no group and not `hydra`.

    Keys in `other_names.ABSENT` are also refused, with messages of their own.
    """
    key = override.key_or_group
    first = key.partition(".")[0].partition("/")[0]
    known = [item.name for item in fields(RunConfig)]
    known += [name for name in groups if "/" not in name and name not in known]
    for name in (key, first):
        if name in other_names.ABSENT:
            raise ConfigError(f"{name}: no such key; {other_names.ABSENT[name]}")
    if first in [*known, "hydra"]:
        return

    # The key may be another tool's name, or the last part of a key
    others = {name.replace("_", ""): full for name, full in other_names.KEYS.items()}
    meant = others.get(first.casefold().replace("_", ""))
    keys = [meant] if meant else _find_keys(first)
    if keys and first == key:
        listed = " | ".join(f"{full}=" for full in keys)
        raise ConfigError(f"{first}: no such key; try {listed}")
    raise ConfigError(no_such_key(first, known))


def _check_section(override: Override, groups: Collection[str]) -> None:
    """Raise `ConfigError` for a value of a section that is no group, such as `latency`.

    A dict is accepted, and so is a value that refers to another (`${...}`).
    """
    key = override.key_or_group
    sections = [item for item in fields(RunConfig) if item.name == key and key not in groups]
    kind = get_type_hints(RunConfig).get(key)
    if not sections or not is_dataclass(kind) or override.is_delete():
        return
    for value in values(override):
        if isinstance(value, dict) or "${" in str(value):
            continue

        # If only one key below it accepts the value, that key is meant
        inner = fields(kind)
        takers = [item.name for item in inner if _takes_word(item, value)]
        listed = " | ".join(f"{key}.{item.name}" for item in inner)
        mend = ""
        if len(takers) == 1:
            mend = f"; try {key}.{takers[0]}={shown(value)}"
        raise ConfigError(f"{key}: got {shown(value)}, expected a key of it: {listed}{mend}")


def _takes_word(item: Field[Any], value: Any) -> bool:
    """Return whether a value is one of the words of a field, or true or false for `enabled`."""
    if isinstance(value, bool):
        return item.name == "enabled"
    return any(value in limit.choices for limit in item.metadata.get("limits", ()))


def _check_group(override: Override, groups: dict[str, list[str]], whole: bool) -> None:
    """Raise `ConfigError` for a list of options, a value that is no name, or an unknown option.

    Args:
        whole: whether `groups` lists every option; otherwise a name may be an option elsewhere.
    """
    group = override.key_or_group
    if group not in groups:
        return
    got = override.value()
    if isinstance(got, list):
        options = ",".join(map(str, got))
        raise ConfigError(
            f"{group}: got a list, [{options}], expected one option; to run each: -m "
            f"{group}={options}"
        )
    for value in values(override):
        is_unset = value is None and group in _UNSET
        is_name = is_unset or isinstance(value, str | dict)
        if not is_name and not override.is_delete():  # Hydra's error has a traceback
            raise ConfigError(command.no_such_option(shown(value), group, groups[group]))

        # Check names only against a complete list
        complete = whole and not group.startswith("hydra/")  # plugins add to Hydra's groups
        if complete and isinstance(value, str) and "${" not in value and value not in groups[group]:
            raise ConfigError(command.no_such_option(value, group, groups[group]))


def _check_once(override: Override, twice: Mapping[str, Collection[str]]) -> None:
    """Raise `ConfigError` for a chosen option that the user and the package both have."""
    group = override.key_or_group
    for value in values(override):
        if isinstance(value, str) and value in twice.get(group, ()):
            raise ConfigError(
                f"{group}: got {value!r}, an option of the package and conf/{group}/{value}.yaml "
                "here, expected one of them; try another name for that file"
            )


def _check_values(override: Override, local: bool) -> None:
    """Raise `ConfigError` for a value outside its limits, or a path that does not exist.

    Args:
        local: whether the jobs run here; then files must exist, and each thread needs a CPU.
    """
    key = override.key_or_group
    paths = _without_parts(find_fields(key))
    for value in values(override):
        if value is None or (isinstance(value, str) and "${" in value):
            continue
        faults = [_fault(key, path[-1].metadata, value, local) for path in paths]
        if faults and all(faults):  # no backend, source or task accepts the value
            [first, *others] = dict.fromkeys(map(str, faults))
            expected = [text.partition("expected ")[2] for text in others]
            raise ConfigError("; or ".join([first, *expected]))


def _check_brackets(override: Override) -> None:
    """Raise `ConfigError` for a list without brackets, which Hydra would read as a sweep."""
    if override.value_type != ValueType.SIMPLE_CHOICE_SWEEP:
        return
    key = override.key_or_group
    paths = find_fields(key)
    kinds = [str(path[-1].type) for path in paths]
    listed = override.get_value_string()
    if kinds and all(kind.startswith("list[") for kind in kinds):
        raise ConfigError(f"{key}: got {listed}, expected a list; try {key}=[{listed}]")

    # Untyped settings may take a list too
    listed_values = values(override)
    faults = []
    for path in paths:
        faults.append(_fault(key, path[-1].metadata, listed_values, local=False))
    takes_list = kinds and all("Any" in kind for kind in kinds) and not any(faults)
    if takes_list:
        raise ConfigError(
            f"{key}: got several values, expected one or a list; try {key}=[{listed}]; to run "
            f"each: -m {key}={listed}"
        )


_WITH_OPTIONS = {"backend": BackendConfig, "data": DataConfig, "task": TaskConfig}


def _check_shared(typed: Sequence[Override], conf: Path) -> None:
    """Raise `ConfigError` for a setting that only some options of its swept group have.

    The setting is also refused if the group's default option lacks it, unless an experiment is
    chosen or the setting is swept. Hydra first composes a sweep without the swept settings, and its
    error would blame the default option.
    """
    chosen = {override.key_or_group: override for override in typed}
    for override in typed:
        key = override.key_or_group
        group, _, name = key.partition(".")
        if group not in _WITH_OPTIONS or not name or group not in chosen or override.is_delete():
            continue
        options = values(chosen[group])
        taking = [option for option in options if _takes(group, option, name, conf)]
        if len(options) < 2 or not taking:
            continue

        # Name the options of the sweep that lack the setting
        alone = f"{group}={','.join(taking)} {override.input_line}"
        for option in options:
            if option not in taking:
                raise ConfigError(f"{key}: no such key with {group}={option}; try {alone}")
        default = _find_default(group, conf)
        is_first = not override.is_sweep_override() and "experiment" not in chosen
        if is_first and not _takes(group, default, name, conf):
            raise ConfigError(
                f"{key}: no such key with {group}={default}, with which Hydra begins a sweep; try "
                f"{key}=choice({override.get_value_string()})"
            )


def _takes(group: str, option: str, name: str, conf: Path) -> bool:
    """Return whether an option has a setting; True for an option that is not the package's."""
    path = conf / group / f"{option}.yaml"
    if not path.exists():
        return True

    # An option without a schema of its own has the settings of the option that it extends
    schema = _WITH_OPTIONS[group]
    own = [kind for kind in with_subclasses(schema) if kind.name == option]
    if own:
        schema = own[0]
    else:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        for base in content.get("defaults", []):
            if (path.parent / f"{base}.yaml").exists():  # such as `torch` of torch_pt2e
                return _takes(group, base, name, conf)
    names = {item.name for item in fields(schema)}
    return name.partition(".")[0] in names


def _find_default(group: str, conf: Path) -> str:
    """Return the option of a group that `conf/config.yaml` chooses."""
    content = yaml.safe_load((conf / "config.yaml").read_text(encoding="utf-8"))
    chosen = {}
    for entry in content["defaults"]:
        if isinstance(entry, dict):
            chosen.update(entry)
    return str(chosen[group])


def _without_parts(paths: Sequence[list[Field[Any]]]) -> list[list[Field[Any]]]:
    """Leave out a path of `find_fields` if another path's field accepts all of its words and more.

    A message would repeat these words. For example, `task=anomaly` accepts two of the three words
    of `task.join`.
    """
    words: list[set[str]] = []
    for path in paths:
        own_words: set[str] = set()
        for limit in path[-1].metadata.get("limits", ()):
            own_words.update(limit.choices)
        words.append(own_words)
    kept = []
    for path, own in zip(paths, words, strict=True):
        is_part = any(own < other for other in words)
        if not own or not is_part:
            kept.append(path)
    return kept


def _fault(key: str, metadata: Any, value: Any, local: bool) -> ConfigError | None:
    try:
        for limit in metadata.get("limits", ()):
            limit.check(key, value)
        if not local:
            return None

        # The jobs run here, with this machine's CPUs and files
        limits.check_threads(key, value)
        if metadata.get("is_path") and (value == "" or not files.expand(value).exists()):
            got = f"{value or 'nothing'} (not there)"
            expected = f"expected a file or folder that exists{files.name_nearest(value)}"
            return ConfigError(f"{key}: got {got}, {expected}")
    except ConfigError as fault:
        return fault
    except (TypeError, ValueError):  # OmegaConf reports a value of another type
        pass
    return None


def find_idle(
    config: RunConfig | DictConfig, typed: Sequence[Override], swept: Sequence[Override] = ()
) -> list[str]:
    """Return lines about typed settings that have no effect in any job.

    Args:
        config: the settings of a run, or the composed config of a sweep.
        typed: the settings of the command line.
        swept: the settings of the sweep, which `config` lacks; typed settings override them.
    """
    lines = []
    for override in typed:
        key = override.key_or_group
        unmet = []
        for path in find_fields(key):
            conditions: list[tuple[str, Limit]] = []
            for item in path:
                conditions += item.metadata.get("only", {}).items()
            unmet.append(_unmet(conditions, config, typed=typed, swept=swept))

        # Several backends, sources or tasks may have the key
        if unmet and None not in unmet:  # no path to the key has an effect
            meant = ""
            if key == "max_drop":  # the name that `judge`, `report` and `deploy` have for it
                meant = ", or report.max_drop, the limit of the verdict"
            lines.append(f"{key}: has no effect with {unmet[0]}{meant}")
    return lines


def _unmet(
    conditions: Sequence[tuple[str, Limit]],
    config: RunConfig | DictConfig,
    typed: Sequence[Override],
    swept: Sequence[Override],
) -> str | None:
    """Return the first condition that no job fulfils, as text; None if there is none."""
    for key, limit in conditions:
        got = _job_values(key, config, typed=typed, swept=swept)
        if not any(limit.holds(value) for value in got):
            name = key.removesuffix(".name")
            return f"{name}={' | '.join(map(shown, got))}; try {name}={limit.takes}"
    return None


def _job_values(
    key: str,
    config: RunConfig | DictConfig,
    typed: Sequence[Override],
    swept: Sequence[Override],
) -> list[Any]:
    group, _, name = key.rpartition(".")
    names = {key}
    if name == "name" and group in _GROUPS:
        names.add(group)

    # A typed setting wins over one of the sweep, and both over the config
    setting = [override for override in typed if override.key_or_group in names]
    if setting and setting[-1].is_sweep_override():
        return values(setting[-1])
    of_sweep = [override for override in swept if override.key_or_group in names]
    if of_sweep and not setting:
        return values(of_sweep[-1])
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return [value]
