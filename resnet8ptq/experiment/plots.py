"""Figures of one run."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure  # no pyplot: nothing here needs a screen or global state

from resnet8ptq.core.text import plain


def sensitivity(
    layers: Sequence[str],
    sqnr_db: Sequence[float],
    losses: Sequence[float],
    saved_kb: Sequence[float],
    *,
    whole_sqnr_db: float,
    output: str,
    lost: str,
    title: str,
) -> Figure:
    """Three bars for each layer, the first layer on top.

    Args:
        losses: what each loses of the metric, which `lost` names with its unit.
        whole_sqnr_db: with every layer quantized, drawn as a line.
        output: what the SQNR is taken of.
    """
    figure = Figure(figsize=(11, 1.8 + 0.34 * len(layers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    columns = (
        (sqnr_db, "", f"SQNR of the {output} (dB)"),
        (losses, "%+.3g", lost),
        (saved_kb, "%.1f", "saved (kB)"),
    )
    places = range(len(layers))
    for axes, (values, label, name) in zip(panels, columns, strict=True):
        bars = axes.barh(places, values, color="tab:blue", height=0.65)
        axes.bar_label(bars, fmt=label, padding=3, fontsize=9)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.margins(x=0.3)  # room for the labels
        axes.set_xlabel(plain(name))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    # The line would cross numbers at the bars' ends: here they stand by the names.
    named = [f"{plain(layer)}  {value:.1f}" for layer, value in zip(layers, sqnr_db, strict=True)]
    panels[0].set_yticks(places, named)
    panels[0].invert_yaxis()
    line = panels[0].axvline(whole_sqnr_db, color="tab:red", linestyle="--")
    figure.legend([line], [f"all layers: {whole_sqnr_db:.1f} dB"], loc="outside upper right")
    figure.suptitle(plain(title), x=0.01, ha="left")
    return figure


def fine_tuning(points: Sequence[Mapping[str, float]]) -> Figure:
    """Loss in training and on held-out images, and accuracy on those, over the steps."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    series = (
        (left, "qat_loss", "training", "C0", None),
        (left, "qat_validation_loss", "held-out", "C1", "o"),
        (right, "qat_validation_accuracy", "held-out", "C1", "o"),
    )
    for axes, name, label, colour, marker in series:
        curve = [(point["step"], point[name]) for point in points if name in point]
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, label=label)
    left.set(ylabel="distillation loss")
    right.set(ylabel="accuracy of held-out images")
    for axes in (left, right):
        axes.set(xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
