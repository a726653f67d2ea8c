"""`slim`: removes the parts of a .tflite file that inference does not read."""

from resnet8ptq.backends.tflite import contents


def slim(content: bytes) -> bytes:
    """Return a copy without description, metadata, inner names, recorded ranges and duplicates.

    Duplicates are equal arrays and buffers. Names and ranges are those of the file's first graph.
    Inputs, outputs and signatures keep their names.
    """
    model = contents.read_model(content)
    model.description = model.metadata = model.metadataBuffer = None
    graph = model.subgraphs[0]
    graph.name = None
    named = {*graph.inputs, *graph.outputs}
    for index, tensor in enumerate(graph.tensors):
        if index not in named:
            tensor.name = None
        if tensor.quantization is not None:
            tensor.quantization.min = tensor.quantization.max = None
    return contents.write_model(model, share=True)
