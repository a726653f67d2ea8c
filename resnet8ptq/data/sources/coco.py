"""`data=coco`: pictures with boxes, in the format of COCO's `instances_*.json`.

https://cocodataset.org/#format-data: `images` (id, file_name, width, height), `annotations`
(image_id, category_id, bbox, area, iscrowd) and `categories` (id, name), whose ids may have gaps.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from resnet8ptq.config.schema import CocoConfig, PreprocessConfig
from resnet8ptq.core import files
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.data import boxes, pictures
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.decoding import Picture, decode
from resnet8ptq.data.splitting import split_one

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 2**30  # COCO 2017 has 448 MB
MAX_BOXES = 10_000  # of one picture: all pictures have room for as many as the one with most
_ORIENTATION = 274  # EXIF's tag
_ON_ITS_SIDE = (5, 6, 7, 8)


@dataclass(frozen=True)
class Annotations:
    """What an annotation file holds, checked.

    Attributes:
        images: file name, width and height of each picture, by its id.
        boxes: of each picture, by its id, as `boxes.BOX` has them.
        class_ids: of the categories, in the order of the classes.
    """

    images: Mapping[int, tuple[str, int, int]]
    boxes: Mapping[int, Sequence[boxes.Box]]
    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]


def load(config: CocoConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Read the annotations, and the pictures that they name below `data.images`.

    Raises:
        ConfigError: `data.annotations` is not given or no file, or the pictures differ in size and
            `preprocess.size` is not set.
        DataError: the file is not what COCO has, or a picture is missing or of another size.
    """
    given = config.annotations
    if given is None or not Path(given).expanduser().is_file():
        missing = "null" if given is None else f"{given} (not there)"
        raise ConfigError(f"data.annotations: got {missing}, takes a .json file in COCO's format")
    path, folder = Path(given).expanduser(), Path(str(config.images))
    found = read_annotations(path, config.classes)
    _check_pictures(found, folder, path, config.on_bad)
    names = [name for name, _, _ in found.images.values()]
    every = [Picture(str(folder / name), folder / name) for name in names]
    images, kept = decode(every, preprocess, config.on_bad, cache_root)
    ids = np.array(list(found.images), np.int64)[kept]
    labels = boxes.pack([annotate(found, int(image_id), preprocess) for image_id in ids])
    whole = Split(images, labels, str(path))
    if config.test_fraction == 1:
        data = Dataset(path.stem, (), whole.take(np.arange(0)), whole)
    else:
        data = split_one(path.stem, (), whole, path, config)
    return replace(data, class_names=found.class_names, class_ids=found.class_ids)


def read_annotations(path: Path, classes: Sequence[str] | None = None) -> Annotations:
    """Read an annotation file.

    Args:
        classes: names of all categories, and perhaps of more, in the order of the network's
            outputs; None: the categories in the order of their ids.

    Raises:
        DataError: it is not in COCO's format; names the entry.
        ConfigError: `classes` lacks a category.
    """
    try:
        content = json.loads(files.read_bytes(path, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({one_line(error)})") from None
    reading = _Reading(path, content)
    categories = reading.each("categories", lambda each: (_whole(each["id"]), _text(each["name"])))
    images = reading.each(
        "images",
        lambda each: (
            _whole(each["id"]),
            (_file_name(each["file_name"]), _size(each["width"]), _size(each["height"])),
        ),
    )
    named = reading.unique("categories", categories)
    pictures_of = reading.unique("images", images)
    class_names, class_ids = _order(named, classes)
    places = {class_id: place for place, class_id in enumerate(class_ids)}
    of_image: dict[int, list[boxes.Box]] = {image_id: [] for image_id in pictures_of}

    def box(each: Mapping[str, Any]) -> tuple[int, boxes.Box]:
        image_id, category = _whole(each["image_id"]), _whole(each["category_id"])
        if image_id not in of_image:
            raise ValueError(f"image_id {image_id} is in none of `images`")
        if category not in places:
            raise ValueError(f"category_id {category} is in none of `categories`")
        bbox = [_number(value) for value in each["bbox"]]
        if len(bbox) != 4 or bbox[2] < 0 or bbox[3] < 0:
            raise ValueError(f"bbox {bbox}: takes left, top, width and height")
        area = _number(each.get("area", bbox[2] * bbox[3]))
        return image_id, (bbox, area, places[category], bool(_whole(each.get("iscrowd", 0))))

    for image_id, found in reading.each("annotations", box):
        of_image[image_id].append(found)
        if len(of_image[image_id]) > MAX_BOXES:
            raise DataError(f"{path}: picture {image_id} has more than {MAX_BOXES:,} annotations")
    return Annotations(pictures_of, of_image, class_names, class_ids)


@dataclass(frozen=True)
class _Reading:
    """The lists of an annotation file, whose entries are named in errors."""

    path: Path
    content: Any

    def each(self, key: str, read: Callable[[Any], Any]) -> list[Any]:
        entries = self.content.get(key) if isinstance(self.content, dict) else None
        if not isinstance(entries, list):
            raise DataError(
                f"{self.path}: has no list {key!r}; takes COCO's format, with images, annotations "
                "and categories"
            )
        found = []
        for place, entry in enumerate(entries):
            try:
                found.append(read(entry))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                why = str(error) if isinstance(error, ValueError) else one_line(error)
                why = f"has no {error}" if isinstance(error, KeyError) else why
                raise DataError(f"{self.path}: {key}[{place}]: {why}") from None
        return found

    def unique(self, key: str, pairs: list[tuple[int, Any]]) -> dict[int, Any]:
        found = dict(pairs)
        if len(found) < len(pairs) or not pairs:
            what = "two have the same id" if pairs else "there are none"
            raise DataError(f"{self.path}: {key}: {what}")
        return found


def _whole(value: Any) -> int:
    if not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(f"{printable(repr(value))[:40]} is not an integer")
    return int(value)


def _size(value: Any) -> int:
    if not 0 < (size := _whole(value)) < 2**31:
        raise ValueError(f"{size} is not a number of pixels")
    return size


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{printable(repr(value))[:40]} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{printable(repr(value))[:40]} is not a name")
    return value


def _file_name(value: Any) -> str:
    if "\0" in (name := _text(value)) or len(name) > 4096:
        raise ValueError(f"{printable(name)[:40]!r} is not a name of a file")
    return name


def _order(
    named: Mapping[int, str], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and ids of the classes in the order of the network's outputs.

    Classes that the file does not have get ids of their own, below 0.
    """
    if classes is None:
        ids = sorted(named)
        return tuple(printable(named[each]) for each in ids), tuple(ids)
    known = {name: class_id for class_id, name in named.items()}
    if missing := sorted(set(known) - set(classes)):
        raise ConfigError(
            f"data.classes: got {len(classes)} names without {missing[0]!r}; takes every category "
            "of the annotations, in the order of the network's outputs"
        )
    return tuple(classes), tuple(known.get(name, -1 - n) for n, name in enumerate(classes))


def _check_pictures(found: Annotations, folder: Path, path: Path, on_bad: str) -> None:
    """Check that the pictures are there, and as large as the annotations say.

    Raises:
        DataError: one is missing, outside of the folder, or of another size.
    """
    root = folder.resolve()
    paths = {image_id: folder / name for image_id, (name, _, _) in found.images.items()}
    if outside := [each for each in paths.values() if not each.resolve().is_relative_to(root)]:
        raise DataError(f"{path}: {outside[0]} is outside of data.images={folder}")
    missing = [each for each in paths.values() if not each.is_file()]
    if missing and (on_bad == "error" or len(missing) == len(paths)):
        raise DataError(
            f"{path}: {len(missing)} of {len(paths)} pictures are not in data.images={folder}, the "
            f"first {missing[0].name}; data.on_bad=skip leaves them out"
        )

    def differs(image_id: int) -> str | None:
        _, *expected = found.images[image_id]
        try:
            with Image.open(paths[image_id], formats=pictures.FORMATS) as picture:
                turned = picture.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
                size = list(reversed(picture.size)) if turned else list(picture.size)
        except Exception:  # Pillow's own, a dozen: `decode` has the words for it
            return None
        shown = [f"{wide} x {high}" for wide, high in (size, expected)]
        return None if size == expected else f"is {shown[0]}, the annotations say {shown[1]}"

    with pictures.bombs_refused(), ThreadPoolExecutor() as pool:
        for image_id, wrong in zip(paths, pool.map(differs, paths), strict=True):
            if wrong:
                raise DataError(f"{paths[image_id]}: {wrong} pixels, width x height")


def annotate(found: Annotations, image_id: int, preprocess: PreprocessConfig) -> boxes.Annotated:
    """Return what is known of a picture that is shaped by `preprocess`."""
    _, width, height = found.images[image_id]
    placed = pictures.placement(width, height, preprocess)
    return boxes.Annotated(
        image_id, height, width, placed.scale, placed.offset, found.boxes[image_id]
    )
