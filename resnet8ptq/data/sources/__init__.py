"""The sources of data, by name: one module for each, imported when a run asks for it."""

from dataclasses import dataclass

from resnet8ptq.config.schema import (
    ArraysConfig,
    CocoConfig,
    DataConfig,
    FolderConfig,
    TableConfig,
)


@dataclass(frozen=True)
class Source:
    """Where data may lie.

    Attributes:
        load: the function that loads them, `module:name`.
        takes: what `data.root` names, in words; empty where it names nothing.
        file, folder: whether that may be a file, or a folder.
        key: the key of `data` that names it instead.
        schema: its settings.
        decodes: it decodes pictures, and sizes them as it does.
    """

    load: str
    takes: str = ""
    file: bool = False
    folder: bool = False
    key: str = "root"
    schema: type[DataConfig] = DataConfig
    decodes: bool = False


SOURCES = {
    "cifar10": Source(
        "resnet8ptq.data.sources.cifar10:load",
        "a folder with data_batch_1..5; your own: data=arrays, folder, table or huggingface",
        folder=True,
    ),
    "shapes": Source("resnet8ptq.data.sources.shapes:load"),
    "arrays": Source(
        "resnet8ptq.data.sources.arrays:load",
        "an .npz, .npy or idx file, or a folder of .npy and idx files",
        file=True,
        folder=True,
        schema=ArraysConfig,
    ),
    "folder": Source(
        "resnet8ptq.data.sources.folder:load",
        "a folder with one folder of pictures for each class",
        folder=True,
        schema=FolderConfig,
        decodes=True,
    ),
    "table": Source(
        "resnet8ptq.data.sources.table:load",
        "a .csv or .parquet file",
        file=True,
        schema=TableConfig,
        decodes=True,
    ),
    "coco": Source(
        "resnet8ptq.data.sources.coco:load",
        "a folder of pictures",
        folder=True,
        key="images",
        schema=CocoConfig,
        decodes=True,
    ),
    "huggingface": Source(
        "resnet8ptq.data.sources.huggingface:load",
        "a folder that save_to_disk of Hugging Face's datasets has written",
        folder=True,
        schema=TableConfig,
        decodes=True,
    ),
}
