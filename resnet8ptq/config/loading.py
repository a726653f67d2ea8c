"""Turns Hydra's composed config into a checked `RunConfig`; saves and loads it."""

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from resnet8ptq.config import limits, schema
from resnet8ptq.config.schema import DTYPES, FLOATS, AnalysisConfig, RunConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.core.text import safe_name

T = TypeVar("T")
log = logging.getLogger(__name__)

_BASES = {"backend": schema.BackendConfig, "data": schema.DataConfig, "task": schema.TaskConfig}

CONFIG_FILE = "config.yaml"  # the file in a run's folder
MAX_BYTES = 2**20  # largest config file of a run

# `conf/config.yaml` names folders with `safe_name`: Hydra makes them before the config is checked.
# OmegaConf 2.4 renames `register_new_resolver`; the older `register_resolver` takes no `replace`.
_register_resolver: Any = OmegaConf.register_resolver
if "replace" not in inspect.signature(_register_resolver).parameters:
    _register_resolver = OmegaConf.register_new_resolver
_register_resolver("safe_name", lambda text: safe_name(str(text)), replace=True)


_registered: set[type] = set()  # Hydra 1.4 warns about a second registration


def register_schemas() -> None:
    """Register the schemas in Hydra's store, before Hydra composes.

    `RunConfig` is the schema of every run. A backend, data set or task with its own options has a
    further schema. It is stored below `hydra/`, so that Hydra does not offer it as an option of the
    group.
    """
    store = ConfigStore.instance()
    if RunConfig not in _registered:
        store.store(name="schema", node=RunConfig)
        _registered.add(RunConfig)
    for base in _BASES.values():
        for node in _with_options(base):
            if node not in _registered:
                store.store(group="hydra/schema", name=node.name, node=node)
                _registered.add(node)


def _with_options(base: type) -> list[Any]:
    """Return the dataclasses of the backends, data sets or tasks with their own options."""
    kinds = schema.with_subclasses(base)
    return [kind for kind in kinds if kind is not base and kind.name != MISSING]


def parse_config(cfg: DictConfig) -> RunConfig:
    """Return Hydra's composed config as a checked `RunConfig`; see `type_composed` and `check`."""
    config = type_composed(cfg)
    check(config)
    return config


def type_composed(cfg: DictConfig) -> RunConfig:
    """Return Hydra's composed config as a `RunConfig`.

    Raises:
        ConfigError: a value is missing or cannot be resolved, or the defaults lack the schema.
    """
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if not isinstance(config, RunConfig):  # composed without the schema
        raise ConfigError("conf/config.yaml: the defaults must begin with `schema`")
    return config


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a config that `limits.check` or a condition on settings refuses."""
    limits.check(config, _find_conditions(config))


def check_here(config: RunConfig) -> None:
    """Raise `ConfigError` as `check` does, and for more threads than this machine has CPUs."""
    check(config)
    limits.check_threads("threads", config.threads)
    limits.check_threads("latency.threads", config.latency.threads)


def save_config(config: RunConfig, path: Path) -> None:
    """Write a run's config for `load_config`."""
    files.write_text(path, OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def load_config(path: Path, trusted: bool = True) -> RunConfig:
    """Read a config that `save_config` has written.

    Args:
        trusted: whether the user trusts the author of the file. Otherwise, the file may hold plain
            values only: nothing that is imported or looked up. `target.command` stays, so the
            caller must not connect to the target. See also `without_paths`.

    Raises:
        ConfigError: the file is missing, is not a run's config, or holds settings that `check`
            refuses. Without `trusted`, also: it holds more than plain values, or names code.
    """
    try:
        text = files.read_bytes(path, MAX_BYTES).decode("utf-8")
        if not trusted:
            _check_values(_parse_plain(text), path)
        if not isinstance(yaml.compose(text, yaml.SafeLoader), yaml.MappingNode):
            raise ValueError("not a mapping")
        kept = OmegaConf.create(text)
        assert isinstance(kept, DictConfig)
        for group in _BASES:
            if not OmegaConf.is_dict(kept[group]):
                raise ValueError(f"{group} is not a mapping")

        # Type the values by the schemas of the options that the file names
        names = {group: kept[group].name for group in _BASES}
        typed = type_config(names)
        _drop_unknown(kept, typed, path)
        merged = OmegaConf.merge(typed, kept)
    except (OSError, ValueError, KeyError, RecursionError, *_READING) as error:
        raise ConfigError(f"{path}: not the config of a run ({error})") from error
    assert isinstance(merged, DictConfig)
    config = parse_config(merged)
    if not trusted:
        _refuse_code(config, path)
    return config


def _drop_unknown(kept: DictConfig, typed: DictConfig, path: Path, group: str = "") -> None:
    """Remove settings that this version lacks, in place, with a warning for each.

    Args:
        group: prefix of the keys, such as `calib.`.
    """
    known = {*typed}  # OmegaConf's `in` misses settings without a default
    for key in [*kept]:
        name = f"{group}{key}"
        if key not in known:
            log.warning("%s: %s=%s has no effect: no such setting now", path, name, kept[key])
            del kept[key]
        elif is_dataclass(OmegaConf.get_type(typed, key)) and OmegaConf.is_dict(kept[key]):
            _drop_unknown(kept[key], typed[key], path, f"{name}.")


def type_config(names: Mapping[str, str | None]) -> DictConfig:
    """Return the schema of a run with the options of a backend, a data set and a task.

    Args:
        names: the chosen option of each group; a name without its own schema adds no options.
    """
    typed = OmegaConf.structured(RunConfig)
    for group, name in names.items():
        base = _BASES[group]
        chosen = base
        for node in _with_options(base):
            if node.name == name:
                chosen = node
        typed[group] = chosen
    assert isinstance(typed, DictConfig)
    return typed


_READING = (yaml.YAMLError, OmegaConfBaseException)


def _parse_plain(text: str) -> object:
    """Parse YAML; raise `ValueError` for an alias, because a few aliases can exhaust the memory."""
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("an alias")
    return yaml.safe_load(text)


def _check_values(value: object, path: Path, key: str = "") -> None:
    """Raise `ConfigError` unless a value is text, a number, true, false, null, a list or a dict.

    The same holds for the values in lists and dicts. Text with `${` is refused because OmegaConf
    looks it up, and keys such as `_target_` because Hydra makes objects from them.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str | int) or re.fullmatch(r"_\w+_", str(name)):
                raise ConfigError(f"{path}: holds {name!r} {_IN_A_STORE}")
            _check_values(inner, path, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, path, key)
    elif not isinstance(value, str | int | float | None) or "${" in str(value):
        raise ConfigError(f"{path}: {key}: got {str(value)!r} {_IN_A_STORE}")


def _refuse_code(config: RunConfig, path: Path) -> None:
    """Raise `ConfigError` for settings that name code."""
    named = {"model.module": config.model.module, "model.module_args": config.model.module_args}
    named["task.metric"] = getattr(config.task, "metric", None)
    for key, value in named.items():
        if value is not None:
            raise ConfigError(f"{path}: {key}: got {value!r} {_IN_A_STORE}")


def find_paths(node: object, prefix: str = "") -> dict[str, str]:
    """Return the paths in a config by key: the values of the fields with `is_path`."""
    paths: dict[str, str] = {}
    for item in fields(node):  # type: ignore[arg-type]
        value = getattr(node, item.name)
        key = f"{prefix}{item.name}"
        if is_dataclass(value):
            paths |= find_paths(value, f"{key}.")
        elif item.metadata.get("is_path") and value is not None:
            paths[key] = str(value)
    return paths


def without_paths(config: RunConfig) -> RunConfig:
    """Return another user's config without the paths, cache and store of that user's machine.

    A path may lead to this user's private files, and the content of a cache or a store that another
    user has named is unknown.
    """
    return replace(_drop_paths(config), cache_dir=None, tracking=schema.TrackingConfig())


def _drop_paths(node: T) -> T:
    changes: dict[str, Any] = {}
    for item in fields(node):  # type: ignore[arg-type]
        value = getattr(node, item.name)
        if is_dataclass(value):
            changes[item.name] = _drop_paths(value)
        elif item.metadata.get("is_path"):
            changes[item.name] = None
    return replace(node, **changes)  # type: ignore[type-var]


_IN_A_STORE = (
    "in another user's run, which could run code; expected plain values. If you trust the author "
    "of the run, add trust=true"
)


def _find_conditions(config: RunConfig) -> Iterator[limits.Condition]:
    """Yield the conditions beyond the limits of single fields, mostly on combined settings.

    Raises:
        ConfigError: settings conflict, a setting makes another one useless, the backend is unknown,
            or its own settings are missing.
    """
    backend = config.backend
    if not isinstance(backend, backend.descriptor.schema):
        raise ConfigError(f"backend.name: got {backend.name!r} alone; try backend={backend.name}")

    # Entropy calibration merges bins into levels
    bins = config.calib.num_bins
    levels = config.calib.num_quantized_bins
    takes = f"an even number > 2 * calib.num_quantized_bins = {2 * levels}"
    yield ("calib.num_bins", bins, bins % 2 == 0 and bins > 2 * levels, takes)

    # Refuse settings that another setting makes useless
    if config.calib.table is not None and config.method != "static":
        raise ConfigError(f"calib.table: has no effect with method={config.method}")
    if config.calib.trust and config.calib.table is None:
        raise ConfigError("calib.trust: has no effect without calib.table")
    if config.calib.table is not None and config.calib.name == "histogram":
        raise ConfigError("calib.table: torch's own observer of calib=histogram takes no ranges")
    for name in ("smooth_quant", "equalization"):
        if config.method == "qat" and getattr(config.corrections, name):
            raise ConfigError(
                f"corrections.{name}: got true, expected false with method=qat, whose learned "
                "ranges it would change"
            )

    # Plans, learned rounding and nodes in float exclude some combinations
    yield from _find_conditions_of_plan(config)
    if config.corrections.reconstruction:
        required: dict[str, tuple[object, object]] = {
            "method": (config.method, "static"),  # other methods find or learn their own ranges
            "corrections.adaround": (config.corrections.adaround, False),
            "calib.table": (config.calib.table, None),
        }
        for name, (got, wanted) in required.items():
            takes = f"{limits.shown(wanted)} with corrections.reconstruction=true"
            yield (name, got, got == wanted, takes)
    excluded = config.nodes_to_exclude
    named = isinstance(excluded, list) and all(isinstance(name, str) for name in excluded)
    yield ("nodes_to_exclude", excluded, named or excluded == "auto", "a list of names | auto")
    yield from _find_conditions_of_analysis(config, named)
    for name in ("mean", "std"):
        numbers = getattr(config.preprocess, name)
        yield (f"preprocess.{name}", numbers, numbers is not None, limits.NUMBERS.takes)


def _find_conditions_of_analysis(config: RunConfig, named: bool) -> Iterator[limits.Condition]:
    """Yield the conditions of an analysis.

    Args:
        named: whether `nodes_to_exclude` is a list of names.

    Raises:
        ConfigError: a setting belongs to an analysis that is not chosen.
    """
    chosen = config.nodes_to_quantize
    excluded = config.nodes_to_exclude
    analysis = config.analysis.name
    with_it = f"with analysis={config.analysis.name}"
    if analysis in ("sensitivity", "diagnose", "profile"):  # these quantize the network themselves
        takes = f"a backend that quantizes {with_it}; +analysis=inspect takes a file"
        yield ("backend.name", config.backend.name, config.backend.quantizes, takes)
        plan = config.precision.plan
        yield ("precision.plan", plan, plan != "auto", f"null | bits by layer {with_it}")
        dtypes = " | ".join(name for name in DTYPES if name not in FLOATS)
        yield ("dtype.name", config.dtype.name, not config.dtype.is_float, f"{dtypes} {with_it}")
    if analysis == "sensitivity":
        yield ("nodes_to_quantize", chosen, chosen is None, f"null {with_it}")
        yield ("nodes_to_exclude", excluded, not excluded, f"[] {with_it}")

    # Refuse a setting of another analysis
    owners = {"mode": "sensitivity", "changed": "plan_test", "try_changes": "diagnose"}
    for key, owner in owners.items():
        default = getattr(AnalysisConfig, key)
        if analysis != owner and getattr(config.analysis, key) != default:
            raise ConfigError(f"analysis.{key}: has no effect without +analysis={owner}")

    # Diagnose and profile take names of layers, and do not search for them
    if analysis in ("diagnose", "profile"):
        yield ("nodes_to_exclude", excluded, named, f"a list of names {with_it}")
    if analysis == "profile":
        yield ("latency.enabled", False, config.latency.enabled, f"true {with_it}")
        takes = f"static | dynamic | weight_only {with_it}"
        yield ("method", config.method, config.method != "qat", takes)


def _find_conditions_of_plan(config: RunConfig) -> Iterator[limits.Condition]:
    """Yield the conditions of `precision.plan`; `auto` needs `max_bytes` or `max_drop`, not both.

    Raises:
        ConfigError: one of these is set without `auto`.
    """
    # A limit tells `auto` which plan to search
    precision = config.precision
    limits_set = 2 - [precision.max_bytes, precision.max_drop].count(None)
    if precision.plan == "auto":
        takes = "precision.max_bytes or precision.max_drop, one of them"
        yield ("precision.plan", "auto", limits_set == 1, takes)
        excluded = config.nodes_to_exclude
        yield ("nodes_to_exclude", excluded, excluded != "auto", "names with precision.plan=auto")
        if precision.max_drop is not None:
            method = config.method
            yield ("method", method, method == "static", "static with precision.max_drop")
    elif limits_set:
        raise ConfigError("precision.max_bytes, max_drop: have no effect without plan=auto")

    # Bits need a dtype of integers
    if precision.plan is not None:
        dtype = config.dtype
        yield ("dtype.name", dtype.name, not dtype.is_float, "others with precision.plan")
