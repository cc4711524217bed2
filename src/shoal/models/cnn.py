"""Small convolutional networks of papers 002 and 003.

The largest of four is taken before the bias is added and negative values are cut off, not after: the same result from
a quarter of the work.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import UserError


def _image_shape(name: str, input_shape: tuple[int, ...], min_side: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < min_side:
        raise UserError(
            f"model {name} takes images of at least {min_side} x {min_side} pixels, not inputs of shape "
            f"{tuple(input_shape)}; mlp and linear take any shape"
        )
    channels, height, width = input_shape
    return channels, height, width


def _conv_relu_pool(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolution, ReLU and the largest of 2 x 2."""
    assert conv.bias is not None
    return F.relu(F.max_pool2d(F.conv2d(x, conv.weight), 2) + conv.bias[:, None, None])


class CnnCifar(nn.Module):
    """Three 3 x 3 convolutions (32, 64, 64) without padding and a dense layer of 64: 73,418 parameters
    on 3 x 32 x 32 (paper 002; only unpadded convolutions give that number)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = _image_shape("cnn-cifar", input_shape, 18)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 64, 3)

        def after(side: int) -> int:
            return (((side - 2) // 2 - 2) // 2 - 2) // 2

        self.fc = nn.Linear(64 * after(height) * after(width), 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = _conv_relu_pool(self.conv1, x)
        x = _conv_relu_pool(self.conv2, x)
        x = _conv_relu_pool(self.conv3, x)
        return self.head(F.relu(self.fc(x.flatten(1))))


class CnnFedAvg(nn.Module):
    """Two 5 x 5 convolutions (32, 64) and a dense layer of 512: base; the last layer: head (paper 003)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = _image_shape("cnn-fedavg", input_shape, 16)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)

        def after(side: int) -> int:
            return ((side - 4) // 2 - 4) // 2

        self.fc = nn.Linear(64 * after(height) * after(width), 512)
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = _conv_relu_pool(self.conv1, x)
        x = _conv_relu_pool(self.conv2, x)
        return self.head(F.relu(self.fc(x.flatten(1))))
