"""The server of the federation: it learns the noise of each update and nothing about any record."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from noisewise.aggregation.guard import Guard
from noisewise.aggregation.methods import make_method
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
    strategy = NoiseAware(
        make_method(str(config["method"]), options(config)),
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


def options(config: UserConfig) -> dict[str, Any]:
    """Of the method: steps for NoiseWise, and the guard against updates without noise."""
    found: dict[str, Any] = {}
    if float(config["server-steps"]):
        found["server_steps"] = float(config["server-steps"])
    if float(config["noise-floor"]):
        found["guard"] = Guard(float(config["noise-floor"]), int(config["tolerated-attackers"]))
    return found
