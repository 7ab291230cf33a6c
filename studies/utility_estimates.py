"""Tables of docs/utility_federations.md: how good the weights are with few parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from utility import FEDERATIONS, FEW_PARAMETERS, ORDERS, OWN
from utility_cells import accuracies, all_cells, cell, difference, standard_error, table

METHODS = ("NoiseWise", "RobustHDP", "DPFedAvg")
SIZES = {"fars": (51, 1176), "heart": (4, 84), "vietnam": (194, 36), "spam": (5, 770)}
CLASSES = 10  # of the digits


def few_parameters() -> list[str]:
    """Which share of the best signal-to-noise ratio the weights reach with few parameters."""
    return [
        "The server estimates the noise of an update from its p parameters, with an error of about "
        "sqrt(2 / p). The first two tables show what this costs where only p differs: the 16 "
        "hospitals of the demo, with random projections of the pixels to p / 10 - 1 features, 10 "
        "seeds (`python studies/utility.py few_parameters --seeds 0,1,2,3,4,5,6,7,8,9`). The "
        "signal-to-noise ratio is that of the aggregate in the last round, divided by the best "
        "one.",
        "",
        *_ratios(),
        *_accuracies(),
        *_findings(),
        "In the real federations, clients and their data differ as well. NoiseWise has a lower "
        "ratio than RobustHDP on purpose: where the clients' data differ, it gives up some of it "
        "to reduce the bias towards the clients with the least noise. On spam this is worth "
        "several points of accuracy. Means over seeds and orders:",
        "",
        *_federations(),
    ]


def _parts() -> dict[str, str]:
    """The part of the study for each number of parameters."""
    return {f"{CLASSES * (n + 1):,}": f"few_parameters_{n}" for n in FEW_PARAMETERS}


def _ratios() -> list[str]:
    rows = []
    for parameters, part in _parts().items():
        shares = [_shares((part, OWN, method, "auto")) for method in METHODS]
        means = [f"{np.mean(v):.2f} ± {standard_error(v):.2f}" for v in shares]
        rows.append([parameters, *means])
    return table(["parameters: signal / best", *METHODS], rows)


def _leads(part: str) -> list[float]:
    """Accuracy of NoiseWise minus that of RobustHDP, in points by seed."""
    ours, theirs = (accuracies(part, OWN, method) for method in METHODS[:2])
    return [ours[seed] - theirs[seed] for seed in ours]


def _accuracies() -> list[str]:
    rows = [
        [parameters, *(cell(part, OWN, method) for method in METHODS), difference(_leads(part))]
        for parameters, part in _parts().items()
    ]
    return table(["parameters: accuracy [%]", *METHODS, "NoiseWise minus RobustHDP"], rows)


def _findings() -> list[str]:
    worse = [
        parameters
        for parameters, part in _parts().items()
        if np.mean(_leads(part)) < -2 * standard_error(_leads(part))
    ]
    accuracy = f"lower with {', '.join(worse)} parameters" if worse else "not lower in any row"
    return [
        "With a few hundred parameters or fewer, NoiseWise reaches a smaller share of the ratio "
        "than RobustHDP: it also estimates how much the clients' data differ, and this estimate is "
        f"rough then. Its accuracy is {accuracy} (by more than two paired standard errors).",
        "",
    ]


def _federations() -> list[str]:
    rows = []
    for part, dist in FEDERATIONS.items():
        clients, parameters = SIZES[part]
        shares = [
            [v for order in ORDERS for v in _shares((part, dist + order, method, "auto"))]
            for method in METHODS
        ]
        rows.append([part, str(clients), f"{parameters:,}", *(f"{np.mean(v):.2f}" for v in shares)])
    return table(["federation: signal / best", "clients", "parameters", *METHODS], rows)


def _shares(of: tuple[str, str, str, str]) -> Sequence[float]:
    return [run["signal_share"] for run in all_cells()[of].values()]
