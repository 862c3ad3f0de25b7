"""A PyTorch module and datasets of your own: `shoal launch -n 2 jobs/examples/torch_digits.py [--out DIR]`.

Nothing in Net and Digits knows of shoal. Needs PyTorch: pip install 'shoal[torch]'.
"""

from __future__ import annotations

import argparse

import h5py
import torch
from torch import nn
from torch.utils.data import Dataset

import shoal
import shoal.torch
from shoal.data.sets import DIGITS_FILE


class Net(nn.Module):
    """A small convolutional net with batch norm and dropout, for images (1, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the ten digits."""
        return self.classify(self.features(x))


class Digits(Dataset):
    """8x8 images and their labels; in training each is moved by up to a pixel, another way in each epoch."""

    def __init__(self, part: str, train: bool) -> None:
        with h5py.File(DIGITS_FILE) as file:
            self.images = torch.from_numpy(file[f"x_{part}"][:]).permute(0, 3, 1, 2) / 16
            self.labels = torch.from_numpy(file[f"y_{part}"][:])
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        if self.train:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, (down, right), (1, 2))
        return image, int(self.labels[index])


def digits() -> tuple[Digits, Digits]:
    """For training and for the test."""
    return Digits("train", train=True), Digits("test", train=False)


def main() -> None:
    """Train on all ranks of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--epochs", type=float, default=6)
    options = parser.parse_args()
    result = shoal.train(
        shoal.torch.Model(Net(), nn.CrossEntropyLoss()),
        data=digits(),
        classes=10,
        learners="0:1, 25%:2, 50%:4",
        averaging=shoal.Averaging(steps=4, momentum=0.5),
        learning_rate=0.1,
        epochs=options.epochs,
        batch=16,
        out=options.out,
    )
    if result.master:
        print(f"test accuracy {100 * result.accuracy:.1f}%", flush=True)


if __name__ == "__main__":
    main()
