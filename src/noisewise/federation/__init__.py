"""The round loop, its executors, checkpoints and results."""

from noisewise.federation.attacks import ATTACKS, Attack
from noisewise.federation.clients import Client, make_clients
from noisewise.federation.executors import Execution
from noisewise.federation.prepared import Prepared
from noisewise.federation.results import RunResult, load_result, load_run
from noisewise.federation.round_record import RoundRecord
from noisewise.federation.settings import TrainingSettings
from noisewise.federation.simulation import simulate

__all__ = [
    "ATTACKS",
    "Attack",
    "Client",
    "Execution",
    "Prepared",
    "RoundRecord",
    "RunResult",
    "TrainingSettings",
    "load_result",
    "load_run",
    "make_clients",
    "simulate",
]
