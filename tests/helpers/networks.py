"""Small networks of each kind, as a user would bring them."""

from torch import nn


class SmallConvolution(nn.Sequential):
    def __init__(self, input_shape, classes):
        channels, height, width = input_shape
        super().__init__(
            nn.Conv2d(channels, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * ((height - 2) // 2) * ((width - 2) // 2), classes),
        )


class SmallBatchNorm(nn.Sequential):
    """Has batch norm, which mixes the samples of a batch and has buffers."""

    def __init__(self, input_shape, classes):
        channels, height, width = input_shape
        super().__init__(
            nn.Conv2d(channels, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * (height - 2) * (width - 2), classes),
        )
