"""Seconds a round with the vault and without it, and the memory of a vault, in one run.

    python benchmarks/vault.py

Starts a SuperLink and 3 SuperNodes on this machine, for the template's model and for the paper's
CNN, three times each: the client reads the site's file itself; the client is a relay to a vault;
the client is empty (it returns zeros and imports neither torch nor noisewise). "Pure training" is
the local DP-SGD of one round in 3 processes at once, without Flower, socket or ledger. Seconds a
round are those from the end of the first round to the end of the last. Needs noisewise[flower].
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import table, write_json

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
sys.path.insert(0, str(HELPERS))

SITES, ROUNDS = 3, 5
GRID = 0.5
CASES = {
    "softmax": {"shape": (1, 8, 8), "records": 360, "batch": 64, "epochs": 4},
    "cnn": {"shape": (1, 28, 28), "records": 2400, "batch": 64, "epochs": 1},
}
EMPTY = '''
"""A client that does nothing."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    rng = np.random.default_rng()
    shapes = {name: array.shape for name, array in message.content["arrays"].items()}
    arrays = {k: Array(rng.standard_normal(s).astype(np.float32)) for k, s in shapes.items()}
    return Message(RecordDict({"delta": ArrayRecord(arrays)}), reply_to=message)
'''


def make_site(folder: Path, model: str, number: int) -> Path:
    """A site with made-up records."""
    from site_cases import SITE

    from noisewise.privacy.budget import PrivacyBudget
    from noisewise.privacy.ledger import Ledger

    case, rng = CASES[model], np.random.default_rng(number)
    count, shape = int(str(case["records"])), case["shape"]
    folder.mkdir(parents=True)
    inputs = rng.standard_normal((count, *shape)).astype(np.float32)  # type: ignore[misc]
    np.savez(folder / "records.npz", inputs=inputs, targets=rng.integers(0, 10, count))
    text = SITE.format(
        number=number, records=count, epsilon=8.0, rounds=100, batch=case["batch"],
        epochs=case["epochs"], normalise="false",
    ).replace('"softmax"', f'"{model}"').replace("[1, 8, 8]", str(list(shape)))  # type: ignore[call-overload]  # fmt: skip
    (folder / "site.toml").write_text(text)
    Ledger.create(folder / "site.ledger", PrivacyBudget(8.0, 1e-3), f"digits-{number}")
    return folder / "site.toml"


def serve(file: Path, socket: Path) -> None:
    """A vault for this account, without the checks of `noisewise site serve`."""
    from noisewise.site.loaded_site import keep_loaded
    from noisewise.site.site_file import load_site
    from noisewise.site.vault import Door, Vault
    from noisewise.site.vault_config import VaultPart
    from noisewise.site.vault_socket import Listener

    one = {"name": "bench", "socket": str(socket), "account": "bench"}
    part = VaultPart.model_validate({"federations": [one], "reply_grid_seconds": GRID})
    site = keep_loaded(load_site(file))
    door = Door("bench", Listener(socket, os.getgid(), 0o600), os.getuid())
    Vault(site, part, [door]).run(threading.Event())


def pure(file: Path) -> None:
    """Seconds of the local training of one round, after a line on stdin."""
    from noisewise.randomness import SecureRandom
    from noisewise.site.loaded_site import keep_loaded
    from noisewise.site.site_file import load_site
    from noisewise.training.local import local_update
    from noisewise.training.parameters import ParameterLayout

    site = keep_loaded(load_site(file))
    theta = ParameterLayout.of(site.model).flatten(site.model)
    print("ready", flush=True)
    sys.stdin.readline()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        local_update(
            site.model, theta, site.data(), site.plan, 0.1, site.loss, SecureRandom(),
            physical_batch=site.config.training.physical_batch, engine=site.engine(),
        )  # fmt: skip
        taken.append(time.perf_counter() - began)
    print(float(np.median(taken)))


def start(*words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, *words], text=True, **more)


def pure_seconds(files: list[Path]) -> float:
    """The slowest of all sites, which train at the same time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [start("--pure", str(file), **pipes) for file in files]
    for one in started:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in started:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    return max(float(one.communicate()[0]) for one in started)


def round_seconds(folder: Path, model: str, how: str) -> float:
    """Seconds a round of one federation."""
    from flower_processes import Deployment

    from noisewise.flower.new_app import write_app

    files = [make_site(folder / f"site-{k}", model, k) for k in range(SITES)]
    app, output = folder / "app", folder / "output"
    write_app(app)
    if how == "empty":
        (app / "noisewise_app" / "client_app.py").write_text(EMPTY)
    vaults = []
    with Deployment(folder / "processes") as there:
        try:
            if how == "vault":
                vaults = [start("--serve", str(one), str(one.with_name("s"))) for one in files]
                while not all(one.with_name("s").exists() for one in files):
                    time.sleep(0.2)
            there.superlink()
            for k, one in enumerate(files):
                named = f'vault="{one.with_name("s")}"' if how == "vault" else f'site="{one}"'
                there.supernode(f"node-{k}", named)
            there.wait_for_nodes(SITES)
            shape = ",".join(map(str, CASES[model]["shape"]))  # type: ignore[call-overload]
            there.run("run", app, (
                f'output="{output}" num-rounds={ROUNDS} min-clients={SITES} noise-floor=0.0 '
                f'learning-rate=0.1 model="{model}" input-shape="{shape}"'
            ))  # fmt: skip
            return _watch(output, there.processes["run"], there.log)
        finally:
            for one in vaults:
                one.kill()
                one.wait()


def _watch(output: Path, run: subprocess.Popen[bytes], log: Any) -> float:
    """Mean seconds from the end of the first round to the end of the last."""
    ends: list[float] = []
    while len(ends) < ROUNDS:
        file = output / "rounds.jsonl"
        lines = len(file.read_text().splitlines()) if file.exists() else 0
        ends += [time.monotonic()] * (lines - len(ends))
        assert run.poll() is None or lines == ROUNDS, log("run")
        time.sleep(0.05)
    return (ends[-1] - ends[0]) / (ROUNDS - 1)


def main(models: list[str], output: Path | None) -> None:
    figures: dict[str, dict[str, float]] = {}
    for model in models:
        found: dict[str, float] = {}
        for how in ("in process", "vault", "empty"):
            with tempfile.TemporaryDirectory(prefix="nwb-", dir="/tmp") as folder:
                found[how] = round_seconds(Path(folder), model, how)
        with tempfile.TemporaryDirectory(prefix="nwb-", dir="/tmp") as folder:
            files = [make_site(Path(folder) / f"{k}", model, k) for k in range(SITES)]
            found["pure training"] = pure_seconds(files)
        found["vault / in process"] = found["vault"] / found["in process"]
        allowed = 1.2 * found["pure training"] + found["empty"]
        found["vault / (1.2 training + empty)"] = found["vault"] / allowed
        figures[model] = found
        print(model, {name: round(value, 2) for name, value in found.items()}, flush=True)
    print(table([{"model": model, **found} for model, found in figures.items()]))
    if output is not None:
        write_json(output, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--serve", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
    elif given.pure:
        pure(given.pure)
    else:
        main(given.models, given.output)
