"""Segmentation: counts, decoding, and masks beside pictures."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import jaccard_score

from resnet8ptq.config.schema import ArraysConfig, FolderConfig, PreprocessConfig
from resnet8ptq.core.errors import ConfigError, DataError
from resnet8ptq.data import decoding, registry
from resnet8ptq.tasks import segmentation
from resnet8ptq.tasks.scoring.outputs import Outputs, Targets
from resnet8ptq.tasks.segmentation import MaskDecoder
from tests.helpers import segmenters

RANDOM = np.random.default_rng(0)


def test_the_mean_iou_is_scikit_learns():
    """Of the pixels that are not ignored; a class that no mask contains does not count."""
    masks = RANDOM.choice(np.array([0, 1, 2, 4, 255], np.uint8), (6, 9, 7))
    said = np.where(RANDOM.random(masks.shape) < 0.6, masks, RANDOM.integers(0, 5, masks.shape))
    task = segmentation.build(tuple("abcde"), resamples=100)
    scores = task.score(Outputs((said.astype(np.uint8),)), Targets(masks))
    kept = masks != 255
    expected = jaccard_score(masks[kept], said[kept], labels=[0, 1, 2, 4], average=None)
    np.testing.assert_allclose(scores.of_class[[0, 1, 2, 4]], expected, rtol=1e-12)
    assert np.isnan(scores.of_class[3])
    assert scores.value == pytest.approx(expected.mean(), rel=1e-12)
    assert scores.more()["pixel_accuracy"] == pytest.approx((masks == said)[kept].mean())


def test_the_bootstrap_scores_drawn_pictures_as_if_there_were_no_others():
    masks = RANDOM.integers(0, 3, (10, 4, 4), np.uint8)
    said = RANDOM.integers(0, 3, (10, 4, 4), np.uint8)
    task = segmentation.build(tuple("abc"), resamples=100)
    scores = task.score(Outputs((said,)), Targets(masks))
    from resnet8ptq.tasks.scoring.statistics import resample

    drawn = next(iter(resample(10, 1)))
    alone = task.score(Outputs((said[drawn],)), Targets(masks[drawn]))
    np.testing.assert_allclose(scores.by_class[0], alone.of_class, rtol=1e-12)


@pytest.mark.parametrize("size", [(32, 48), (5, 7), (3, 4)])
def test_logits_of_any_stride_are_resized_as_torch_does(size):
    logits = RANDOM.normal(size=(2, 3, 8, 6)).astype(np.float32)
    resized = torch.nn.functional.interpolate(torch.tensor(logits), size=size, mode="bilinear")
    for axis, stored in ((0, logits), (2, logits.transpose(0, 2, 3, 1))):
        [classes] = MaskDecoder(0, axis, 3, size, 0.5)([stored])
        assert (classes == resized.numpy().argmax(axis=1)).all()


def test_a_single_value_is_above_the_threshold_and_integers_are_classes():
    values = np.array([[[0.2, 0.6]]], np.float32)
    assert MaskDecoder(0, None, 2, (1, 2), 0.5)([values])[0].tolist() == [[[0, 1]]]
    assert MaskDecoder(0, 0, 2, (1, 2), 0.7)([values[:, None]])[0].tolist() == [[[0, 0]]]
    classes = np.array([[[3, 1]]], np.int64)
    [nearest] = MaskDecoder(1, None, 4, (2, 4), 0.5)([values, classes])
    assert nearest.tolist() == [[[3, 3, 1, 1]] * 2]


def test_a_single_picture_is_not_compared_with_itself_for_chance():
    masks = RANDOM.choice(np.array([0, 1, 2], np.uint8), (2, 9, 7))
    task = segmentation.build(tuple("abc"), resamples=100)
    for count, doubted in ((1, False), (2, True)):
        wrong = (masks[:count] + 1) % 3
        doubt = task.doubt(task.score(Outputs((wrong,)), Targets(masks[:count])), None)
        assert (doubt is not None) is doubted


def test_the_label_255_is_scored_if_it_is_a_class():
    masks = np.array([[[0, 255]]] * 4, np.uint8)
    task = segmentation.build(tuple(map(str, range(256))), ignored=(), resamples=100)
    scores = task.score(Outputs((np.array([[[0, 255]], [[0, 0]]] * 2, np.uint8),)), Targets(masks))
    assert scores.of_class[[0, 255]].tolist() == [4 / 6, 0.5]


def test_a_class_beyond_255_is_not_taken_for_another():
    scores = np.zeros((1, 300, 1, 2), np.float32)
    scores[0, 256, 0, 0] = 1
    scores[0, 3, 0, 1] = 1
    [classes] = MaskDecoder(0, 0, 300, (1, 2), 0.5)([scores])
    assert classes.tolist() == [[[255, 3]]]


@pytest.mark.parametrize("kind", ["palette", "grey"])
def test_masks_beside_pictures(tmp_path, kind):
    folder = segmenters.write_pictures(tmp_path / "scenes", count=8, kind=kind)
    config = FolderConfig(root=str(folder / "images"), masks=str(folder / "masks"))
    data = registry.read(config, PreprocessConfig(), tmp_path / "cache")
    assert data.test.labels.dtype == np.uint8
    for split in (data.train, data.test):
        for index, name in enumerate(split.names):
            mask = np.asarray(Image.open(name.replace("images", "masks")))
            assert (split.labels[index] == mask).all()


@pytest.mark.parametrize("resize", ["squash", "crop", "fit", "letterbox"])
def test_masks_are_resized_as_their_pictures(tmp_path, resize):
    """A picture in the grey values of its mask shows the same places."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(4):
        labels = np.zeros((40, 60), np.uint8)
        labels[8 : 20 + number, 10:35] = 200
        for name in ("images", "masks"):
            Image.fromarray(labels).save(tmp_path / name / f"{number}.png")
    config = FolderConfig(root=str(tmp_path / "images"), masks=str(tmp_path / "masks"))
    preprocess = PreprocessConfig(
        size=[32, 32], resize=resize, filter="nearest", channels="grey", pad=255
    )
    if resize == "letterbox":
        preprocess.pad = 255
    data = registry.read(config, preprocess, tmp_path / "cache")
    assert (data.test.stored[:][..., 0] == data.test.labels).all()
    arrays = decoding.resize(
        data.test, PreprocessConfig(size=16, filter="nearest"), tmp_path / "cache"
    )
    assert (arrays.stored[:][..., 0] == arrays.labels).all()


def write_one(folder, name, labels, suffix=".png"):
    (folder / name).mkdir(exist_ok=True)
    for number in range(2):
        Image.fromarray(labels + np.uint8(0)).save(folder / name / f"{number}{suffix}")


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (np.zeros((8, 8, 3), np.uint8), DataError, r"it is no mask \(mode RGB\)"),
        (None, DataError, "1 of 2 pictures have none of their name in"),
        (np.zeros((8, 8), np.uint8), ConfigError, "masks=nowhere"),
        (np.zeros((8, 20), np.uint8), DataError, "is 20x8 .*, its picture 8x8; expected the same"),
    ],
)
def test_masks_that_do_not_fit_are_refused(tmp_path, labels, error, message):
    write_one(tmp_path, "images", RANDOM.integers(0, 255, (8, 8, 3), np.uint8))
    write_one(tmp_path, "masks", np.zeros((8, 8), np.uint8) if labels is None else labels)
    masks = str(tmp_path / "masks")
    if labels is None:
        (tmp_path / "masks" / "1.png").unlink()
    if error is ConfigError:
        masks, message = "nowhere", r"data.masks: got nowhere \(not there\)"
    config = FolderConfig(root=str(tmp_path / "images"), masks=masks)
    with pytest.raises(error, match=message):
        registry.read(config, PreprocessConfig(), tmp_path / "cache")


def test_folders_of_pictures_and_masks_are_no_classes(tmp_path):
    folder = segmenters.write_pictures(tmp_path / "scenes", count=2)
    with pytest.raises(ConfigError, match=r"try data.root=\S+/images data.masks=\S+/masks$"):
        registry.read(FolderConfig(root=str(folder)), PreprocessConfig(), tmp_path / "cache")


def test_arrays_hold_masks_and_255_alone_is_the_second_class(tmp_path):
    images = RANDOM.integers(0, 255, (6, 8, 8, 3), np.uint8)
    masks = 255 * RANDOM.integers(0, 2, (6, 8, 8))
    np.savez(tmp_path / "black_and_white.npz", x=images, y=masks)
    config = ArraysConfig(root=str(tmp_path / "black_and_white.npz"))
    data = registry.read(config, PreprocessConfig(), tmp_path / "cache")
    assert (data.test.labels.dtype, np.unique(data.test.labels).tolist()) == (np.uint8, [0, 1])
    np.savez(tmp_path / "negative.npz", x=images, y=masks - 1)
    config = ArraysConfig(root=str(tmp_path / "negative.npz"))
    with pytest.raises(DataError, match="masks from -1 to 254; expected 0 to 255"):
        registry.read(config, PreprocessConfig(), tmp_path / "cache")
