"""The model, the records, and one client's training and test."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv(x)), 2)
        return self.fc(x.flatten(1))


def load_data(partition_id, num_partitions, batch_size):
    """Load one client's share of the records."""
    digits = load_digits()
    inputs = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    mine = np.arange(len(targets)) % num_partitions == partition_id
    records = TensorDataset(inputs[mine], targets[mine])
    train, test = torch.utils.data.random_split(
        records, [0.8, 0.2], generator=torch.Generator().manual_seed(42)
    )
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=64)


def train(net, loader, epochs, lr):
    """Train the model on a client's records."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net, loader):
    """Measure loss and accuracy."""
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = net(inputs)
            loss += functional.cross_entropy(outputs, targets, reduction="sum").item()
            correct += (outputs.argmax(1) == targets).sum().item()
            count += len(targets)
    return loss / count, correct / count
