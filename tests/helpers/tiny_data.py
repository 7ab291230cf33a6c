"""Tiny datasets in the published formats, and a local server that can misbehave."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import struct
import tarfile
import threading
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from noisewise.data.catalogue import CIFAR10, CIFAR100, MNIST, DatasetInfo
from noisewise.data.layouts import ARRAYS, cifar_archive, cifar_files, cifar_png

PARTS = {"train": ("data_batch_1.bin", "data_batch_2.bin"), "test": ("test_batch.bin",)}
PICTURES = {"train": ("data_batch_1.png", "data_batch_2.png"), "test": ("test_batch.png",)}
LABELS = {"train": "train_lables.json", "test": "test_lables.json"}
ARCHIVE = "cifar-10-binary.tar.gz"


def tiny_arrays(info: DatasetInfo, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    limits = {name: 256 if name.endswith("inputs") else info.n_classes for name in ARRAYS}
    return {n: rng.integers(0, limits[n], info.shape_of(n), dtype=np.uint8) for n in ARRAYS}


def sha256(arrays: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in arrays.items()}


def tar(members: dict[str, bytes], folder: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def records(inputs: np.ndarray, *labels: np.ndarray) -> bytes:
    """Return CIFAR's binary records: label byte(s), then the pixels."""
    flat = inputs.reshape(len(inputs), -1)
    return np.concatenate([*(label[:, None] for label in labels), flat], axis=1).tobytes()


def cifar10_members(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    half = len(arrays["train_targets"]) // 2
    x, y = arrays["train_inputs"], arrays["train_targets"]
    return {
        "readme.html": b"ignored",
        "data_batch_2.bin": records(x[half:], y[half:]),  # the order in the archive is free
        "data_batch_1.bin": records(x[:half], y[:half]),
        "test_batch.bin": records(arrays["test_inputs"], arrays["test_targets"]),
    }


def cifar100_members(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    members = {}
    for part in ("train", "test"):
        x, fine = arrays[f"{part}_inputs"], arrays[f"{part}_targets"]
        members[f"{part}.bin"] = records(x, fine // 5, fine)  # coarse first, then fine
    return members


def chunk(kind: bytes, body: bytes) -> bytes:
    """Return a chunk of a PNG file with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of pixels [height, width, 3], as Pillow writes it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def png_members(arrays: dict[str, np.ndarray]) -> dict[str, bytes]:
    members = {"package.json": b"{}"}
    for part, names in PICTURES.items():
        members[LABELS[part]] = json.dumps(arrays[f"{part}_targets"].tolist()).encode()
        x = arrays[f"{part}_inputs"].transpose(0, 2, 3, 1)
        for name, piece in zip(names, np.split(x, len(names)), strict=True):
            members[name] = png(piece.reshape(len(piece), -1, 3))
    return members


def idx_members(arrays: dict[str, np.ndarray], gz: bool = True) -> dict[str, bytes]:
    members = {}
    for array, name in [
        ("train_inputs", "train-images-idx3-ubyte"),
        ("train_targets", "train-labels-idx1-ubyte"),
        ("test_inputs", "t10k-images-idx3-ubyte"),
        ("test_targets", "t10k-labels-idx1-ubyte"),
    ]:
        values = arrays[array].reshape(len(arrays[array]), *arrays[array].shape[2:])
        header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        content = header + values.tobytes()
        members[name + ".gz" * gz] = gzip.compress(content) if gz else content
    return members


def tiny_cifar10(archive_md5: str = "", **changes: object) -> DatasetInfo:
    """CIFAR-10's formats with 20 + 10 images of 4 x 4 pixels; two training batches."""
    info = replace(
        CIFAR10,
        shape=(3, 4, 4),
        n_train=20,
        n_test=10,
        layouts=(
            cifar_archive(ARCHIVE, PARTS, archive_md5, labels=1),
            cifar_files(PARTS, labels=1),
            cifar_png(PICTURES, LABELS),
        ),
        sources=(),
    )
    return replace(info, sha256=sha256(tiny_arrays(info)), **changes)


def tiny_cifar100(archive_md5: str, **changes: object) -> DatasetInfo:
    parts = {"train": ("train.bin",), "test": ("test.bin",)}
    layout = cifar_archive("cifar-100-binary.tar.gz", parts, archive_md5, labels=2)
    return replace(
        CIFAR100, shape=(3, 4, 4), n_train=20, n_test=10, layouts=(layout,), sources=(), **changes
    )


def tiny_mnist(**changes: object) -> DatasetInfo:
    info = replace(MNIST, shape=(1, 5, 4), n_train=30, n_test=10, sources=())
    return replace(info, sha256=sha256(tiny_arrays(info)), **changes)


def write(folder: Path, members: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in members.items():
        (folder / name).write_bytes(content)
    return folder


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class Behaviour:
    """How the server behaves; tests change it while the server runs."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.ranges = True  # honour Range
        self.stop_after: int | None = None  # bytes of a body before the connection is closed
        self.pause = 0.0  # seconds between pieces
        self.piece = 1 << 16


@contextmanager
def server(files: dict[str, bytes]):
    """Serve files on loopback; yields (base address, behaviour)."""
    behaviour = Behaviour(files)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = self.path.lstrip("/"), self.headers.get("Range")
            behaviour.requests.append((name, wanted))
            content = behaviour.files.get(name)
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.split("=")[1].rstrip("-")) if wanted and behaviour.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            body = content[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if behaviour.stop_after is not None:
                body = body[: behaviour.stop_after]
            for position in range(0, len(body), behaviour.piece):
                try:
                    self.wfile.write(body[position : position + behaviour.piece])
                except OSError:
                    return
                time.sleep(behaviour.pause)

        def log_message(self, *args: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/", behaviour
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
