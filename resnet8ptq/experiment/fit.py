"""Whether a data set and a network fit each other: the layout of samples, and the classes."""

from dataclasses import replace

from resnet8ptq.core.errors import ModelError, UnsupportedError
from resnet8ptq.data.dataset import Dataset
from resnet8ptq.models.contract import find_layout
from resnet8ptq.models.model import Fp32Model


def fit(dataset: Dataset, fp32: Fp32Model) -> Dataset:
    """Return the data set as the network takes it: its axes in order, a class for each output.

    Raises:
        ModelError: the network takes other samples, or returns other than one value for each class.
        UnsupportedError: it takes a fixed number of samples at once.
    """
    contract, source = fp32.contract, fp32.source
    if contract.batch is not None:
        raise UnsupportedError(
            f"{source}: takes {contract.batch} samples at once, and its batch cannot be freed "
            f"({fp32.conversion.why_fixed})"
        )
    if fp32.final == "values":
        outputs = ", ".join(map(str, contract.outputs))
        raise ModelError(f"{source}: returns {outputs}; takes one output, a value for each class")
    layout = find_layout(dataset.test.input_shape, contract)
    returned, known = contract.outputs[0].shape[0], len(dataset.class_names)
    assert returned is not None  # conversion has settled every size
    if not dataset.named and known < returned:
        names = tuple(map(str, range(returned)))  # the samples may lack the last classes
        dataset = replace(dataset, class_names=names)
    elif returned != known:
        raise ModelError(
            f"{source}: returns {returned} values, but {dataset.name} has {known} classes; takes a "
            "network with one output for each class"
        )
    return dataset.arranged(layout)
