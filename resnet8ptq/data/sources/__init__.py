"""The data sources by name, and the source that a path belongs to.

Functions of sources are given as text, so that a run imports only the libraries that it uses.
"""

from dataclasses import dataclass
from pathlib import Path

from resnet8ptq.config import schema
from resnet8ptq.config.schema import DataConfig
from resnet8ptq.core.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    Attributes:
        load: the function that loads the data set, as `module:name`.
        takes: the accepted files or folders for messages; empty if the source reads none.
        file, folder: whether `data.KEY` may name a file, or a folder.
        key: the KEY of `data` that names the file or folder.
        schema: the settings of the source.
        pictures: the function that lists the pictures which `load` decodes and resizes, as
            `module:name`; empty if `load` itself resizes nothing.
    """

    load: str
    takes: str = ""
    file: bool = False
    folder: bool = False
    key: str = "root"
    schema: type[DataConfig] = DataConfig
    pictures: str = ""


SOURCES = {
    "cifar10": Source(
        "resnet8ptq.data.sources.cifar10:load",
        "a folder with data_batch_1..5; your own: data=arrays, folder, table or huggingface",
        folder=True,
    ),
    "shapes": Source("resnet8ptq.data.shapes.drawing:load"),
    "arrays": Source(
        "resnet8ptq.data.sources.arrays:load",
        "an .npz, .npy or idx file, or a folder of .npy and idx files",
        file=True,
        folder=True,
        schema=schema.ArraysConfig,
    ),
    "folder": Source(
        "resnet8ptq.data.sources.folder:load",
        "a folder with one folder of pictures for each class",
        folder=True,
        schema=schema.FolderConfig,
        pictures="resnet8ptq.data.sources.folder:list_pictures",
    ),
    "table": Source(
        "resnet8ptq.data.sources.table:load",
        "a .csv, .parquet or .jsonl file, or a .conll file of words and their tags",
        file=True,
        schema=schema.TableConfig,
        pictures="resnet8ptq.data.sources.table:list_pictures",
    ),
    "coco": Source(
        "resnet8ptq.data.sources.coco:load",
        "a folder of pictures",
        folder=True,
        key="images",
        schema=schema.CocoConfig,
        pictures="resnet8ptq.data.sources.coco:list_pictures",
    ),
    "huggingface": Source(
        "resnet8ptq.data.sources.huggingface:load",
        "a folder that save_to_disk of Hugging Face's datasets has written",
        folder=True,
        schema=schema.HuggingFaceConfig,
        pictures="resnet8ptq.data.sources.huggingface:list_pictures",
    ),
}


TAGGED = (".conll", ".bio", ".iob", ".iob2", ".bioes")  # suffixes of words and their tags
# The sources of files, by suffix; idx files have no fixed suffix, see `name_file`.
_BY_SUFFIX = {".npz": "arrays", ".npy": "arrays", ".csv": "table", ".parquet": "table"}
_BY_SUFFIX |= dict.fromkeys((".tsv", ".jsonl", ".ndjson", *TAGGED), "table")
# The sources of folders, by a file inside.
_BY_CONTENT = {
    "data_batch_1": "cifar10",
    "dataset_info.json": "huggingface",
    "dataset_dict.json": "huggingface",
    "*.npy": "arrays",
    "*-ubyte*": "arrays",
}
# Repeated from `data.pictures`, which imports Pillow
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def find_settings(path: Path, annotated: bool = False) -> dict[str, str]:
    """Return the settings that read a file or folder.

    >>> find_settings(Path("."), annotated=True)
    {'data': 'coco', 'data.images': '.'}

    Args:
        annotated: whether `data.annotations` names a COCO file of boxes.

    Raises:
        ConfigError: the path does not exist, or no source reads it by itself.
    """
    if not path.exists():
        raise ConfigError(f"data.root: got {path}, no such file or folder")

    # Boxes are in another file than their pictures
    if annotated and path.is_dir():
        return {"data": "coco", "data.images": str(path)}
    if path.suffix.lower() == ".json":
        raise ConfigError(
            f"data.root: got {path}; COCO's boxes need their pictures; try data=coco "
            f"data.images=FOLDER data.annotations={path}"
        )

    # The name of a file, or the content of a folder, tells the source
    name = name_file(path) if path.is_file() else _name_folder(path)
    if name is not None:
        return {"data": name, "data.root": str(path)}
    if path.is_dir():
        suffixes = {child.suffix.lower() for child in path.iterdir()}
        if not suffixes.isdisjoint(_PICTURES):  # pictures without class folders
            return {"data": "folder", "data.root": str(path), "data.labels": "none"}
    takes = "; ".join(f"{source.takes} (data={key})" for key, source in _OWN.items())
    raise ConfigError(f"data.root: got {path}, expected {takes}{mend_archive(path)}")


def mend_archive(path: Path) -> str:
    """Return the mend for an archive, which no source reads; empty for other files.

    >>> mend_archive(Path("pictures.tar.gz"))
    '; try unpacking it'
    """
    is_archive = path.suffix.lower() in (".zip", ".tar", ".tgz", ".7z") or ".tar" in path.suffixes
    return "; try unpacking it" if is_archive else ""


def name_file(path: Path) -> str | None:
    """Return the source of a file by its name; None if the name does not tell it."""
    if "-ubyte" in path.name:
        return "arrays"
    return _BY_SUFFIX.get(path.suffix.lower())


def _name_folder(path: Path) -> str | None:
    for pattern, name in _BY_CONTENT.items():
        if any(path.glob(pattern)):
            return name
    for child in path.iterdir():
        if child.is_dir() and child.name[0] != ".":
            return "folder"
    return None


_OWN = {name: SOURCES[name] for name in ("arrays", "folder", "table", "huggingface")}
