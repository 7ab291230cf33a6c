"""Federated learning where each client has its own privacy budget and nobody trusts the server.

Data flow: population -> plan -> local DP-SGD -> update matrix -> noise estimate -> weights -> new
model -> report. The names in ``__all__`` are the public API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from noisewise.lazy_imports import lazy_names

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
    from noisewise.experiments import (
        Comparison,
        ExperimentConfig,
        MethodConfig,
        compare,
        load_config,
        run,
    )
    from noisewise.experiments.attack_study import study_attacks
    from noisewise.experiments.feature_records import map_dataset
    from noisewise.experiments.prepare import prepare
    from noisewise.federation import (
        Attack,
        Client,
        Execution,
        Prepared,
        RunResult,
        TrainingSettings,
        load_result,
        make_clients,
        simulate,
    )
    from noisewise.federation.trained_model import load_model
    from noisewise.noise import NoiseEstimate, convergence_bound, make_estimator
    from noisewise.privacy import Ledger, LocalPlan, PrivacyBudget, epsilon_spent, make_plan
    from noisewise.report import write_comparison
    from noisewise.report.model_card import model_card
    from noisewise.training import local_update, make_model
    from noisewise.training.engine.layer_rules import register_layer_rule
    from noisewise.training.engine.model_explanation import explain_model
    from noisewise.training.features import make_features as features
    from noisewise.training.gradient_norms import gradient_norms

_HOMES = {
    "Attack": "federation",
    "Client": "federation",
    "ClientSpec": "data",
    "Comparison": "experiments",
    "Execution": "federation",
    "ExperimentConfig": "experiments",
    "Guard": "aggregation",
    "InvalidValueError": "errors",
    "Ledger": "privacy",
    "LocalPlan": "privacy",
    "Method": "aggregation",
    "MethodConfig": "experiments",
    "NoiseEstimate": "noise",
    "NoiseWise": "aggregation",
    "NoisewiseError": "errors",
    "Prepared": "federation",
    "PrivacyBudget": "privacy",
    "RunResult": "federation",
    "TrainingSettings": "federation",
    "authors_population": "data",
    "compare": "experiments",
    "convergence_bound": "noise",
    "epsilon_spent": "privacy",
    "explain_model": "training.engine.model_explanation",
    "features": "training.features:make_features",
    "gradient_norms": "training.gradient_norms",
    "load_config": "experiments",
    "load_dataset": "data",
    "load_model": "federation.trained_model",
    "load_result": "federation",
    "local_update": "training",
    "make_clients": "federation",
    "make_estimator": "noise",
    "make_method": "aggregation",
    "make_model": "training",
    "make_plan": "privacy",
    "make_specs": "data",
    "map_dataset": "experiments.feature_records",
    "model_card": "report.model_card",
    "plan_clients": "aggregation",
    "prepare": "experiments.prepare",
    "register_layer_rule": "training.engine.layer_rules",
    "run": "experiments",
    "simulate": "federation",
    "split_dataset": "data",
    "study_attacks": "experiments.attack_study",
    "write_comparison": "report",
}

__all__ = [
    "Attack",
    "Client",
    "ClientSpec",
    "Comparison",
    "Execution",
    "ExperimentConfig",
    "Guard",
    "InvalidValueError",
    "Ledger",
    "LocalPlan",
    "Method",
    "MethodConfig",
    "NoiseEstimate",
    "NoiseWise",
    "NoisewiseError",
    "Prepared",
    "PrivacyBudget",
    "RunResult",
    "TrainingSettings",
    "__version__",
    "authors_population",
    "compare",
    "convergence_bound",
    "epsilon_spent",
    "explain_model",
    "features",
    "gradient_norms",
    "load_config",
    "load_dataset",
    "load_model",
    "load_result",
    "local_update",
    "make_clients",
    "make_estimator",
    "make_method",
    "make_model",
    "make_plan",
    "make_specs",
    "map_dataset",
    "model_card",
    "plan_clients",
    "prepare",
    "register_layer_rule",
    "run",
    "simulate",
    "split_dataset",
    "study_attacks",
    "write_comparison",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
