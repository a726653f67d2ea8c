"""The descriptor of a backend: facts about it that the rest of the program uses.

Each folder of `resnet8ptq/backends` defines one as `BACKEND`. Its import is cheap: functions,
classes and modules are given by name, such as `module:name`, and imported when they are needed.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules, resolve_name
from typing import Any

_PACKAGE = __name__.partition(".")[0]
FILE = "file"  # this backend only scores files of other programs


@dataclass(frozen=True)
class Search:
    """The start and the abilities of a backend, from which `experiment=auto` takes its steps.

    Attributes:
        start: settings of the plain 8-bit configuration.
        sums_in_16_bits: whether the kernels need `reduce_range` on a CPU whose 16-bit sums
            saturate.
        fewer_bits: settings to add to `dtype=w4a8`; None if the backend's files hold no weights
            below 8 bits.
        chooses_operators: whether `op_types` is a separate step, to leave pools in float.
        dynamic: whether `method=dynamic` quantizes matrix products.
        mixed: whether `method=mixed` quantizes matrix products dynamically and convolutions
            statically.
        diagnoses: whether the search diagnoses its models; every diagnosis is then in QDQ format.
        weights_alone: whether `method=weight_only` stores weights by output channel.
        weights_in_blocks: whether `method=weight_only` stores weights of matrix products in blocks,
            with a scale for each block.
        wide_activations: whether integer kernels take 16-bit activations.
        float16_weights: whether `dtype=fp16` halves the backend's files.
    """

    start: tuple[str, ...] = ("dtype=int8", "calib=minmax", "per_channel=true")
    sums_in_16_bits: bool = False
    fewer_bits: tuple[str, ...] | None = None
    chooses_operators: bool = False
    dynamic: bool = False
    mixed: bool = False
    diagnoses: bool = False
    weights_alone: bool = False
    weights_in_blocks: bool = False
    wide_activations: bool = False
    float16_weights: bool = False


@dataclass(frozen=True)
class Backend:
    """A framework that quantizes networks and runs the files, or only runs files.

    Attributes:
        name: the value of `backend=`.
        quantizer: the backend's subclass of `backends.contract.Quantizer`.
        rank: the backend's position in lists and tables, in ascending order.
        other_names: names of the backend in other tools, for messages about a wrong `backend=`.
        options: the dataclass of the backend's settings, a subclass of `schema.BackendConfig`.
        complete: a function of the options, the network's format, `model.outputs` and whether the
            dtype is float, that returns the options with defaults for this network; may be empty.
        quantizes: whether the backend quantizes; False if it scores files of other programs.
        runtime: the name on PyPI of the package that runs the files.
        packages: packages that the results depend on; cache keys and tags have their versions.
        extra: the extra of this package that installs the framework, also the name of the
            framework's module; empty if the framework is always installed.
        suffixes: suffixes of the files that the backend writes.
        runs_code: whether loading its files can run code.
        operators: a set of the operators with integer kernels, by ONNX name, or a function that
            returns the set; empty if the framework chooses operators for each network, or only
            runs files.
        lacks: operators that the framework cannot run, in 8 bits or in float; the list is
            incomplete.
        dynamic_operators: operators that only `method=dynamic` and `mixed` quantize.
        has_ranges: whether artifacts have the activation ranges that a plain run calibrates. False
            if the framework calibrates itself, for example. Only tests read this.
        single_input: whether networks must have exactly one input; it must be float32, except in
            the formats of `converts`.
        converts: formats of networks that the framework's own converter quantizes as a whole.
        search: the start and the abilities for `experiment=auto`.
        advice: a module with `advise` and `sweep`, see `backends.advice`; if empty, a backend
            that quantizes has the advice `search.start`.
        reads: suffixes of the files of other programs that `reader` reads.
        reader: a module with the functions that `backends.file.reading` calls.
        example: the package with `templates/runner.py.j2`, the part of a deployed `example.py` that
            loads and runs the file; empty for the quantizer's package. An `example.py` runs
            where resnet8ptq is not installed, so the template must not import it.
        serving: a flavor of MLflow, or a module for `served_model.py`; empty if files are not
            served.
        not_served: the reason why files are not served.
    """

    name: str
    quantizer: str
    rank: int = 100
    other_names: tuple[str, ...] = ()
    options: str = f"{_PACKAGE}.config.schema:BackendConfig"
    complete: str = ""
    quantizes: bool = True
    runtime: str = ""
    packages: tuple[str, ...] = ()
    extra: str = ""
    suffixes: tuple[str, ...] = ()
    runs_code: bool = False
    operators: str = ""
    lacks: frozenset[str] = frozenset()
    dynamic_operators: frozenset[str] = frozenset()
    has_ranges: bool = True
    single_input: bool = False
    converts: tuple[str, ...] = ()
    search: Search = Search()
    advice: str = ""
    reads: tuple[str, ...] = ()
    reader: str = ""
    example: str = ""
    serving: str = ""
    not_served: str = ""

    @property
    def schema(self) -> type[Any]:
        """The dataclass of the backend's settings."""
        kind: type[Any] = resolve_name(self.options)
        return kind

    @property
    def example_package(self) -> str:
        """The package with `templates/runner.py.j2`."""
        module = self.quantizer.partition(":")[0]
        return self.example or module.rpartition(".")[0]

    @property
    def model_files(self) -> tuple[str, ...]:
        """The names that the backend may give to a run's quantized file."""
        return tuple(f"model{suffix}" for suffix in self.suffixes)

    @property
    def is_installed(self) -> bool:
        """Whether the framework's package is installed."""
        return not self.extra or find_spec(self.extra) is not None

    def find_operators(self) -> frozenset[str]:
        """Return the operators with integer kernels, by ONNX name; `operators` must name them."""
        named = resolve_name(self.operators)
        if callable(named):
            named = named()
        return frozenset(named)


@cache
def find_backends() -> dict[str, Backend]:
    """Return the backends by name, in the order of lists and tables.

    The code does not spell out the name of the package `backends`. Otherwise most cache keys would
    depend on all backends, because a key depends on each module that the code names (`core.code`).
    """
    package = import_module(f"{_PACKAGE}.backends")
    folders = [item.name for item in iter_modules(package.__path__) if item.ispkg]
    backends: list[Backend] = []
    for name in folders:
        module = import_module(f"{package.__name__}.{name}")
        backends.append(module.BACKEND)
    backends.sort(key=lambda backend: (backend.rank, backend.name))
    return {backend.name: backend for backend in backends}


def find_search(option: str) -> Search:
    """Return the `search` of the backend with this name; a default `Search` if there is none."""
    backend = find_backends().get(option)
    return backend.search if backend else Search()


def find_readers() -> dict[str, Backend]:
    """Return the backends that read files of other programs, by the files' suffix."""
    readers = {}
    for backend in find_backends().values():
        for suffix in backend.reads:
            readers[suffix] = backend
    return readers
