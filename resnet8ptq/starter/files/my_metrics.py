"""Metrics of your own: task=custom task.metric._target_=my_metrics.probability_of_the_label."""

import numpy as np
from numpy.typing import NDArray


def probability_of_the_label(
    outputs: NDArray[np.float32], targets: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the probability of the right class for each sample.

    A single number for all samples works too. Higher is better, unless task.direction=minimize.

    Args:
        outputs: the network's outputs as they are, [samples, classes]: probabilities only if the
            network ends in a softmax.
        targets: the labels, [samples].
    """
    probabilities: NDArray[np.float32] = outputs[np.arange(len(targets)), targets]
    return probabilities
