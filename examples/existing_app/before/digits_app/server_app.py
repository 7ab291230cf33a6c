"""The server: it averages the clients' parameters."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train a global model."""
    lr = float(context.run_config["learning-rate"])
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_evaluate=float(context.run_config["fraction-evaluate"]))
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": lr}),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    print("final parameters:", ", ".join(result.arrays))
