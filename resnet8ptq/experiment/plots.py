"""The figure of fine-tuning."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state


def fine_tuning(points: Sequence[Mapping[str, float]]) -> Figure:
    """Draw training loss, held-out loss and held-out accuracy over the steps."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = (
        (left, "qat/loss", "training", "C0", None),
        (left, "qat/validation_loss", "held-out", "C1", "o"),
        (right, "qat/validation_accuracy", "held-out", "C1", "o"),
    )

    # A point has only the metrics of its step
    for axes, name, label, colour, marker in series:
        curve = [(point["step"], point[name]) for point in points if name in point]
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, label=label)
    left.set(ylabel="distillation loss")
    right.set(ylabel="accuracy of held-out samples")
    for axes in (left, right):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
