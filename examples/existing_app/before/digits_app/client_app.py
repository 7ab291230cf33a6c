"""The client: it trains on its records and sends parameters, counts and losses."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import Net, load_data
from digits_app.task import test as test_fn
from digits_app.task import train as train_fn

app = ClientApp()


def loaders(context: Context):
    """Return this client's records."""
    node = context.node_config
    batch_size = int(context.run_config["batch-size"])
    return load_data(int(node["partition-id"]), int(node["num-partitions"]), batch_size)


@app.train()
def train(msg: Message, context: Context):
    """Train on this client's records."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    records, _ = loaders(context)
    epochs = int(context.run_config["local-epochs"])
    loss = train_fn(model, records, epochs, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(records.dataset)}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Measure the model on this client's records."""
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, records = loaders(context)
    loss, accuracy = test_fn(model, records)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(records.dataset)}
    content = {"metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=msg)
