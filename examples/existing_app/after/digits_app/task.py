"""The model. A site reads its records, trains and tests with noisewise."""

from torch import nn
from torch.nn import functional


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        return self.fc(x.flatten(1))


def make_net(input_shape, n_classes):
    """Make the model for noisewise, which calls it with the shape and classes of a site's file."""
    if tuple(input_shape) != (1, 8, 8) or n_classes != 10:
        raise ValueError(
            f"Net is for 10 classes of shape (1, 8, 8), not {n_classes}, {input_shape}"
        )
    return Net()
