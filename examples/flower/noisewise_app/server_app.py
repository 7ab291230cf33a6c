"""The server of the federation: it learns the noise of each update and nothing about any record."""

from __future__ import annotations

import logging

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from noisewise.aggregation.methods import Method, make_method
from noisewise.aggregation.permitted import floor_basis
from noisewise.federation.flower import show_log
from noisewise.federation.flower.evaluate import public_evaluation
from noisewise.federation.flower.strategy import NoiseAware
from noisewise.training.models import make_model

show_log()
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    shape = [int(size) for size in str(config["input-shape"]).split(",")]
    model = make_model(str(config["model"]), shape, int(config["classes"]), seed=0)
    check_floor(config, sum(part.numel() for part in model.parameters()))
    strategy = NoiseAware(
        method(config),
        learning_rate=float(config["learning-rate"]),
        folder=str(config["output"]),
        min_clients=int(config["min-clients"]),
        round_seconds=float(config["round-seconds"]),
        evaluate_every=int(config["evaluate-every"]),
    )
    strategy.start(
        grid,
        ArrayRecord(dict(model.named_parameters())),
        num_rounds=int(config["num-rounds"]),
        evaluate_fn=public_evaluation(model, str(config["public-records"])),
    )


def method(config: UserConfig) -> Method:
    """With the steps that NoiseWise needs, behind a guard if the federation has a noise floor."""
    steps = float(config["server-steps"])
    made = make_method(str(config["method"]), {"server_steps": steps} if steps else None)
    floor = float(config["noise-floor"])
    return made.guarded(floor, int(config["tolerated-attackers"])) if floor else made


def check_floor(config: UserConfig, size: int) -> None:
    """Warn of a noise floor that was computed for other settings."""
    basis = floor_basis(str(config["method"]), float(config["learning-rate"]), size)
    given = str(config["noise-floor-for"])
    if float(config["noise-floor"]) and given not in ("", basis):
        logging.getLogger("noisewise").warning(
            "noise-floor was computed for %s, but this run has %s: compute it anew with "
            "`noisewise flower floor`, or clear noise-floor-for if you have done so",
            given,
            basis,
        )
