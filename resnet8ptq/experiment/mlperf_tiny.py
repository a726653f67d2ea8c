"""MLPerf Tiny's networks, data and int8 files: the path of each, and the downloads.

Sources: https://github.com/mlcommons/tiny (networks and int8 files, Apache-2.0) and
https://github.com/eembc/energyrunner (data).
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import pooch

from resnet8ptq.config.schema import BenchmarkConfig
from resnet8ptq.core import files
from resnet8ptq.core.cache import downloads_folder
from resnet8ptq.core.errors import UnsupportedError

log = logging.getLogger(__name__)

REPOSITORY = "https://github.com/mlcommons/tiny/raw/master/benchmark/training/"


@dataclass(frozen=True)
class File:
    """A file or folder of the suite.

    Attributes:
        path: path below `benchmark.folder`; a pattern stands for its first match.
        sha256: SHA-256 of a file, if it is pinned.
        url: the path of the download below `REPOSITORY`; None without a download.
        source: the source of a file that the user must download.
    """

    path: str
    sha256: str | None = None
    url: str | None = None
    source: str = "https://github.com/mlcommons/tiny"


@dataclass(frozen=True)
class Benchmark:
    """The files of a benchmark of the suite; None stands for the default of the settings.

    Attributes:
        official: the suite's own int8 file.
    """

    network: File | None
    data: File | None
    official: File


_FEATURES = "features and labels as arrays, made of https://github.com/eembc/energyrunner"
SUITE = {
    "ic": Benchmark(
        network=None,  # the default network, and CIFAR-10
        data=None,
        official=File("ic/pretrainedResnet_quant.tflite"),
    ),
    "ic02": Benchmark(
        network=File(
            "ic02/pretrainedResnet_large_float.tflite",
            "fb17ae9c1b6d0e5bd97f0f35024f207556261d7310b249716c87cc0628214b0e",
            "image_classification/trained_models/pretrainedResnet_large_float.tflite",
        ),
        data=None,
        official=File(
            "ic02/pretrainedResnet_large_int8.tflite",
            "dc27dcd823f5665533352f7da516b0c9bc6f089914b8283782e55961b3423fcf",
            "image_classification/trained_models/pretrainedResnet_large_int8.tflite",
        ),
    ),
    "kws": Benchmark(
        network=File("kws/kws_ref_model"),
        data=File("kws/*.npz", source=_FEATURES),
        official=File(
            "kws/kws_ref_model.tflite",
            "aeea436800704fce17b17292e4412630ad856e9d777c044c64ef748a880bd0ae",
            "keyword_spotting/trained_models/kws_ref_model.tflite",
        ),
    ),
    "vww": Benchmark(
        network=File(
            "vww/vww_96.h5",
            "af9111d50e6e85b2f2123345e0316ef1c384865ebf6b06340ddac7e66017450f",
            "visual_wake_words/trained_models/vww_96.h5",
        ),
        data=File("vww/*.npz", source="96x96 pictures and labels (1: a person) as arrays"),
        official=File(
            "vww/vww_96_int8.tflite",
            "597a384c8c2c8a1276f04702f25013b7838f2f814f1ca7c174d295b73e3d6b7b",
            "visual_wake_words/trained_models/vww_96_int8.tflite",
        ),
    ),
    "ad": Benchmark(
        network=File(
            "ad/ad01.h5", "651a62de1b7facd68d1269373992a2d09ffd28e6a816935d4834fcc558bde512"
        ),
        data=File("ad/*.npz", source=f"ToyADMOS's windows of 640, {_FEATURES}"),
        official=File(
            "ad/ad01_int8.tflite",
            "87cf24194ef93d1d9b11a591d805526b98008e351655d29883c825c9c106ba24",
            "anomaly_detection/trained_models/ad01_int8.tflite",
        ),
    ),
}


@dataclass(frozen=True)
class Paths:
    """The paths of data, FP32 network and another program's file; None if a path is not named."""

    data: str | None = None
    network: str | None = None
    quantized: str | None = None


def find_files(benchmark: BenchmarkConfig, named: Paths, quantizes: bool = True) -> Paths:
    """Return the paths of the settings, completed with files of the benchmark.

    Args:
        named: the paths of the settings.
        quantizes: whether the backend quantizes. If it does, `quantized` is not completed.

    Raises:
        UnsupportedError: a file is missing and cannot be downloaded; the message names its source.
    """
    if benchmark.name is None:
        return named
    files_of = SUITE[benchmark.name]
    data = named.data
    network = named.network
    quantized = named.quantized
    if data is None and files_of.data is not None:
        data = _find(files_of.data, benchmark)
    if network is None and files_of.network is not None:
        network = _find(files_of.network, benchmark)
    if quantized is None and not quantizes:
        quantized = _find(files_of.official, benchmark)
    return Paths(data, network, quantized)


def _find(file: File, benchmark: BenchmarkConfig) -> str:
    """Return the path of a file in `benchmark.folder`, or of its download.

    Raises:
        UnsupportedError: the folder lacks the file, and it has no download or the download fails.
    """
    folder = benchmark.folder
    paths = [] if folder is None else sorted(files.expand(folder).glob(file.path))
    if paths:
        path = paths[0]
        is_pinned = file.sha256 is not None
        if is_pinned and not (path.is_file() and files.sha256(path) == file.sha256):
            log.warning("%s: is not the suite's own file (another SHA-256)", path)
        return str(path.absolute())

    # Download the file if the suite offers it
    missing = f"benchmark={benchmark.name}: {file.path} is not in benchmark.folder={folder}"
    if file.url is None or file.sha256 is None:
        raise UnsupportedError(f"{missing}; get it from {file.source}")
    try:
        return pooch.retrieve(
            REPOSITORY + file.url,
            known_hash=f"sha256:{file.sha256}",
            path=downloads_folder(),
            fname=Path(file.path).name,
            downloader=pooch.HTTPDownloader(progressbar=True, timeout=15),
        )
    except Exception as error:  # requests, urllib and pooch have their own types
        raise UnsupportedError(
            f"{missing}, and {REPOSITORY}{file.url} is not available ({type(error).__name__})"
        ) from None
