"""Federated learning where each client has its own privacy budget and nobody trusts the server.

The flow: population -> plan -> local DP-SGD -> update matrix -> noise estimate -> weights -> new
model -> report. What most people need is importable from here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from noisewise.aggregation import Guard, Method, NoiseWise, make_method, plan_clients
    from noisewise.data import (
        ClientSpec,
        authors_population,
        load_dataset,
        make_specs,
        split_dataset,
    )
    from noisewise.errors import InvalidValueError, NoisewiseError
    from noisewise.experiments import compare, load_config, run
    from noisewise.federation import (
        Attack,
        Client,
        RunResult,
        TrainingSettings,
        load_result,
        make_clients,
        simulate,
    )
    from noisewise.noise import NoiseEstimate, convergence_bound, make_estimator
    from noisewise.privacy import Ledger, LocalPlan, PrivacyBudget, epsilon_spent, make_plan
    from noisewise.report import write_comparison
    from noisewise.training import local_update, make_model

# Names are imported on first use: `import noisewise` and `noisewise --help` do not load torch.
_HOMES = {
    "Attack": "federation",
    "Client": "federation",
    "ClientSpec": "data",
    "Guard": "aggregation",
    "InvalidValueError": "errors",
    "Ledger": "privacy",
    "LocalPlan": "privacy",
    "Method": "aggregation",
    "NoiseEstimate": "noise",
    "NoiseWise": "aggregation",
    "NoisewiseError": "errors",
    "PrivacyBudget": "privacy",
    "RunResult": "federation",
    "TrainingSettings": "federation",
    "authors_population": "data",
    "compare": "experiments",
    "convergence_bound": "noise",
    "epsilon_spent": "privacy",
    "load_config": "experiments",
    "load_dataset": "data",
    "load_result": "federation",
    "local_update": "training",
    "make_clients": "federation",
    "make_estimator": "noise",
    "make_method": "aggregation",
    "make_model": "training",
    "make_plan": "privacy",
    "make_specs": "data",
    "plan_clients": "aggregation",
    "run": "experiments",
    "simulate": "federation",
    "split_dataset": "data",
    "write_comparison": "report",
}

__all__ = [
    "Attack",
    "Client",
    "ClientSpec",
    "Guard",
    "InvalidValueError",
    "Ledger",
    "LocalPlan",
    "Method",
    "NoiseEstimate",
    "NoiseWise",
    "NoisewiseError",
    "PrivacyBudget",
    "RunResult",
    "TrainingSettings",
    "__version__",
    "authors_population",
    "compare",
    "convergence_bound",
    "epsilon_spent",
    "load_config",
    "load_dataset",
    "load_result",
    "local_update",
    "make_clients",
    "make_estimator",
    "make_method",
    "make_model",
    "make_plan",
    "make_specs",
    "plan_clients",
    "run",
    "simulate",
    "split_dataset",
    "write_comparison",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'noisewise' has no attribute {name!r}")
    return getattr(importlib.import_module(f"noisewise.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
