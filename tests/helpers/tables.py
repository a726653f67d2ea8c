"""Tables, written and read as a data set."""

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from resnet8ptq.config.schema import PreprocessConfig, TableConfig
from resnet8ptq.data import locate, registry


def read(path, preprocess=None, **settings):
    config = locate.find_data(TableConfig(root=str(path), **settings))
    return registry.read(config, PreprocessConfig(**(preprocess or {})), path.parent / "cache")


def write(file, **values):
    content = pa.table(values)
    if file.suffix == ".csv":
        pyarrow.csv.write_csv(content, file)
    else:
        pq.write_table(content, file)
    return file
