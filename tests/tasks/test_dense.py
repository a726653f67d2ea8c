"""Restored pictures and depth: the metrics against other computations, and their targets."""

import numpy as np
import pytest
import torch
from PIL import Image

from resnet8ptq.config.schema import FolderConfig, PreprocessConfig
from resnet8ptq.core.errors import ConfigError
from resnet8ptq.data import registry
from resnet8ptq.tasks import dense
from resnet8ptq.tasks.scoring.outputs import VALUES, Outputs, Targets

RANDOM = np.random.default_rng(0)
PICTURES = RANDOM.integers(0, 256, (30, 24, 20, 3), np.uint8)
NOISY = np.moveaxis(PICTURES / 255 + RANDOM.normal(0, 0.1, PICTURES.shape), 3, 1)


def score(primary, values, targets, **options):
    task = dense.build(primary, resamples=100, **options)
    return task, task.score(Outputs((values.astype(np.float32),), None, VALUES), Targets(targets))


def ssim_by_torch(one, other):
    """SSIM by convolutions with a window of 11 x 11, as published."""
    place = torch.arange(11, dtype=torch.float64) - 5
    side = torch.exp(-(place**2) / 4.5)
    window = (torch.outer(side, side) / side.sum() ** 2)[None, None]
    channels = [torch.tensor(values)[:, None] for values in (one, other)]
    x, y = channels
    blur = lambda values: torch.nn.functional.conv2d(values, window)  # noqa: E731
    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    both = blur(x * y) - mean_x * mean_y
    above = (2 * mean_x * mean_y + 1e-4) * (2 * both + 9e-4)
    return float((above / ((mean_x**2 + mean_y**2 + 1e-4) * (var_x + var_y + 9e-4))).mean())


def test_psnr_and_ssim_are_those_of_other_computations():
    _, scores = score("psnr", NOISY, PICTURES)
    said = NOISY.astype(np.float32).astype(np.float64).clip(0, 1)
    exact = np.moveaxis(PICTURES, 3, 1) / 255
    errors = ((said - exact) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(scores.per_item, 10 * np.log10(1 / errors), rtol=1e-9)
    expected = np.mean([ssim_by_torch(*pair) for pair in zip(said, exact, strict=True)])
    assert scores.more()["ssim"] == pytest.approx(expected, abs=1e-9)
    _, last = score("ssim", np.moveaxis(NOISY, 1, 3) * 255, PICTURES, peak=255.0)
    assert last.value == pytest.approx(expected, abs=1e-6)  # float32 of 0 to 255


def test_an_exact_picture_has_a_finite_psnr():
    _, scores = score("psnr", PICTURES.astype(float), PICTURES, peak=255.0)
    assert scores.value == dense.MOST_DB


def test_depth_without_a_measurement_does_not_count():
    depth = RANDOM.uniform(1, 9, (6, 4, 4))
    said = depth * RANDOM.uniform(0.7, 1.4, depth.shape)
    depth[:, 0] = 0
    _, scores = score("rmse", said, depth)
    kept, true = said.astype(np.float32)[:, 1:], depth[:, 1:]
    rmse = np.sqrt(((kept - true) ** 2).mean(axis=(1, 2))).mean()
    assert scores.value == pytest.approx(rmse)
    ratio = np.maximum(kept / true, true / kept)
    assert scores.more()["delta"] == pytest.approx((ratio < 1.25).mean())


@pytest.mark.parametrize("shape", [(12, 14), (1, 12, 14), (12, 14, 2), (4, 12, 14)])
def test_the_figure_draws_any_number_of_channels(shape):
    flows = RANDOM.normal(0, 1, (3, *shape))
    task, fp32 = score("rmse", flows, flows + 9)
    _, model = score("rmse", flows + 1, flows + 9)
    [figure] = task.files.figures(task.compare(model, fp32), "flows").values()
    assert len(figure.axes) == 9


@pytest.mark.parametrize("primary", ["psnr", "ssim"])
def test_the_mean_of_the_targets_is_doubted(primary):
    mean = np.broadcast_to(PICTURES.mean(axis=0) / 255, PICTURES.shape)
    task, scores = score(primary, mean + RANDOM.normal(0, 0.02, mean.shape), PICTURES)
    doubt = task.doubt(scores, None)
    assert doubt is not None
    assert doubt.startswith("NO BETTER THAN THE MEAN, ")
    task, scores = score(primary, NOISY, PICTURES)
    assert task.doubt(scores, None) is None


def test_target_pictures_of_another_size_beside_pictures(tmp_path):
    for name, size in (("small", 8), ("large", 16)):
        (tmp_path / name).mkdir()
        for number in range(6):
            pixels = np.full((size, size, 3), 20 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    small, large = (str(tmp_path / name) for name in ("small", "large"))
    data = registry.read(
        FolderConfig(root=small, targets=large), PreprocessConfig(), tmp_path / "cache"
    )
    assert data.test.labels.shape[1:] == (16, 16, 3)
    assert (data.test.labels[:, 0, 0, 0] == data.test.stored[:][:, 0, 0, 0]).all()
    with pytest.raises(ConfigError, match=r"data.targets: got \S+ with data.masks, expected one"):
        registry.read(
            FolderConfig(root=small, targets=large, masks=large), PreprocessConfig(), tmp_path
        )


def test_pictures_of_nan_have_no_psnr():
    """The limit of an exact picture, 100 dB, must not stand for NaN."""
    task, fp32 = score("psnr", NOISY, PICTURES)
    _, broken = score("psnr", np.full_like(NOISY, np.nan), PICTURES)
    assert np.isnan(broken.value)
    assert task.compare(broken, fp32).p_within(0.5) == 1
