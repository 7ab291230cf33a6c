"""The server: it weighs the clients' updates by their noise."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from digits_app.task import Net
from noisewise.aggregation.methods import make_method
from noisewise.flower import NoiseAware

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a global model."""
    lr = float(context.run_config["learning-rate"])
    arrays = ArrayRecord(Net().state_dict())
    method = make_method("RobustHDP")
    if floor := float(context.run_config["noise-floor"]):
        method = method.guarded(floor, tolerated_attackers=1)
    strategy = NoiseAware(
        method,
        learning_rate=lr,
        min_clients=int(context.run_config["min-clients"]),
        folder=str(context.run_config["output"]),
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    print("final parameters:", ", ".join(result.arrays))
