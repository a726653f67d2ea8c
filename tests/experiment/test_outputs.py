"""The files of a run: complete, whole, and of one mind."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from matplotlib import image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from resnet8ptq.backends.contract import Artifact
from resnet8ptq.config.schema import RunConfig
from resnet8ptq.core import figures
from resnet8ptq.data.dataset import CalibrationSet, Dataset, Split
from resnet8ptq.evaluation.result import RunResult
from resnet8ptq.experiment import outputs
from resnet8ptq.experiment.samples import SamplesByRole
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.tasks import classification
from resnet8ptq.tasks.classification import ClassScores
from resnet8ptq.tasks.scoring import class_plots
from resnet8ptq.tasks.scoring.hits import Hits
from tests.helpers.configs import make_config
from tests.helpers.results import make_result

NAMES = ("cat", "dog", "frog")
# True classes, and what model and baseline make of them. No image is a frog.
LABELS = np.array([0, 0, 0, 0, 1, 1])
MODEL = np.array([0, 0, 0, 2, 1, 0])
BASELINE = np.array([0, 0, 1, 1, 1, 1])

FILES = {
    *("config.yaml", "per_class.csv", "confusion.csv", "confusion.png"),
    *("classes.png", "predictions.npz", "example.npz", "calibration.csv", "ranges.json"),
    "wrong_examples.json",
}

Write = Callable[..., tuple[RunConfig, RunResult]]


def scores(predictions: np.ndarray) -> ClassScores:
    probabilities = np.full((len(predictions), len(NAMES)), 0.1, dtype=np.float32)
    probabilities[np.arange(len(predictions)), predictions] = 0.8
    return ClassScores(probabilities, LABELS)


@pytest.fixture
def written(shapes_model: Fp32Model) -> Write:
    """Write the files of a run into a folder; return its config and result."""

    def write(folder: Path, *overrides: str) -> tuple[RunConfig, RunResult]:
        task = classification.build(NAMES)
        result = make_result(task, task.compare(scores(MODEL), scores(BASELINE)))
        config = make_config("data=shapes", *overrides)
        artifact = Artifact(folder / "model.onnx", 10, {"input": (0.0, 255.0)})
        images = np.zeros((3, 32, 32, 3), dtype=np.uint8)
        calibrating = CalibrationSet(
            Split(images, np.array([2, 0, 1]), "here"), np.array([4, 7, 9])
        )
        reported = Split(np.zeros((6, 32, 32, 3), np.uint8), LABELS, "here")
        samples = SamplesByRole(Dataset("shapes", NAMES, calibrating.split, reported), calibrating)
        outputs.write(folder, config, result, artifact, samples, shapes_model)
        return config, result

    return write


def both(model: np.ndarray, baseline: np.ndarray) -> tuple[Hits, Hits]:
    return Hits(model, LABELS), Hits(baseline, LABELS)


def read_csv(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_config_reads_back(tmp_path, written):
    config, _ = written(tmp_path, "backend=torch", "calib.percentile=99.5", "per_channel=true")
    arrays = OmegaConf.load(tmp_path / "config.yaml")
    assert OmegaConf.to_container(arrays) == OmegaConf.to_container(OmegaConf.structured(config))
    assert arrays.backend.engine == "auto"
    assert arrays.calib.percentile == 99.5


def test_confusion_counts_true_classes_down_and_predictions_across(tmp_path, written):
    written(tmp_path)
    header, *rows = read_csv(tmp_path / "confusion.csv")
    assert header[1:] == list(NAMES)
    assert rows == [["cat", "3", "0", "1"], ["dog", "1", "1", "0"], ["frog", "0", "0", "0"]]


def test_per_class_accuracies(tmp_path, written):
    written(tmp_path)
    header, *rows = read_csv(tmp_path / "per_class.csv")
    assert header == ["class", "accuracy", "baseline_accuracy", "delta"]
    assert rows == [
        ["cat", "0.75", "0.5", "0.25"],
        ["dog", "0.5", "1.0", "-0.5"],
        ["frog", "", "", ""],
    ]


def test_predictions_read_back(tmp_path, written):
    written(tmp_path)
    with np.load(tmp_path / "predictions.npz", allow_pickle=False) as arrays:
        assert arrays["predictions"].tolist() == MODEL.tolist()
        assert arrays["baseline_predictions"].tolist() == BASELINE.tolist()
        assert arrays["labels"].tolist() == LABELS.tolist()
        assert np.array_equal(arrays["probabilities"], scores(MODEL).probabilities)
        assert arrays["samples"].dtype == np.uint64


def test_calibration_images_can_be_found_again(tmp_path, written):
    written(tmp_path)
    assert read_csv(tmp_path / "calibration.csv") == [
        *(["index", "label"], ["4", "2"], ["7", "0"], ["9", "1"])
    ]


def test_ranges_read_back(tmp_path, written, shapes_model):
    written(tmp_path)
    content = json.loads((tmp_path / "ranges.json").read_text())
    assert content.keys() == {"activations", "weights"}
    assert content["activations"] == {"input": [0.0, 255.0]}
    initializers = onnx.load(shapes_model.onnx_path).graph.initializer
    arrays = [onnx.numpy_helper.to_array(tensor) for tensor in initializers]
    extremes = {(float(array.min()), float(array.max())) for array in arrays if array.ndim > 1}
    assert len(content["weights"]) == 10  # ResNet8: nine convolutions, one dense layer
    assert {(low, high) for low, high in content["weights"].values()} <= extremes


def test_writing_again_replaces(tmp_path, written):
    written(tmp_path)
    (tmp_path / "ranges.json").write_text("stale")
    written(tmp_path)
    assert json.loads((tmp_path / "ranges.json").read_text())["weights"]
    assert {path.name for path in tmp_path.iterdir()} == FILES


def test_a_failure_leaves_no_part_of_a_file(tmp_path, written, monkeypatch):
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(class_plots, "confusion", fail)
    with pytest.raises(OSError, match="disk full"):
        written(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.fixture
def labelled(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The texts of each matrix that is drawn, [rows, columns]."""
    result: list[np.ndarray] = []
    draw = class_plots.label_cells

    def label_cells(axes: Axes, texts: np.ndarray, *rest: Any, **named: Any) -> None:
        result.append(texts)
        draw(axes, texts, *rest, **named)

    monkeypatch.setattr(class_plots, "label_cells", label_cells)
    return result


def test_confusion_plot_is_a_picture_that_shows_the_counts(tmp_path, labelled):
    labels = np.repeat([0, 1, 2], [5, 7, 9])
    pictures = []
    for name, model in (("right", labels), ("mirrored", 2 - labels)):
        figure = class_plots.confusion(Hits(model, labels), Hits(labels, labels), NAMES, "title")
        figures.save(figure, tmp_path / f"{name}.png")
        pictures.append(image.imread(tmp_path / f"{name}.png"))
        assert {*labelled[0].ravel()} == {"5", "7", "9", ""}
    one, other = pictures
    assert one.shape == other.shape
    assert min(one.shape[:2]) > 300
    assert not np.array_equal(one, other)


def test_confusion_plot_shows_the_change_from_fp32(labelled):
    class_plots.confusion(*both(MODEL, BASELINE), NAMES, "title")
    counts, change = (texts.tolist() for texts in labelled)
    # By true and predicted class; empty cells stay empty.
    assert counts == [["3", "", "1"], ["1", "1", ""], ["", "", ""]]
    assert change == [["+1", "-2", "+1"], ["+1", "-1", ""], ["", "", ""]]


def test_labels_of_cells_stand_in_their_cells():
    """Ink where there is a text, black or white as the cell asks for, and none elsewhere."""
    figure = Figure(figsize=(3, 3))
    axes = figure.add_axes((0, 0, 1, 1))
    figures.show_matrix(axes, np.zeros((3, 3)), cmap="gray", vmin=-1, vmax=1)
    texts = np.array([["8", "", ""], ["", "", "+12"], ["", "", ""]])
    dark = np.array([[False] * 3, [False, False, True], [False] * 3])
    figures.label_cells(axes, texts, dark, size=9)
    pixels = image.imread(io.BytesIO(figures.to_png(figure)))[..., 0]
    cells = [np.split(row, 3, axis=1) for row in np.split(pixels, 3)]
    middle = [[cell[5:-5, 5:-5] for cell in row] for row in cells]
    ink = [[(float(cell.min()), float(cell.max())) for cell in row] for row in middle]
    grey = ink[2][2]
    assert grey[0] == grey[1]
    assert ink[0][0] == (0, grey[0])
    assert ink[1][2] == (grey[0], 1)
    assert all(ink[r][c] == grey for r in range(3) for c in range(3) if not texts[r, c])


def test_class_plot_has_a_bar_of_each_for_each_class_with_images():
    figure = class_plots.classes(*both(MODEL, BASELINE), NAMES, "title")
    heights = sorted(bar.get_height() for bar in figure.axes[0].patches)
    assert heights == [50, 50, 75, 100]  # cat: 50 and 75, dog: 100 and 50, no frog


@pytest.mark.parametrize("plot", [class_plots.confusion, class_plots.classes])
@pytest.mark.parametrize("model", [LABELS, 1 - LABELS], ids=["all right", "all wrong"])
def test_plots_take_extremes_and_classes_without_images(tmp_path, plot, model):
    path = tmp_path / "extreme.png"
    figures.save(plot(*both(model, model), NAMES, "title"), path)
    assert image.imread(path).std() > 0


def test_class_plot_takes_many_classes_of_which_the_first_have_no_samples():
    labels = np.arange(90, 95)
    names = list(map(str, range(100)))
    figure = class_plots.classes(Hits(labels, labels), Hits(labels, labels), names, "title")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [100] * 10
