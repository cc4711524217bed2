"""ResNet-18 for small images: a 3 x 3 stem, four stages of two residual blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.models.cnn import _image_shape

Norm = Callable[[int], nn.Module]

# Group norm is the default. It normalises each sample on its own, so clients with different data do not disturb each
# other's statistics, and batches may be padded. Neither is true of batch norm.
NORMS: dict[str, Norm] = {"group": lambda width: nn.GroupNorm(min(32, width), width), "batch": nn.BatchNorm2d}


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut around them."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = norm(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = norm(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), norm(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the output of the block."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images, with group norm (the default) or batch norm."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, norm: str = "group", width: int = 64) -> None:
        super().__init__()
        channels, _, _ = _image_shape("resnet18", input_shape, 8)
        make_norm = NORMS[norm]
        self.stem = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = make_norm(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(ResidualBlock(a, b, 1 if a == b else 2, make_norm), ResidualBlock(b, b, 1, make_norm))
                for a, b in pairwise(widths)
            )
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        x = self.stages(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((-2, -1)))
