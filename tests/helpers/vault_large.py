"""Memory of a vault with 11 million parameters: ``python vault_large.py FOLDER`` prints JSON.

The vault runs in this process and the relay in another one. ``start`` is the peak while the model,
the engine and the records are loaded, ``round`` the peak of later rounds, both in bytes above the
process before the site is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from site_cases import SITE

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger
from noisewise.site.loaded_site import keep_loaded
from noisewise.site.site_file import load_site
from noisewise.site.vault import Door, Vault
from noisewise.site.vault_config import VaultPart
from noisewise.site.vault_socket import Listener
from noisewise.training.parameters import ParameterLayout

RELAY = """
import json, sys
import numpy as np
from pathlib import Path
from noisewise.flower.relay import VaultAnswers
from noisewise.site.requests import Instruction
shapes = json.loads(Path(sys.argv[2]).read_text())
for number in (1, 2):
    asked = Instruction(number, 0.1, {k: np.zeros(s, np.float32) for k, s in shapes.items()})
    update = VaultAnswers(Path(sys.argv[1])).update(lambda: asked, number)
    assert update is not None and sum(one.size for one in update.values()) > 11e6
"""


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(field)))


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((4, 3, 32, 32)).astype(np.float32)
    np.savez(folder / "records.npz", inputs=inputs, targets=np.arange(4))
    text = SITE.format(
        number=0, records=4, epsilon=8.0, rounds=5, batch=2, epochs=1, normalise="false"
    )
    text = text.replace('"softmax"', '"resnet18"').replace("[1, 8, 8]", "[3, 32, 32]")
    (folder / "site.toml").write_text(text)
    Ledger.create(folder / "site.ledger", PrivacyBudget(8.0, 1e-3), "digits-0")
    before = status("VmRSS")
    site = keep_loaded(load_site(folder / "site.toml"))
    layout = ParameterLayout.of(site.model)
    started = status("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    door = Door("ward", Listener(folder / "s", os.getgid(), 0o600), os.getuid())
    one = {"name": "ward", "socket": "/s", "account": "x"}
    part = VaultPart.model_validate({"federations": [one], "frame_seconds": 60.0})
    shapes = dict(zip(layout.names, map(list, layout.shapes), strict=True))
    (folder / "shapes.json").write_text(json.dumps(shapes))
    stop = threading.Event()

    def relay() -> None:
        words = [sys.executable, "-c", RELAY, str(folder / "s"), str(folder / "shapes.json")]
        codes.append(subprocess.run(words, check=False).returncode)
        stop.set()

    codes: list[int] = []
    thread = threading.Thread(target=relay)
    thread.start()
    Vault(site, part, [door]).run(stop)
    thread.join()
    assert codes == [0]
    figures = {"start": started - before, "round": status("VmHWM") - before, "p": layout.size}
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
