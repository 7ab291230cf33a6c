"""Make one trial site: `make_site.py FOLDER NUMBER SITES` writes records, site file and ledger."""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from noisewise.privacy.budget import PrivacyBudget
from noisewise.privacy.ledger import Ledger


def main(folder: Path, number: int, sites: int) -> None:
    """Write the site's share of the digits, its file and its ledger."""
    digits = load_digits()
    mine = np.arange(len(digits.target)) % sites == number
    inputs = np.asarray(digits.images[mine, None] / 16, np.float32)
    folder.mkdir(parents=True)
    np.savez(folder / "records.npz", inputs=inputs, targets=digits.target[mine])
    text = (Path(__file__).parent / "site.toml").read_text()
    (folder / "site.toml").write_text(text.replace("digits-0", f"digits-{number}"))
    Ledger.create(folder / "site.ledger", PrivacyBudget(8.0, 1e-4), f"digits-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
