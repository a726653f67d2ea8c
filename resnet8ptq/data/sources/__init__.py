"""The data sources by name. A run imports the module of its source only."""

from dataclasses import dataclass

from resnet8ptq.config import schema
from resnet8ptq.config.schema import DataConfig


@dataclass(frozen=True)
class Source:
    """A kind of data set.

    Attributes:
        load: the function that loads it, `module:name`.
        takes: the accepted files or folders, as text; empty if the source reads none.
        file, folder: whether the source reads a file, or a folder.
        key: the key of `data` that names the file or folder.
        decodes: whether `load` itself decodes and resizes pictures.
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
    "shapes": Source("resnet8ptq.data.shapes.drawing:load"),
    "phrases": Source("resnet8ptq.data.phrases.writing:load"),
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
        decodes=True,
    ),
    "table": Source(
        "resnet8ptq.data.sources.table:load",
        "a .csv or .parquet file",
        file=True,
        schema=schema.TableConfig,
        decodes=True,
    ),
    "coco": Source(
        "resnet8ptq.data.sources.coco:load",
        "a folder of pictures",
        folder=True,
        key="images",
        schema=schema.CocoConfig,
        decodes=True,
    ),
    "huggingface": Source(
        "resnet8ptq.data.sources.huggingface:load",
        "a folder that save_to_disk of Hugging Face's datasets has written",
        folder=True,
        schema=schema.TableConfig,
        decodes=True,
    ),
}
