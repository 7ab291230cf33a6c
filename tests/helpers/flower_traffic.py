"""Run an app with real Flower processes; measure the traffic of a site and the memory of all."""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flower_processes import ROOT, Deployment
from safetensors.torch import save_file
from torch import Tensor, nn
from wire import Recorder

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger

RECORD, WIDTH, CLASSES = (3, 32, 32), 1280, 10


@dataclass(frozen=True)
class Traffic:
    """What a run cost.

    Attributes:
        sent: bytes that the first site sent in the whole run.
        received: bytes that it received.
        stream: all bytes that it sent.
        seconds: of the whole run.
        memory: largest resident memory in MB of each program.
        logs: of the run and the sites.
    """

    sent: int
    received: int
    stream: bytes
    seconds: float
    memory: dict[str, float]
    logs: dict[str, str]


def image_site(app: Path, number: int, records: int, changes: Mapping[str, str]) -> Path:
    """A site of an app, with random pictures and a ledger; ``changes`` edits its file."""
    folder = app / f"site-{number}"
    folder.mkdir()
    rng = np.random.default_rng(number)
    inputs = rng.integers(0, 256, (records, *RECORD), dtype=np.uint8)
    np.savez(folder / "records.npz", inputs=inputs, targets=rng.integers(0, CLASSES, records))
    text = (app / "site.toml").read_text().replace("[data]", "[data]\nimages = true")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "site.toml").write_text(text)
    Ledger.create(folder / "site.ledger", PrivacyBudget(2.0, 1e-6), "my-dataset")
    return folder / "site.toml"


def encoder(input_shape: tuple[int, ...], weights: dict[str, Tensor]) -> nn.Module:
    """A public encoder of the size of a picture network's last layer."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), WIDTH), nn.ReLU())
    module.load_state_dict(weights)
    return module


def features_part(folder: Path) -> str:
    """Write the encoder's weights; returns ``[features]`` for a site in a folder beside them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, math.prod(RECORD), generator=generator)
    path = folder / "encoder.safetensors"
    save_file({"1.weight": weight, "1.bias": torch.zeros(WIDTH)}, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return (
        f'\n[features]\nname = "flower_traffic:encoder"\ninput_shape = {list(RECORD)}\n'
        f'weights = "../encoder.safetensors"\nsha256 = "{digest}"\n'
    )


def run_sites(folder: Path, app: Path, sites: Sequence[Path], config: str) -> Traffic:
    """Run an app once; the first site is behind a recorder.

    Args:
        folder: of logs and Flower's files.
        app: the app's folder.
        sites: the sites' files.
        config: the run's config.

    Raises:
        AssertionError: the run failed; the message has the logs.
    """
    with Deployment(folder) as there:
        there.environment["PYTHONPATH"] += f":{ROOT / 'tests' / 'helpers'}"
        there.superlink()
        recorder, memory = Recorder(there.port), PeakMemory(there.environment["FLWR_HOME"])
        for k, site in enumerate(sites):
            through = recorder.port if k == 0 else None
            there.supernode(f"node-{k}", f'site="{site}"', through=through)
        there.wait_for_nodes(len(sites))
        began = time.monotonic()
        there.run("run", app, config)
        status = there.wait("run", 1200)
        seconds = time.monotonic() - began
        peaks = memory.stop()
        names = ["run", *(f"node-{k}" for k in range(len(sites)))]
        logs = {name: there.log(name) for name in names}
    recorder.close()
    assert status == 0, "\n".join(logs.values())
    stream = recorder.sent
    return Traffic(len(stream), recorder.received, stream, seconds, peaks, logs)


class PeakMemory:
    """Largest resident memory of the processes of a deployment, by program."""

    def __init__(self, flwr_home: str) -> None:
        self._mark = f"FLWR_HOME={flwr_home}".encode()
        self._peaks: dict[str, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        self._end.set()
        self._thread.join()
        return dict(sorted(self._peaks.items()))

    def _watch(self) -> None:
        while not self._end.wait(0.3):
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if self._mark in (process / "environ").read_bytes().split(b"\0"):
                        self._note(process)

    def _note(self, process: Path) -> None:
        words = (process / "cmdline").read_bytes().split(b"\0")
        names = [Path(word.decode(errors="replace")).name for word in words[:2]]
        program = next((name for name in names if name.startswith(("flwr", "flower"))), None)
        for line in (process / "status").read_text().splitlines():
            if program is not None and line.startswith("VmHWM:"):
                peak = int(line.split()[1]) / 1024
                self._peaks[program] = max(peak, self._peaks.get(program, 0.0))
