"""The command line: its words, one line for an error, and the exit code.

| code | meaning |
|---|---|
| 0 | success; also for an `unsupported` run, and for a search with failed steps |
| 1 | a run of a sweep failed, or an error other than a wrong input |
| 2 | an input is wrong: a setting, a network, data, or a path that may not be read or written |
| 3, 4 | a verdict of `judge`, `verdict`, `ship` or `experiment=auto`, see `verdicts.EXIT_CODES` |
| 130, 141, 143 | interrupted (SIGINT), pipe closed (SIGPIPE), terminated (SIGTERM) |
| 129 | the terminal of `ui` was closed (SIGHUP) |
"""

import errno
import gc
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar, cast, get_type_hints

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from resnet8ptq.core import files, invocation, other_names
from resnet8ptq.core.errors import ConfigError, DataError, ModelError, PtqError
from resnet8ptq.core.text import (
    mend_value,
    nearest,
    no_such_key,
    no_such_name,
    or_nearest,
    printable,
    redact,
    show,
)

T = TypeVar("T")


class Abort(BaseException):
    """Ends Hydra with an error.

    An `Exception` ends only single runs. After the exception of a job in a sweep, Hydra continues
    with the next job; it turns the exception of a callback into a warning.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


@dataclass(frozen=True)
class Ending:
    """The exit code of a command, and its error.

    Attributes:
        error: the first error or interrupt; None without one.
    """

    code: int
    error: BaseException | None = None


class Closable(Protocol):
    """A sweep that is closed when the command ends, including after an error or a signal."""

    @property
    def is_search(self) -> bool:
        """Whether the jobs are steps of a search, in which a failed job is no error."""
        ...

    def close(self, status: str) -> int:
        """Close the sweep with status `ok`, `failed` or `killed`; return its exit code."""
        ...


def let_hydra_raise() -> None:
    """Let Hydra raise its errors; by default Hydra prints an error and ends the process."""
    os.environ["HYDRA_FULL_ERROR"] = "1"


def main(run: Callable[[], int | None]) -> int:
    """Run a command as the whole program; return the exit code.

    Args:
        run: returns an exit code; None is 0.
    """
    let_hydra_raise()
    # Imports make 400,000 objects that stay. By default Python collects garbage after every 700 new
    # objects, which takes a tenth of a sweep's time.
    gc.set_threshold(20_000, 20, 20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = finish(run).code
    gc.freeze()  # otherwise Python searches them for garbage at exit, for a second or two
    return code


def finish(
    run: Callable[[], int | None],
    find_sweep: Callable[[], Closable | None] = lambda: None,
    report: Callable[[Exception], int] | None = None,
) -> Ending:
    """Call `run`, report its errors and close its sweep; return exit code and first error.

    The sweep is closed here because Hydra does not call `on_multirun_end` after an error or a
    signal.

    Args:
        run: returns an exit code; None is 0.
        find_sweep: returns the sweep that `run` has begun, if any.
        report: reports an error and returns the exit code; by default `print_error`.
    """
    report = report or print_error
    status = "killed"
    code = 0
    error: BaseException | None = None
    try:
        code = run() or 0
        status = "ok"
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        error = interrupt
        code = 130
    except BrokenPipeError as broken:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error = broken
        code = 141
    except (Exception, Abort) as raised:
        error = raised
        if isinstance(raised, Abort):
            error = raised.error
        error = _find_interrupt(raised) or error
        if isinstance(error, Exception):
            status = "failed"
            code = report(error)
        else:
            print("interrupted", file=sys.stderr)
            code = 130
        if isinstance(error, _INPUTS):
            sweep = find_sweep()
            if sweep and not sweep.is_search:
                code = 1  # one job failed, and the others have run
    finally:
        try:
            # Close the sweep after an error, too, so that its record is complete
            sweep = find_sweep()
            closed = sweep.close(status) if sweep else 0
            code = code or closed
        except KeyboardInterrupt as interrupt:
            print(": ".join(filter(None, ("interrupted", str(interrupt)))), file=sys.stderr)
            error = error or interrupt
            code = 130
        except Exception as raised:
            report(raised)
            error = error or raised
            code = 1
    return Ending(code, error)


def _find_interrupt(error: BaseException) -> KeyboardInterrupt | None:
    """Return the Ctrl-C that led to an error, such as one in a clean-up; None without one."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__context__
    return seen


def parse_words(words: list[str], schema: type[T], usage: str | None, plain: str = "") -> T:
    """Return a command's key=value words as an instance of its dataclass `schema`.

    Args:
        usage: the text of `--help`.
        plain: the key that a word without `=` sets; empty for no key.

    Raises:
        ConfigError: a key is unknown or missing, or a value is missing or wrong.
        SystemExit: the words ask for help, which was printed.
    """
    if {"-h", "--help"} & set(words):
        print(invocation.adapt(usage or ""))
        raise SystemExit(0)

    # Complete and quote the words for OmegaConf
    known = [f"{item.name}=" for item in fields(cast(Any, schema))]
    assigned = []
    for word in words:
        if plain and "=" not in word and not word.startswith("-"):
            word = f"{plain}={word}"
        if "=" not in word:
            takes = or_nearest(f"{word}=", known)
            raise ConfigError(f"{word}: got a word without a key, expected {takes}")
        if word.endswith("="):  # usually the script's variable is empty, as in run_id=$ID
            key = word[:-1]
            raise ConfigError(f"{key}: got nothing, expected a value; for the default leave it out")
        assigned.append(_quote_text(word, schema))

    # OmegaConf reads each value as YAML, and checks the keys and types
    typed = OmegaConf.create()
    word = ""
    try:
        for word in assigned:
            typed.merge_with_dotlist([word])
        merged = OmegaConf.merge(OmegaConf.structured(schema), typed)
        return cast(T, OmegaConf.to_object(merged))
    except (yaml.YAMLError, IndexError):  # such as an open bracket, in the value or in the key
        key, _, value = word.partition("=")
        raise ConfigError(f"{key}: got {value!r}, expected a plain value") from None
    except _NO_KEY as error:
        raise ConfigError(no_such_key(str(error.full_key), known)) from error
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _quote_text(word: str, schema: Any) -> str:
    """Quote the value of a text field, because YAML would read the name 1.20 as the number 1.2.

    Args:
        schema: the dataclass that has the field.
    """
    key, _, value = word.partition("=")

    # Follow the key, such as `calib.name`, to the type of its field
    kind = schema
    for name in key.split("."):
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    is_text = kind in (str, str | None)
    if not is_text or value in ("", "null"):
        return word
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


# Whether the user has asked for tracebacks
_WANTS_TRACEBACK = bool(os.environ.get("HYDRA_FULL_ERROR"))
_NO_KEY = (ConfigAttributeError, ConfigKeyError)  # an unknown key, or part of a longer one
COMPOSING = (HydraException, OmegaConfBaseException)  # of a wrong setting
_INPUTS = (ConfigError, DataError, ModelError)
EXPECTED = (*COMPOSING, PtqError, OSError)
_REFUSED = (errno.EROFS, errno.EACCES)  # the user's choice of a folder or a file
_OF_DISK = {  # the mend of each operating-system error
    errno.EROFS: "try a working folder that can be written",
    errno.EACCES: "try a file or a working folder with the rights for it",
    errno.ENOSPC: "free some space on the disks of the working folder and of TMPDIR",
    errno.EDQUOT: "free some space on the disks of the working folder and of TMPDIR",
}
_EXTRAS = {  # a plugin's option -> the extra of this package that installs the plugin
    "launcher/ray": "ray",
    "launcher/submitit_slurm": "slurm",
}
_NO_VALUE = re.compile(  # OmegaConf's messages for a value of another type
    r"Value '(.*)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)"
    r"(?: \(type \w+\))?\s+full_key: (\S+)"
)
_KINDS = {"Integer": "an integer", "Float": "a number", "bool": "true | false"}
_NO_FIELD = re.compile(r"In '([^']+)': \w+ raised while composing config:")
_NO_OPTION = re.compile(
    r"Could not find '([^']+)'\s+Available options in '([^']+)':(.+?)Config search path", re.S
)
# The start of the part of a message that describes Hydra's and OmegaConf's internals.
_INTERNALS = re.compile(r"\s(?:Config search path:|reference_type=|object_type=|See https://hydra)")
_NO_LIST = re.compile(r"Error merging override \+*([^=\s]+)=(\S+): .*is not a ListConfig")
_SEVERAL = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(([^'=]+)=.*?)'(?:\s|$)")


def no_such_option(name: str, group: str, options: Collection[str]) -> str:
    """Return the message for an unknown option of a config group, with the likely mend, if any.

    The name may be mistyped, a path, or another tool's name of an option.
    """
    message = no_such_name(group, name, options)
    without_near = f"{group}: got {name!r}, expected {' | '.join(options)}"
    meant = other_names.OPTIONS.get(group, {}).get(name.casefold())
    if meant:
        return f"{without_near}; try {group}={meant}"
    if group not in other_names.PATHS:
        return message

    # Another setting takes the path of a network or of data
    path = files.expand(name)
    if not path.exists() and nearest(name, options) is None:
        path = files.find_nearest(path) or path
    if path.exists():
        return f"{without_near}; try {other_names.PATHS[group]}={path}"
    return f"{message}; {other_names.PATHS[group]}= takes a path"


@contextmanager
def aborting(*errors: type[Exception]) -> Iterator[None]:
    """Raise errors of these types in the block as `Abort`.

    Do not use this around a job of a sweep: an `Abort` ends the sweep.
    """
    try:
        yield
    except errors as error:
        raise Abort(error) from error


def print_error(error: Exception) -> int:
    """Print an error in one line; return the exit code.

    The traceback comes first if the error is unexpected, or if the user has set HYDRA_FULL_ERROR.
    """
    if _WANTS_TRACEBACK or not isinstance(error, EXPECTED):
        print(show(redact("".join(traceback.format_exception(error)))), file=sys.stderr)
    print(f"error: {explain(error)}", file=sys.stderr)
    return exit_code(error)


def exit_code(error: Exception) -> int:
    """Return 2 for a wrong input, or a path that may not be read or written; otherwise 1."""
    is_input = isinstance(error, (*COMPOSING, *_INPUTS))
    is_refused = isinstance(error, OSError) and error.errno in _REFUSED
    return 2 if is_input or is_refused else 1


def explain(error: BaseException) -> str:
    """Return an error in one line, with its URLs as `redact` shows them.

    Usual errors of Hydra and OmegaConf are written anew, because their texts describe internals or
    lack the mend.
    """
    text = str(error)

    # Unknown keys, on the command line or in the file of an option
    cause = error.__cause__
    if isinstance(error, HydraException) and cause is not None:
        text += f": {cause}"
        if isinstance(cause, _NO_KEY) and is_dataclass(cause.object_type):
            # Hydra advises adding the key with `+`, which leads to another error.
            known = [item.name for item in fields(cause.object_type)]
            key = str(cause.full_key)
            group = key.rpartition(".")[0]
            option = ""
            # Name the option to which the settings belong, such as backend=torch
            if group and is_dataclass(cause.object_type.__base__):
                option = f"{group}={OmegaConf.select(cause.parent_node, 'name')}"
            text = no_such_key(key, known, option)
    match = _NO_FIELD.match(text)  # a key in the file of an option
    lacking = error.__context__
    if match and isinstance(lacking, _NO_KEY) and is_dataclass(lacking.object_type):
        known = [item.name for item in fields(lacking.object_type)]
        text = f"{match[1]}.yaml: {no_such_key(str(lacking.full_key), known)}"
        text += "; its `defaults` name its dataclass, as in [/hydra/schema/NAME@_here_]"

    # Wrong values and options; an extra is found in Hydra's text, before that is replaced
    if match := _NO_VALUE.search(text):
        got, kind, key = match.groups()
        text = f"{key}: got {got!r}, expected {_KINDS.get(kind, kind)}{mend_value(key, got)}"
    extras = [extra for option, extra in _EXTRAS.items() if f"'hydra/{option}'" in text]
    if match := _NO_OPTION.search(text):
        name, group, options = match.groups()
        text = no_such_option(name.removeprefix(f"{group}/"), group, options.split())
    if match := _NO_LIST.search(text):
        key, got = match.groups()
        text = f"{key}: got {got!r}, expected a list; try {key}=[{got}]"
    if match := _SEVERAL.search(text):
        word, key = match.groups()
        mend = f"to run each: -m {word}"
        decimals = re.fullmatch(r".*=0,(\d\d+)", word)
        if decimals:
            mend = f"numbers have a decimal point: {key}=0.{decimals[1]}; {mend}"
        text = f"{key}: got several values, expected one; {mend}"

    # Drop internals, and add the mends
    text = _INTERNALS.split(text)[0]
    if isinstance(error, OSError) and error.errno in _OF_DISK:
        text += f"; {_OF_DISK[error.errno]}"
    for extra in extras:
        text = f"{text.strip(' .')}; {extra}: {invocation.install(extra)}"
    return redact(printable(text)) or type(error).__name__
