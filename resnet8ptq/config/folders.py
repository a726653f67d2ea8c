"""The folders of the configuration: the package's own, and one of the current folder."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def find_conf() -> Path:
    """Return the folder of the package's config groups.

    A wheel has it in the package. In a checkout it lies at the top level, beside the package.
    """
    packaged = PACKAGE / "conf"
    return packaged if packaged.is_dir() else PACKAGE.parent / "conf"


def find_own_conf(current: Path) -> Path | None:
    """Return `conf/` of the user's folder, which adds options to the groups; None without one.

    In a checkout of this package, `conf/` is the package's own, even where a wheel is installed.
    """
    own = current / "conf"
    is_checkout = (current / PACKAGE.name / "config" / Path(__file__).name).exists()
    return own if own.is_dir() and not is_checkout else None
