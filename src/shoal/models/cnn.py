"""Small convolutional networks: two for images (Pereira et al. 2025, Ma et al. 2024) and one for windows of sensors.

Max pooling comes before the bias and the ReLU, not after them. The result is the same with a quarter of the work. In
one dimension pooling comes before the ReLU only.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import UserError


def _image_shape(name: str, input_shape: tuple[int, ...], min_side: int) -> tuple[int, int, int]:
    """Returns channels, height and width, or raises UserError if the inputs are no images or too small."""
    if len(input_shape) != 3 or min(input_shape[1:]) < min_side:
        raise UserError(
            f"model {name} takes images of at least {min_side} x {min_side} pixels, not inputs of shape "
            f"{tuple(input_shape)}; mlp and linear take any shape"
        )
    channels, height, width = input_shape
    return channels, height, width


def _window_shape(name: str, input_shape: tuple[int, ...], min_length: int) -> tuple[int, int]:
    """Returns channels and length, or raises UserError if the inputs are no windows or too short."""
    if len(input_shape) != 2 or input_shape[1] < min_length:
        raise UserError(
            f"model {name} takes windows of shape (channels, length) with a length of at least {min_length}, not "
            f"inputs of shape {tuple(input_shape)}; mlp and linear take any shape"
        )
    channels, length = input_shape
    return channels, length


def _conv_relu_pool(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Applies a convolution, max pooling over 2 x 2, and ReLU."""
    assert conv.bias is not None
    return F.relu(F.max_pool2d(F.conv2d(x, conv.weight), 2) + conv.bias[:, None, None])


class CnnCifar(nn.Module):
    """Three 3 x 3 convolutions (32, 64, 64) without padding and a dense layer of 64 (Pereira et al. 2025).

    The network has 73,418 parameters on 3 x 32 x 32. Only convolutions without padding give that number.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = _image_shape("cnn-cifar", input_shape, 18)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 64, 3)

        def output_side(side: int) -> int:
            return (((side - 2) // 2 - 2) // 2 - 2) // 2

        self.fc = nn.Linear(64 * output_side(height) * output_side(width), 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = _conv_relu_pool(self.conv1, x)
        x = _conv_relu_pool(self.conv2, x)
        x = _conv_relu_pool(self.conv3, x)
        return self.head(F.relu(self.fc(x.flatten(1))))


class CnnFedAvg(nn.Module):
    """Two 5 x 5 convolutions (32, 64) and a dense layer of 512 as base, and the last layer as head (Ma et al. 2024)."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = _image_shape("cnn-fedavg", input_shape, 16)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)

        def output_side(side: int) -> int:
            return ((side - 4) // 2 - 4) // 2

        self.fc = nn.Linear(64 * output_side(height) * output_side(width), 512)
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = _conv_relu_pool(self.conv1, x)
        x = _conv_relu_pool(self.conv2, x)
        return self.head(F.relu(self.fc(x.flatten(1))))


class Cnn1d(nn.Module):
    """Two convolutions over time (32, 64; kernel 5) without padding and a dense layer of 64, for windows of sensors.

    A window has the shape (channels, length). The network has 64,998 parameters on 6 x 64 and six classes.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, length = _window_shape("cnn-1d", input_shape, 16)
        self.conv1 = nn.Conv1d(channels, 32, 5)
        self.conv2 = nn.Conv1d(32, 64, 5)
        self.fc = nn.Linear(64 * (((length - 4) // 2 - 4) // 2), 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = F.relu(F.max_pool1d(self.conv1(x), 2))
        x = F.relu(F.max_pool1d(self.conv2(x), 2))
        return self.head(F.relu(self.fc(x.flatten(1))))
