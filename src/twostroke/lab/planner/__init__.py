"""What a model could do on a device, what it needs and what it costs, from its operations."""

from twostroke.lab.planner.calibration import (
    Calibration,
    calibrate,
    calibrate_from,
    calibrated_threads,
    known_calibration,
)
from twostroke.lab.planner.devices import Device, find_device, known_devices, this_machine
from twostroke.lab.planner.models import PlannedModel, planned_model
from twostroke.lab.planner.plan import Plan, WhatIf, make_plan
from twostroke.lab.planner.planner import MemoryPlan, Row
from twostroke.lab.planner.question import Question, usual_budget, usual_kv_format
from twostroke.lab.planner.reference_calibration import usual
from twostroke.model.program.cost import WEIGHTS

__all__ = [
    "WEIGHTS",
    "Calibration",
    "Device",
    "MemoryPlan",
    "Plan",
    "PlannedModel",
    "Question",
    "Row",
    "WhatIf",
    "calibrate",
    "calibrate_from",
    "calibrated_threads",
    "find_device",
    "known_calibration",
    "known_devices",
    "make_plan",
    "planned_model",
    "this_machine",
    "usual",
    "usual_budget",
    "usual_kv_format",
]
