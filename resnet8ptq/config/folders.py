"""The folders of the configuration: the package's own, and the user's in the current folder."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def find_conf() -> Path:
    """Return the folder of the package's config groups.

    A wheel has it in the package. In a checkout it lies at the top level, beside the package.
    """
    packaged = PACKAGE / "conf"
    if packaged.is_dir():
        return packaged
    return PACKAGE.parent / "conf"


def find_own_conf(current: Path) -> Path | None:
    """Return `conf/` in the current folder, which adds options to the groups; None if missing.

    Also None in a checkout of this package, where `conf/` is the package's own, even if a wheel is
    installed.
    """
    own = current / "conf"
    is_checkout = (current / PACKAGE.name / "config" / Path(__file__).name).exists()
    if is_checkout or not own.is_dir():
        return None
    return own
