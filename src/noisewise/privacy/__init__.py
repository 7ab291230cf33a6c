"""Privacy budgets, accounting, the ledger, and the plan that training and accounting share."""

from noisewise.privacy.accounting import ACCOUNTANTS, DEFAULT_ACCOUNTANT, epsilon_of
from noisewise.privacy.budget import PrivacyBudget, budget_warnings, overall_guarantee
from noisewise.privacy.calibration import Calibration, calibrate
from noisewise.privacy.composition import composed_epsilon
from noisewise.privacy.ledger import Ledger
from noisewise.privacy.plan import LocalPlan, make_plan, non_private_plan
from noisewise.privacy.spending import epsilon_spent

__all__ = [
    "ACCOUNTANTS",
    "DEFAULT_ACCOUNTANT",
    "Calibration",
    "Ledger",
    "LocalPlan",
    "PrivacyBudget",
    "budget_warnings",
    "calibrate",
    "composed_epsilon",
    "epsilon_of",
    "epsilon_spent",
    "make_plan",
    "non_private_plan",
    "overall_guarantee",
]
