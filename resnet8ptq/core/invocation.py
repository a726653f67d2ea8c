"""Writes the commands that this program prints, so that users can paste them into their shell."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from pkgutil import resolve_name

from resnet8ptq.core.importing import PACKAGE

SCRIPT = "resnet8ptq"
MODULE = "resnet8ptq"
CHECKOUT = "run.py"


def command(name: str, *words: str) -> str:
    """Return the command line that calls `name` (`run`, `deploy`, `ui`, ...) with `words`.

    The line begins as this process's command line does: with the script `resnet8ptq`, or with
    `python run.py` for the command `run`. Otherwise it begins with `python -m resnet8ptq`. A
    program that PATH does not lead to gets its full path.
    """
    called = Path(sys.argv[0])
    if called.name == SCRIPT:
        start = [_name(SCRIPT, called), name]
    elif called.name == CHECKOUT and name == "run":
        start = [_name("python", Path(sys.executable)), sys.argv[0]]
    else:
        start = [_name("python", Path(sys.executable)), "-m", MODULE, name]
    return shell(*start, *words)


def shell(*words: str, **variables: str) -> str:
    """Return the command line of a program, quoted for a POSIX shell.

    Use this function for each command with untrusted words that is printed or written. Otherwise a
    name from a store could end a word and begin a command.

    >>> shell("cd", "my folder", ROOT="$HOME")
    "ROOT='$HOME' cd 'my folder'"
    """
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*settings, shlex.join(words)])


_SHOWN = re.compile(rf"(^ +|`|: ){SCRIPT} (\w+)", re.M)


def adapt(usage: str) -> str:
    """Return a help text in which each command begins as `command` writes it."""
    return _SHOWN.sub(lambda match: match[1] + command(match[2]), usage)


def version() -> str:
    """Return the name and version of this program."""
    return f"{SCRIPT} {resolve_name('resnet8ptq:__version__')}"


def install(extra: str) -> str:
    """Return the command that installs the libraries of an extra."""
    pip = _name("pip", Path(sys.executable).with_name("pip"))
    if Path.cwd() == PACKAGE.parent:  # the command runs in a checkout
        return shell(pip, "install", "-c", "constraints.txt", "-e", f".[{extra}]")
    return shell(pip, "install", f"resnet8ptq[{extra}]")


def _name(program: str, path: Path) -> str:
    """Return the program's name if PATH leads to it; otherwise its absolute path."""
    on_path = shutil.which(program)
    if path.name == str(path):
        return program
    if on_path and Path(on_path).absolute().parent == path.absolute().parent:
        return program
    return str(path.absolute())
