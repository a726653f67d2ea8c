"""A starting point for a project: an experiment, a metric and a .gitignore.

    resnet8ptq init              in the current folder
    resnet8ptq init FOLDER       in that folder

It writes conf/experiment/mine.yaml, my_metrics.py and .gitignore, and overwrites no file.
"""

from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.core import command, files, invocation
from resnet8ptq.core.errors import ConfigError

FILES = {  # path in the project: name in `files/`
    "conf/experiment/mine.yaml": "mine.yaml",
    "my_metrics.py": "my_metrics.py",
    ".gitignore": "gitignore",
}


@dataclass
class Arguments:
    """The settings of `init`, as key=value or as a plain word."""

    folder: str = "."


def main(words: list[str]) -> None:
    """Write the files, and print the next commands.

    Raises:
        ConfigError: see `write` and `command.parse_words`.
    """
    asked = command.parse_words(words, Arguments, __doc__, plain="folder")
    folder = files.expand(asked.folder)
    write(folder)
    print(f"{folder.absolute()}: {', '.join(FILES)}")
    print("Next:")
    if folder.absolute() != Path.cwd():
        print(f"  {invocation.shell('cd', str(folder))}")
    print(f"  {invocation.command('run', 'experiment=mine')}")
    for name in ("deploy", "ui"):
        print(f"  {invocation.command(name)}")


def write(folder: Path) -> None:
    """Write the files into a folder, which is created if necessary.

    Raises:
        ConfigError: one of the files exists, so none is written; or the folder cannot be written.
    """
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise ConfigError(
            f"folder: got {folder.absolute()}, which has {', '.join(there)}, expected a folder "
            f"without them; try {invocation.command('init', 'FOLDER')}"
        )

    # All names are free, so write all files
    try:
        for name, source in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((Path(__file__).parent / "files" / source).read_bytes())
    except OSError as error:
        raise ConfigError(f"folder: cannot write to {folder.absolute()} ({error})") from None
