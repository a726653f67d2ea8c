"""Torch modules and Keras models of the zoo; the frameworks are imported as they are built."""

from typing import Any

from tests.zoo.registry import Draw, Network, structure


def seeded(module: Any) -> Any:
    """Return a torch module in evaluation mode with weights that are the same each time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, values in module.state_dict().items():
        if values.is_floating_point():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.2)
            if name.endswith("running_var"):
                values.abs_().add_(0.5)
    return module.eval()


@structure("torchao 4116", flows=("torch pt2e",))
def batch_norm_after_linear() -> Network:
    """Linear(16, 16) on [N, 16, 16]: the shapes hide the axis of the normalization."""
    from torch import nn

    module = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    return Network(seeded(module), {"x": Draw().samples(16, 16)})


@structure("torchao 4478", flows=("executorch",))
def linear_used_twice() -> Network:
    import torch

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) + self.linear(y)

    draw = Draw()
    return Network(seeded(Twice()), {"x": draw.samples(16), "y": draw.samples(16)})


@structure("executorch 20517, 20558")
def same_padding_in_torch() -> Network:
    from torch import nn

    layers = [
        nn.Conv2d(1, 8, (32, 1), padding="same"),
        nn.ReLU(),
        nn.Conv2d(8, 4, 4, padding="same"),
    ]
    return Network(seeded(nn.Sequential(*layers)), {"x": Draw().samples(1, 40, 3)})


@structure("executorch 20517, 20558")
def same_padding_of_one_axis() -> Network:
    from torch import nn

    layers = [nn.Conv1d(3, 8, 4, padding="same"), nn.ReLU(), nn.Conv1d(8, 4, 1)]
    return Network(seeded(nn.Sequential(*layers)), {"x": Draw().samples(3, 20)})


@structure("tensorflow 33588", flows=("tflite", "tflite corrected"))
def mean_over_channels_in_keras() -> Network:
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    values = keras.layers.Conv2D(8, 3, activation="relu")(inputs)
    gated = values * keras.ops.mean(values, axis=3, keepdims=True)
    joined = gated + keras.ops.mean(gated, axis=[1, 2, 3], keepdims=True)
    outputs = keras.layers.Conv2D(4, 1)(joined)
    return Network(keras.Model(inputs, outputs), {"x": Draw().samples(8, 8, 3)})


@structure("PINTO_model_zoo 352", flows=("tflite percentile", "tflite corrected"))
def outputs_with_fixed_scales_in_keras() -> Network:
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    values = keras.layers.Conv2D(8, 3, activation="sigmoid")(inputs)
    values = keras.layers.Conv2D(4, 3, activation="tanh")(values)
    outputs = keras.layers.Dense(5, activation="softmax")(keras.layers.Flatten()(values))
    return Network(keras.Model(inputs, outputs), {"x": Draw().samples(8, 8, 3)})
