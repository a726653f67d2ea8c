"""A hash of the code that a result depends on: a module and all its imports in this package."""

import functools
import hashlib
import re
from importlib.util import find_spec
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[2]
# The patterns find `from a.b import c, d`, also over several lines; `import a.b`; and "a.b:name"
# for `pkgutil.resolve_name`, where "a.*:name" stands for every folder of `a`. Imports inside
# functions count too.
_FROM = re.compile(rf"^ *from ({PACKAGE}[\w.]*) import (\([^)]*\)|.+)$", re.MULTILINE)
_IMPORT = re.compile(rf"^ *import ({PACKAGE}[\w.]*)", re.MULTILINE)
_NAMED = re.compile(rf'"({PACKAGE}(?:\.\w+)+(?:\.\*)?):\w+"')
_NAME = re.compile(r"(\w+)(?: as \w+)?")


@functools.cache  # the code does not change while a process runs
def behind(module: str) -> str:
    """Return a hash of the code of a module and of its direct and indirect imports; see `closure`.

    With this hash in its key, a cache entry is made again when the code that makes it changes.
    Nobody needs to raise a version number.

        key = {"network": sha256, "code": code.behind(__name__)}

    Args:
        module: a dotted name, such as `resnet8ptq.data.dataset`; usually the caller's `__name__`.
    """
    digest = hashlib.sha256()
    for name in sorted(closure(module)):
        digest.update(f"{name}\n".encode() + _file(name).read_bytes())
    return digest.hexdigest()


@functools.cache
def closure(module: str) -> frozenset[str]:
    """Return the names of a module and of its `imports`, also indirect ones."""
    known = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in known:
            known.add(name)
            waiting += imports(name)
    return frozenset(known)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Return the modules of this package that a module imports, or names as in "a.b:name"."""
    text = _file(module).read_text("utf-8")
    names = {*_IMPORT.findall(text), *_NAMED.findall(text)}

    # A name such as "a.*" stands for every folder of a package
    for name in [*names]:
        if name.endswith(".*"):
            package = name.removesuffix(".*")
            for path in _file(package).parent.glob("*/__init__.py"):
                names.add(f"{package}.{path.parent.name}")

    # In `from a import b`, b may be a module or a name inside of `a`
    for package, listed in _FROM.findall(text):
        names.add(package)
        for name in _NAME.findall(listed.partition("#")[0]):
            names.add(f"{package}.{name}")
    return frozenset(name for name in names if _file(name).is_file())


def _file(module: str) -> Path:
    if module.partition(".")[0] != PACKAGE:  # a backend may be in another package
        return Path(getattr(find_spec(module), "origin", None) or module)
    path = _ROOT.joinpath(*module.split("."))
    if path.is_dir():
        return path / "__init__.py"
    return path.with_suffix(".py")
