"""`data=coco`: pictures with boxes in the format of COCO's `instances_*.json`.

https://cocodataset.org/#format-data: `images` (id, file_name, width, height), `annotations`
(image_id, category_id, bbox, perhaps area, iscrowd, keypoints and a segmentation) and `categories`
(id, name), whose ids may have gaps.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from resnet8ptq.config.schema import CocoConfig, PreprocessConfig
from resnet8ptq.core import files, isolation, masks
from resnet8ptq.core.errors import ConfigError, DataError, errors_as
from resnet8ptq.core.text import one_line, printable
from resnet8ptq.data import boxes, pictures
from resnet8ptq.data.dataset import Dataset, Split
from resnet8ptq.data.decoding import Picture, decode
from resnet8ptq.data.splitting import split_one

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 2**30  # largest file; COCO 2017 has 448 MB
# The largest file that this process parses, as Python needs up to 25 times its size
SMALL_BYTES = 2**24
MAX_ENTRIES = {"images": 2_000_000, "annotations": 10_000_000, "categories": 2000}
MAX_BOXES = 10_000  # most boxes of a picture, since the array reserves as many for every picture
MAX_ROOM = 2**26  # most boxes in the array of all pictures, which take 3.3 GB
MAX_MASKS = 2**32  # most bytes, since the array reserves the longest masks for every picture
MAX_TEXT = 2**30  # most bytes of all masks, since a short polygon can become a long mask
# The limits of a picture's name: characters in all, and bytes between two `/`
MAX_NAME = 2000
MAX_PART = 255
MAX_NUMBER = 2.0**62  # largest coordinate or area

Entry = Mapping[str, Any]  # an entry of a list in the JSON file


@dataclass(frozen=True)
class Annotations:
    """The checked content of an annotation file.

    Attributes:
        images: file name, width and height of each picture, by picture id.
        boxes: the boxes of each picture, by picture id.
        class_ids: the categories' ids, in the order of the classes; negative for classes that the
            file lacks.
        keypoints: number of keypoints of each object; 0 if the file has none.
        masks: a mask for each of a picture's boxes, by picture id, see `core.masks`; empty if the
            masks are left out.
    """

    images: Mapping[int, tuple[str, int, int]]
    boxes: Mapping[int, Sequence[boxes.Box]]
    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]
    keypoints: int = 0
    masks: Mapping[int, Sequence[bytes]] = field(default_factory=dict)


def load(config: CocoConfig, preprocess: PreprocessConfig, cache_root: Path) -> Dataset:
    """Return the data set of the annotations, and of their pictures below `data.images`.

    Raises:
        ConfigError: `data.annotations` is null or not a file, `data.classes` lacks a category, or
            the pictures differ in size and `preprocess.size` is null.
        DataError: the file is not in COCO's format or too large; or pictures are missing, too few,
            unreadable, outside of the folder, or of other sizes than in the file.
    """
    path = _find_annotations(config)
    annotations = _limit_masks(_read_large(path, config.classes), path)
    _warn_outside(annotations, path)
    _check_pictures(annotations, Path(str(config.images)), path, config.on_bad)

    # Decode the pictures, and keep the annotations of readable ones
    every = _list(annotations, config)
    images, kept = decode(every, preprocess, config.on_bad, cache_root)
    ids = np.array(list(annotations.images), np.int64)[kept]
    placed = [annotate(annotations, int(image_id), preprocess) for image_id in ids]
    labels = boxes.pack(placed, annotations.keypoints)
    shown = np.array([every[index].name for index in kept], np.object_)
    whole = Split(images, labels, str(path), names=shown)

    # All pictures may be for testing, as COCO's validation set is
    if config.test_fraction == 1:
        data = Dataset(path.stem, (), whole.take(np.arange(0)), whole)
    else:
        mend = "data.test_fraction=1 with such pictures"
        data = split_one(path.stem, (), whole, path, config, mend=mend)
    return replace(data, class_names=annotations.class_names, class_ids=annotations.class_ids)


def _limit_masks(annotations: Annotations, path: Path) -> Annotations:
    """Return the annotations, without masks if their array would exceed `MAX_MASKS` bytes."""
    longest = max(len(masks.join(texts)) for texts in annotations.masks.values())
    room = longest * len(annotations.masks)
    if room <= MAX_MASKS:
        return annotations
    log.warning(
        "%s: the masks of %s pictures would take %.0f GB; left out",
        path,
        f"{len(annotations.masks):,}",
        room / 1e9,
    )
    return replace(annotations, masks={})


def list_pictures(config: CocoConfig, cache_root: Path) -> list[Picture]:
    """Return the pictures that `load` decodes."""
    return _list(_read_large(_find_annotations(config), config.classes), config)


def _list(annotations: Annotations, config: CocoConfig) -> list[Picture]:
    folder = Path(str(config.images))
    listed = []
    for name, _, _ in annotations.images.values():
        path = folder / name
        listed.append(Picture(str(path), path))
    return listed


def _find_annotations(config: CocoConfig) -> Path:
    name = config.annotations
    expected = "expected a .json file in COCO's format"
    if name is None:
        raise ConfigError(f"data.annotations: got null, {expected}")
    path = files.expand(name)
    if not path.is_file():
        raise ConfigError(f"data.annotations: got {name} (not there), {expected}")
    return path


def _read_large(path: Path, classes: Sequence[str] | None) -> Annotations:
    """Read an annotation file; a large one is read in a separate process with limited memory."""
    if path.stat().st_size <= SMALL_BYTES:
        return read_annotations(path, classes)
    crashed = DataError(f"{path}: reading it took too much memory or time")
    return isolation.call(read_annotations, path, classes, crashed=crashed)


def read_annotations(path: Path, classes: Sequence[str] | None = None) -> Annotations:
    """Return the checked content of an annotation file.

    Args:
        classes: class names in the order of the network's outputs, including all categories; None
            for the categories in the order of their ids.

    Raises:
        DataError: the file is not in COCO's format, or exceeds a limit of this module.
        ConfigError: `classes` lacks a category.
    """
    with errors_as(DataError, f"{path}: is not JSON"):
        content = json.loads(files.read_bytes(path, MAX_JSON_BYTES))
    categories = _read_by_id(path, content, "categories", lambda entry: _text(entry["name"]))
    images = _read_by_id(path, content, "images", _image)
    class_names, class_ids = _order(categories, classes)
    labels = {class_id: label for label, class_id in enumerate(class_ids)}
    by_image: dict[int, list[boxes.Box]] = {image_id: [] for image_id in images}
    size_of_masks = 0

    def read_box(entry: Entry) -> tuple[int, boxes.Box, list[float], bytes]:
        nonlocal size_of_masks
        image_id = _integer(entry["image_id"])
        category = _integer(entry["category_id"])
        if image_id not in by_image:
            raise ValueError(f"image_id {image_id} is in none of `images`")
        if category not in labels:
            raise ValueError(f"category_id {category} is in none of `categories`")

        # Box and keypoints
        bbox = list(map(_number, entry["bbox"]))
        if len(bbox) != 4 or bbox[2] < 0 or bbox[3] < 0:
            raise ValueError(f"bbox: got {bbox}, expected left, top, width and height")
        area = _number(entry.get("area", bbox[2] * bbox[3]))
        points = list(map(_number, entry.get("keypoints") or ()))
        if len(points) % 3:
            raise ValueError(
                f"keypoints: got {len(points)} numbers, expected x, y, visibility, ..."
            )
        crowd = bool(_integer(entry.get("iscrowd", 0)))

        # The mask, whose size is that of the picture
        _, width, height = images[image_id]
        mask = masks.read(entry.get("segmentation"), height, width)
        size_of_masks += len(mask)
        if size_of_masks > MAX_TEXT:
            raise ValueError(
                f"segmentation: the masks so far take more than {MAX_TEXT:,} bytes; try fewer "
                "annotations, or without `segmentation`"
            )
        return image_id, (bbox, area, labels[category], crowd), points, mask

    entries = _read_list(path, content, "annotations", read_box)

    # Find the number of keypoints, which must be the same in all annotations
    lengths = {len(points) for _, _, points, _ in entries}
    lengths.discard(0)  # objects may lack keypoints
    if len(lengths) > 1:
        raise DataError(
            f"{path}: annotations have {min(lengths) // 3} and {max(lengths) // 3} keypoints, "
            "expected the same number in all"
        )
    length = max(lengths, default=0)

    # Collect boxes and masks by picture
    masks_by_image: dict[int, list[bytes]] = {image_id: [] for image_id in images}
    for image_id, box, points, mask in entries:
        if length:
            box = (*box, points or [0.0] * length)
        masks_by_image[image_id].append(mask)
        by_image[image_id].append(box)
        if len(by_image[image_id]) > MAX_BOXES:
            raise DataError(f"{path}: picture {image_id} has more than {MAX_BOXES:,} annotations")
    most = max(map(len, by_image.values()))
    room = MAX_ROOM // (1 + length // 3)  # a keypoint has half the bytes of a box
    if most * len(images) > room:
        raise DataError(
            f"{path}: got {len(images):,} pictures with up to {most:,} annotations, expected at "
            f"most {room:,} in the product of the two numbers"
        )
    return Annotations(
        images=images,
        boxes=by_image,
        class_names=class_names,
        class_ids=class_ids,
        keypoints=length // 3,
        masks=masks_by_image,
    )


def _read_list(path: Path, content: Any, key: str, read: Callable[[Entry], Any]) -> list[Any]:
    """Return what `read` returns for each entry of the list `key`.

    Raises:
        DataError: there is no such list, it is too long, or `read` fails for an entry, which the
            message names.
    """
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise DataError(
            f"{path}: has no list {key!r}; expected COCO's format, with images, annotations and "
            "categories"
        )
    if len(entries) > MAX_ENTRIES[key]:
        raise DataError(
            f"{path}: {key}: got {len(entries):,} entries, expected at most {MAX_ENTRIES[key]:,}"
        )

    # Turn the errors of an entry into one line that names it
    values = []
    for index, entry in enumerate(entries):
        try:
            values.append(read(entry))
        except KeyError as error:
            raise DataError(f"{path}: {key}[{index}]: has no {error}") from None
        except ValueError as error:
            raise DataError(f"{path}: {key}[{index}]: {error}") from None
        except (TypeError, AttributeError) as error:
            raise DataError(f"{path}: {key}[{index}]: {one_line(error)}") from None
    return values


def _read_by_id(path: Path, content: Any, key: str, read: Callable[[Entry], Any]) -> dict[int, Any]:
    """Return what `read` returns for each entry of the list `key`, by the ids of the entries.

    Raises:
        DataError: the list is empty or unsuitable, or two ids are equal.
    """
    pairs = _read_list(path, content, key, lambda entry: (_integer(entry["id"]), read(entry)))
    by_id = dict(pairs)
    if not by_id:
        raise DataError(f"{path}: {key}: there are none")
    if len(by_id) < len(pairs):
        raise DataError(f"{path}: {key}: two have the same id")
    return by_id


def _integer(value: Any) -> int:
    if not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(f"{printable(repr(value))[:40]} is not an integer")
    return int(value)


def _image(entry: Entry) -> tuple[str, int, int]:
    """Return the checked file name, width and height of a picture."""
    name = _text(entry["file_name"])
    if not _is_file_name(name):
        raise ValueError(f"{printable(name)[:40]!r} is not a name of a file")
    width = _integer(entry["width"])
    height = _integer(entry["height"])
    if not (0 < width < 2**31 and 0 < height < 2**31):
        raise ValueError(f"{width} x {height} is not a number of pixels")
    return name, width, height


def _is_file_name(name: str) -> bool:
    """Return whether a picture's path is valid, and its lengths are within the limits."""
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:  # JSON allows lone surrogates
        return False
    return "\0" not in name and len(name) <= MAX_NAME and max(map(len, parts)) <= MAX_PART


def _number(value: Any) -> float:
    # NaN is refused, because no comparison with it is true.
    if not isinstance(value, int | float) or not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise ValueError(f"{printable(repr(value))[:40]} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{printable(repr(value))[:40]} is not a name")
    return value


def _order(
    categories: Mapping[int, str], classes: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return names and ids of the classes in the order of the network's outputs.

    Classes that the file lacks get negative ids.

    Raises:
        ConfigError: `classes` lacks a category.
    """
    if classes is None:
        ids = sorted(categories)
        return tuple(printable(categories[class_id]) for class_id in ids), tuple(ids)

    # The settings name all classes of the network, of which the file may lack some
    known = {name: class_id for class_id, name in categories.items()}
    missing = sorted(set(known) - set(classes))
    if missing:
        raise ConfigError(
            f"data.classes: got {len(classes)} names without {missing[0]!r}; expected every "
            "category of the annotations, in the order of the network's outputs"
        )
    lowest = min(0, *categories)
    ids = []
    for label, name in enumerate(classes):
        ids.append(known.get(name, lowest - 1 - label))
    return tuple(classes), tuple(ids)


def _check_pictures(annotations: Annotations, folder: Path, path: Path, on_bad: str) -> None:
    """Check that the pictures exist in the folder, in the sizes of the annotations.

    Raises:
        DataError: a picture is outside of the folder, has another size, or is missing; with
            `on_bad=skip`, missing pictures are an error only if all are missing.
    """
    root = folder.resolve()
    paths = {image_id: folder / name for image_id, (name, _, _) in annotations.images.items()}
    missing = []
    for picture in dict.fromkeys(paths.values()):
        file = _resolve(picture)
        if file is not None and not file.is_relative_to(root):
            raise DataError(f"{path}: {picture} is outside of data.images={folder}")
        if file is None or not file.is_file():
            missing.append(picture)
    if missing and (on_bad == "error" or len(missing) == len(paths)):
        raise DataError(
            f"{path}: {len(missing)} of {len(paths)} pictures are not in data.images={folder}, the "
            f"first {missing[0].name}; data.on_bad=skip leaves them out"
        )

    # Compare the sizes by the headers of the files, which takes less than decoding
    def describe_difference(image_id: int) -> str:
        _, width, height = annotations.images[image_id]
        try:
            with Image.open(paths[image_id], formats=pictures.FORMATS) as picture:
                wide, high = pictures.turn_upright(picture.size, picture.getexif())
        except Exception:  # Pillow raises a dozen types; `decode` reports them
            return ""
        if (wide, high) == (width, height):
            return ""
        return f"is {wide} x {high}, the annotations say {width} x {height}"

    with pictures.bombs_refused(), ThreadPoolExecutor() as pool:
        differences = pool.map(describe_difference, paths)
        for image_id, difference in zip(paths, differences, strict=True):
            if difference:
                raise DataError(f"{paths[image_id]}: {difference} pixels, width x height")


def _warn_outside(annotations: Annotations, path: Path) -> None:
    """Warn about boxes that end outside of their pictures, as boxes given by two corners may.

    A pixel is tolerated, because annotations are rounded.
    """
    total = 0
    outside = 0
    for image_id, placed in annotations.boxes.items():
        _, width, height = annotations.images[image_id]
        for bbox, *_ in placed:
            left, top, wide, high = bbox
            total += 1
            begins_outside = left < -1 or top < -1
            ends_outside = left + wide > width + 1 or top + high > height + 1
            outside += begins_outside or ends_outside
    if outside:
        log.warning(
            "%s: %d of %d boxes end outside of their pictures; COCO's bbox is left, top, width and "
            "height in pixels, not two corners",
            path,
            outside,
            total,
        )


def _resolve(picture: Path) -> Path | None:
    """Return a picture's path without links; None if it cannot be resolved."""
    try:
        return picture.resolve()
    except (OSError, RuntimeError):
        return None


def annotate(
    annotations: Annotations, image_id: int, preprocess: PreprocessConfig
) -> boxes.Annotated:
    """Return the annotations of a picture, with its placement by `preprocess`."""
    _, width, height = annotations.images[image_id]
    scale, offset = pictures.placement(width, height, preprocess)
    return boxes.Annotated(
        image_id=image_id,
        height=height,
        width=width,
        scale=scale,
        offset=offset,
        boxes=annotations.boxes[image_id],
        masks=annotations.masks.get(image_id, ()),
    )
