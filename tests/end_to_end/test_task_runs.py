"""A run of each task from the command line, on small data, and on real data in SHARED_DATA."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from resnet8ptq.shipping import to_run
from resnet8ptq.tasks import agreement, ctc, deviation, registry, segmentation, tokens
from tests.helpers import detectors, segmenters
from tests.helpers.assembling import assemble
from tests.helpers.calling import Called, call, call_beside

QUICK = (*("latency.enabled=false", "threads=1", "evaluate.batch_size=100"), "report.columns=[all]")
FEATURES, SAMPLES = 8, 600


def write_network(path: Path, layers: list[np.ndarray], softmax: bool = False) -> Path:
    """Gemm layers with a Relu between them; three layers or more have a second output."""
    nodes, value = [], "x"
    for index in range(len(layers)):
        last = index == len(layers) - 1
        nodes.append(helper.make_node("Gemm", [value, f"w{index}"], [f"g{index}"], f"dense{index}"))
        value = f"g{index}"
        if not last:
            nodes.append(helper.make_node("Relu", [value], [f"r{index}"], f"relu{index}"))
            value = f"r{index}"
    if softmax:
        nodes.append(helper.make_node("Softmax", [value], ["p"], "softmax"))
        value = "p"
    names = [value] if softmax or len(layers) < 3 else [value, f"r{len(layers) - 2}"]
    widths = [layers[-1].shape[1], layers[-2].shape[1]]
    gives = {name: ["N", width] for name, width in zip(names, widths, strict=False)}
    constants = {f"w{n}": w.astype(np.float32) for n, w in enumerate(layers)}
    onnx.save(assemble(nodes, {"x": ["N", FEATURES]}, gives, constants, opset=13), path)
    return path


def write_reader(path: Path, layers: list[np.ndarray]) -> Path:
    """Write a network of the same layers, whose output is classes of frames [N, 4, 2]."""
    model = onnx.load(write_network(path, layers))
    [output] = model.graph.output
    shape = onnx.numpy_helper.from_array(np.array([0, 4, 2]), "shape")
    model.graph.initializer.append(shape)
    model.graph.node.append(helper.make_node("Reshape", [output.name, "shape"], ["frames"]))
    output.CopyFrom(helper.make_tensor_value_info("frames", onnx.TensorProto.FLOAT, ["N", 4, 2]))
    onnx.save(model, path)
    return path


def write_speaker(path: Path, layers: list[np.ndarray]) -> Path:
    """Write a network of the same layers on each word, [N, 6, FEATURES]."""
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["embedded"], "table_of_words"),
        helper.make_node("MatMul", ["embedded", "w0"], ["m0"], "dense0"),
        helper.make_node("Relu", ["m0"], ["r0"], "relu0"),
        helper.make_node("MatMul", ["r0", "w1"], ["logits"], "dense1"),
    ]
    constants = {f"w{n}": w.astype(np.float32) for n, w in enumerate(layers)}
    constants["table"] = np.eye(FEATURES, dtype=np.float32)
    gives = {"logits": ["N", 6, FEATURES]}
    model = assemble(nodes, {"words": ["N", 6]}, gives, constants, opset=13)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Networks and data: the largest of the first features is the class."""
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    both = np.concatenate([np.eye(FEATURES), -np.eye(FEATURES)], axis=1)
    back = np.concatenate([np.eye(FEATURES), -np.eye(FEATURES)], axis=0)
    noisy = x + random.normal(size=x.shape) * 0.4
    seven, two = noisy[:, :7].argmax(axis=1), (noisy[:, 1] > noisy[:, 0]).astype(int)
    # Anomalies have more in the features that the network leaves out.
    clips = np.repeat(np.arange(SAMPLES // 4), 4)
    strange = clips % 3 == 0
    windows = x.copy()
    windows[:, 6:] *= np.where(strange, 1.2, 1.0)[:, None]
    lossy = back.copy()
    lossy[:, 6:] = 0
    half = SAMPLES // 2
    np.savez(folder / "seven.npz", x=x, y=seven)
    np.savez(folder / "two.npz", x=x, y=two)
    sums = noisy[:, :7].reshape(SAMPLES // 4, 4, 7).sum(axis=1)
    np.savez(folder / "windows.npz", x=x, y=np.repeat(sums.argmax(axis=1), 4), groups=clips)
    np.savez(folder / "bare.npz", x=x)
    np.savez(folder / "labels.npz", x=x, y=noisy[:, :7] > 0.7)
    # Each two features are a frame, whose larger one is its symbol: a blank, or an a.
    symbols = noisy.reshape(SAMPLES, 4, 2).argmax(axis=2)
    alphabet = ctc.Alphabet(("", "a"), 0, 2)
    lines = [alphabet.decode(line) for line in symbols]
    np.savez(folder / "lines.npz", x=x, y=lines)
    tags = np.where(np.arange(4) < 2 + symbols[:, :1], symbols, -100)
    np.savez(folder / "tags.npz", x=x, y=tags, classes=["O", "B-A"])
    words = np.cumsum(random.choice([1, 1, 1, 2], (SAMPLES, 6)), axis=1) % FEATURES
    np.savez(folder / "words.npz", x=words)
    people = np.arange(SAMPLES) // 30
    near = random.normal(size=(SAMPLES // 30, FEATURES))[people] + 0.5 * x
    np.savez(folder / "people.npz", x=near.astype(np.float32), y=people)
    np.savez(folder / "values.npz", x=x, y=noisy[:, :3].astype(np.float32))
    one, other = x[::2, :3], x[1::2, :3]
    cosine = (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    scores = np.repeat(cosine + random.normal(size=half) * 0.2, 2)
    np.savez(folder / "pairs.npz", x=x, y=scores, groups=np.arange(SAMPLES) // 2)
    np.savez(
        folder / "clips.npz",
        **{"x_train": windows[:half][~strange[:half]], "x_test": windows[half:]},
        **{"y_test": strange[half:], "groups_test": clips[half:]},
    )
    detectors.write_pictures(folder / "boxes")
    detectors.write_pictures(folder / "corners", keypoints=True)
    detectors.write_pictures(folder / "outlines", masks=True)
    back = back + random.normal(size=back.shape) * 0.05
    return {
        **{path.stem: path for path in folder.glob("*.npz")},
        "boxes": folder / "boxes",
        "corners": folder / "corners",
        "outlines": folder / "outlines",
        "scenes": segmenters.write_pictures(folder / "scenes"),
        "restorer": segmenters.write_restorer(folder / "restorer.onnx"),
        "segmenter": segmenters.write_network(folder / "segmenter.onnx"),
        "poser": detectors.write_detector(folder / "poser.onnx", "yolov8", keypoints=True),
        "outliner": detectors.write_detector(folder / "outliner.onnx", "yolov8", masks=True),
        "detector": detectors.write_detector(folder / "detector.onnx", "yolov8"),
        "classes": write_network(folder / "classes.onnx", [both, back[:, :7]], softmax=True),
        "scores": write_network(folder / "scores.onnx", [both, back[:, :7]]),
        "pair": write_network(folder / "pair.onnx", [both, back[:, :2]], softmax=True),
        "autoencoder": write_network(folder / "autoencoder.onnx", [both, lossy]),
        "regressor": write_network(folder / "regressor.onnx", [both, back[:, :3]]),
        "speaker": write_speaker(folder / "speaker.onnx", [both, np.roll(3 * back, 1, axis=1)]),
        "reader": write_reader(folder / "reader.onnx", [both, back]),
        "several": write_network(folder / "several.onnx", [both, back @ both, back]),
    }


OWN = """
import numpy as np

def worst(outputs, targets):
    return float(np.quantile(np.abs(outputs - targets), 0.9))
"""

SCORED = ("task.direction=minimize", "task.resamples=199")

# Task: data, network, overrides, title of the column, further metrics.
RUNS = {
    "classification": ("seven", "classes", (), "accuracy", ("top5_accuracy", "macro_f1", "drop")),
    "top5": ("seven", "classes", ("task=top5",), "top-5 accuracy", ("sqnr_db", "drop")),
    "binary": (
        *("two", "pair", ("task=binary", "task.threshold=0.4"), "AUC"),
        ("accuracy", "baseline/auc", "paired/accuracy_p_value", "ci95/delta_low"),
    ),
    "multilabel": (
        *("labels", "scores", (), "mAP"),
        ("macro_f1", "baseline/map", "paired/p_value", "paired/classes_lost", "sqnr_db"),
    ),
    "anomaly": (
        *("clips", "autoencoder", ("task=anomaly", "task.max_fpr=0.2"), "AUC"),
        ("pauc", "baseline/pauc", "paired/p_value", "sqnr_db"),
    ),
    "regression": ("values", "regressor", (), "MAE", ("rmse", "baseline/mae", "paired/p_value")),
    "similarity": (
        *("pairs", "regressor", ("task=similarity", "task.resamples=199"), "Spearman"),
        ("pearson", "baseline/spearman", "paired/p_value", "sqnr_db", "drop"),
    ),
    "ctc": (
        *(
            "lines",
            "reader",
            ("task=ctc", "task.alphabet=symbols.txt", "task.resamples=200"),
            "character error rate",
        ),
        ("wer", "baseline/cer", "paired/p_value", "sqnr_db", "drop"),
    ),
    "tokens": (
        *("tags", "reader", ("task.resamples=200", "task=tokens"), "entity F1"),
        ("token_accuracy", "baseline/entity_f1", "paired/classes_lost", "sqnr_db", "drop"),
    ),
    "perplexity": (
        *("words", "speaker", ("task=perplexity",), "perplexity"),
        ("baseline/perplexity", "paired/p_value", "sqnr_db", "drop"),
    ),
    "verification": (
        *(
            "people",
            "regressor",
            ("task=verification", "task.far=0.1", "task.resamples=200"),
            "EER",
        ),
        ("tar", "recall", "baseline/eer", "paired/p_value", "sqnr_db", "drop"),
    ),
    "custom": (
        *("values", "regressor"),
        ("task=custom", "task.metric._target_=own_metric.worst", *SCORED),
        *("worst", ("custom_metric", "baseline/custom_metric", "paired/p_value")),
    ),
    "detection": (
        *("boxes", "detector", ("task.resamples=200",), "AP"),
        ("ap50", "ap_small", "paired/p_value", "sqnr_db", "paired/classes_lost", "ci95/delta_low"),
    ),
    "keypoints": (
        *("corners", "poser", ("task.sigmas=[0.05,0.1]", "task.resamples=200"), "AP"),
        ("ap50", "ar", "paired/p_value", "sqnr_db", "paired/classes_lost", "ci95/delta_low"),
    ),
    "instance_segmentation": (
        *("outlines", "outliner", ("task.resamples=200",), "AP"),
        ("ap50", "ap_small", "paired/p_value", "sqnr_db", "output/maps/sqnr_db"),
    ),
    "segmentation": (
        *("scenes", "segmenter", ("task=segmentation", "task.resamples=200"), "mIoU"),
        ("pixel_accuracy", "paired/p_value", "sqnr_db", "paired/classes_lost", "ci95/delta_low"),
    ),
    "dense": (
        *("scenes", "restorer", ("task.resamples=200", "task=dense"), "PSNR dB"),
        ("ssim", "baseline/psnr", "paired/p_value", "sqnr_db", "ci95/delta_low"),
    ),
    "agreement": ("bare", "classes", (), "agreement", ("kl_divergence", "sqnr_db", "drop")),
    "deviation": (
        *("bare", "several", (), "relative error"),
        ("sqnr_db", "output/g2/sqnr_db", "output/r1/sqnr_db", "drop"),
    ),
}


def run(folder: Path, files: dict[str, Path], task: str, *more: str) -> Called:
    data, network, overrides, *_ = RUNS[task]
    (folder / "own_metric.py").write_text(OWN)
    (folder / "symbols.txt").write_text("a\n")
    words = ["data=arrays", f"data.root={files[data]}"]
    if task in ("detection", "keypoints", "instance_segmentation"):
        words = detectors.overrides(files[data], task)
    if task == "segmentation":
        words = segmenters.overrides(files[data])
    if task == "dense":
        images = files[data] / "images"
        words = ["data=folder", f"data.root={images}", f"data.targets={images}"]
    words.append(f"model.path={files[network]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        multirun = [word for word in more if word == "-m"]  # must come first
        return call(folder, *multirun, *words, *overrides, *QUICK, *more[len(multirun) :])


def test_every_task_is_run():
    assert set(RUNS) == set(registry.TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("task", RUNS)
def test_a_sweep_of_each_task(files, tmp_path, task):
    """Table, metrics, report and a resumed sweep show the metrics of this task alone."""
    _, _, _, title, further = RUNS[task]
    done = run(tmp_path, files, task, "-m", "backend=onnx,torch")
    assert done.code == 0, done.err
    assert len(done.children) == 2
    for child in done.children:
        assert child.data.params["scored_as"] == task
        result = done.result(child)
        metric = result["params"]["metric"]
        assert {metric, "ci95/value_low", "ci95/value_high", "counts/total", *further} <= set(
            result["metrics"]
        )
        assert {metric, f"{metric}_percent"} & set(child.data.metrics)
    measured = [row for row in done.table if row["status"] == "ok"]
    assert [bool(row[title]) for row in measured] == [True, True]
    report = done.artifacts(done.parent)["report.md"].read_text()
    labels = task not in ("agreement", "deviation")
    assert [bool(row.get("p")) for row in measured] == [labels] * 2
    words = ("accuracy", "McNemar test against") if task != "binary" else ()
    if task not in ("classification", "top5"):
        notes = {"agreement": agreement.NOTE, "deviation": deviation.NOTE}
        notes["segmentation"] = segmentation.PIXEL_ACCURACY.title
        notes["tokens"] = tokens.METRICS["token_accuracy"].title
        note = notes.get(task, "")
        kept = " ".join(report.split()).replace(note, "")
        out = " ".join(done.out.split()).replace(note, "")
        assert not [word for word in words if word in kept or word in out]
    assert ("Without labels: " in done.out and "Without labels: " in report) == (not labels)
    assert f"best {title}" in report or "No deployable model is within the limits" in report
    again = run(tmp_path, files, task, "-m", "backend=onnx,torch", "sweep.resume=true")
    assert "Skipped: 2 of 2 runs had finished before" in again.out


@pytest.mark.slow
@pytest.mark.parametrize("how", ["mean", "vote"])
def test_the_windows_of_a_clip_are_scored_as_one(files, tmp_path, how):
    words = [f"data.root={files['windows']}", f"model.path={files['scores']}", f"task.join={how}"]
    done = call(tmp_path, "data=arrays", *words, *QUICK)
    assert done.code == 0, done.err
    result = done.result(done.runs[0])
    with np.load(next(tmp_path.rglob("predictions.npz"))) as kept:
        assert result["metrics"]["counts/total"] == len(kept["predictions"])
    assert result["metrics"]["sqnr_db"] > 0
    assert "grouped" not in result["params"]

    # The test is planned for clips, too
    folder = tmp_path / "plan"
    folder.mkdir()
    planned = call(folder, "data=arrays", *words, *QUICK, "+analysis=plan_test")
    assert f"{result['metrics']['counts/total']:,.0f} test samples" in planned.out, planned.err
    apart = call(folder, "data=arrays", *words[:2], *QUICK, "+analysis=plan_test")
    assert apart.code == 2 and "task.join=mean" in apart.err


@pytest.mark.slow
def test_the_example_of_a_new_task_is_reported_judged_and_deployed(files, tmp_path):
    """docs/tasks.md names its file; besides the registry, no module of the package does."""
    done = run(tmp_path, files, "top5", "-m", "backend=onnx,torch", "report.max_drop=0.1")
    sweep = done.parent.info.run_id
    report = call_beside(tmp_path, "report", f"run_id={sweep}", "folder=again")
    assert report.code == 0, report.err
    assert "best top-5 accuracy" in (tmp_path / "again" / "report.md").read_text()
    verdict = call_beside(tmp_path, "verdict", f"sweep={sweep}", "format=json")
    assert verdict.code == 0, verdict.err
    answer = json.loads(verdict.out)
    assert answer["verdict"] == "pass"
    assert answer["metric"]["name"] == "top5_accuracy"
    run_id = f"run_id={answer['choice']['run_id']}"
    deployed = call_beside(tmp_path, "deploy", run_id, "folder=out", "verify=false")
    assert deployed.code == 0, deployed.err
    assert "top-5 accuracy" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_the_search_runs_by_the_example_of_a_new_task(files, tmp_path):
    words = [f"data.root={files['seven']}", f"model.path={files['classes']}"]
    limits = ("report.max_drop=0.2", "task=top5", "threads=1", "latency.repeats=3")
    done = call(tmp_path, *to_run(["data=arrays", *words, *limits]))
    assert done.code == 0, done.err
    assert {run.data.params["scored_as"] for run in done.children} == {"top5"}
    assert "Winner: " in done.out


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(RUNS.keys() - {"classification", "anomaly"}))
def test_layers_are_chosen_by_any_task(files, tmp_path, task):
    data = RUNS[task][0]
    held_out = f"held_out_images={5 if data in ('boxes', 'corners', 'outlines', 'scenes') else 50}"
    chosen = run(tmp_path, files, task, "nodes_to_exclude=auto", "max_drop=0.5", held_out)
    assert chosen.code == 0, chosen.err
    ranked = run(tmp_path, files, task, "+analysis=sensitivity", held_out)
    assert ranked.code == 0, ranked.err
    title = RUNS[task][3]
    assert f"{title} lost" in ranked.out


@pytest.mark.slow
def test_a_detector_without_labels_keeps_its_scores(tmp_path):
    """Boxes in pixels and scores from 0 to 1 share no 8-bit scale."""
    random = np.random.default_rng(0)
    network = detectors.boxes_and_scores(random)
    onnx.save(network, tmp_path / "detector.onnx")
    np.savez(tmp_path / "x.npz", x=random.normal(size=(80, 8, 3)).astype(np.float32))
    given = [f"model.path={tmp_path / 'detector.onnx'}", f"data.root={tmp_path / 'x.npz'}"]
    done = call(tmp_path, *given, "data=arrays", "dtype=u8s8", "reduce_range=true")
    assert done.code == 0, done.err
    [record] = done.runs
    assert record.data.metrics["sqnr_db"] > 20
    assert "stay in float: Concat 1, Sigmoid 1" in done.out + done.err
    whole = call(tmp_path, *given, "data=arrays", "dtype=u8s8", "float_tail=false")
    assert whole.code == 0, whole.err
    assert "Fails the limit" in whole.out


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["equalization", "adaround"])
def test_a_corrected_detector_says_what_stays_in_float(files, tmp_path, correction):
    """The corrected graph is deleted once it is quantized."""
    few = "corrections.adaround_iterations=3"
    done = run(tmp_path, files, "detection", f"corrections.{correction}=true", few)
    assert done.code == 0, done.err
    [record] = done.runs
    assert "Concat 1" in done.result(record)["params"]["float_operators"]
    assert record.data.metrics["ap"] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("anomaly", ("nodes_to_exclude=auto", "held_out_images=50"), "the labels of the training"),
        ("anomaly", ("+analysis=sensitivity", "held_out_images=50"), "the labels of the training"),
        ("regression", ("method=qat", "held_out_images=50"), "expected one that ends in Softmax"),
        ("detection", ("method=qat", "held_out_images=5"), "expected one that ends in Softmax"),
        ("detection", ("task.head=ssd",), "task.head=ssd takes boxes [boxes, 4], decoded, and"),
        (
            "detection",
            ("data.images=null",),
            "data.images: got null, expected a folder of pictures",
        ),
        ("custom", ("task.metric._target_=own_metric.none",), "got own_metric.none"),
        ("binary", ("task.threshold=2",), "task.threshold: got 2.0, expected a fraction"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(files, tmp_path, task, more, message):
    done = run(tmp_path, files, task, *more)
    assert message in done.out + done.err
    assert len(done.errors) <= 1


# Real networks and data, as SHARED_DATA's DATA.md describes them


@pytest.mark.slow
def test_visual_wake_words_as_two_classes(shared, tmp_path):
    data = shared / "vww" / "vww_own_permissive.npz"
    done = call(
        *(tmp_path, "data=arrays", f"data.root={data}", "preprocess=unit", "task=binary", *QUICK),
        f"model.path={shared / 'vww' / 'vww_96.h5'}",
    )
    assert done.code == 0, done.err
    [row] = [row for row in done.table if row["status"] == "ok"]
    assert float(row["AUC"]) > 0.9
    [run] = done.runs
    assert abs(done.result(run)["metrics"]["accuracy"] - 0.811) < 0.12
    assert abs(float(row["delta"])) < 0.02


@pytest.mark.slow
def test_an_autoencoder_without_labels(shared, tmp_path):
    """Five frames of a smooth log-mel spectrum, drawn: ToyADMOS itself is not free."""
    random = np.random.default_rng(0)
    steps = random.normal(size=(300, 5, 128)).cumsum(axis=2)
    np.save(tmp_path / "windows.npy", (-30 + steps.reshape(300, 640)).astype(np.float32))
    done = call(
        *(tmp_path, "data=arrays", f"data.root={tmp_path / 'windows.npy'}", *QUICK),
        f"model.path={shared / 'ad' / 'ad01.h5'}",
    )
    assert done.code == 0, done.err
    [row] = [row for row in done.table if row["status"] == "ok"]
    assert 0 < float(row["relative error"].rstrip("%")) < 20
    assert float(row["SQNR dB"]) > 10
