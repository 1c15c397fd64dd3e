"""Plans speed, memory and cost of a model on a device, from the work of its operations."""

from twostroke.lab.planner.calibration import (
    Calibration,
    calibrate,
    calibrate_from_server,
    calibrated_threads,
    load_calibration,
)
from twostroke.lab.planner.devices import Device, find_device, known_devices, this_machine
from twostroke.lab.planner.models import PlannedModel, load_planned_model
from twostroke.lab.planner.plan import Plan, WhatIf, make_plan
from twostroke.lab.planner.planner import MemoryPlan, PlanRow
from twostroke.lab.planner.question import Question, default_kv_format, default_token_budget
from twostroke.lab.planner.reference_calibration import reference_steps
from twostroke.model.program.cost import WEIGHTS

__all__ = [
    "WEIGHTS",
    "Calibration",
    "Device",
    "MemoryPlan",
    "Plan",
    "PlanRow",
    "PlannedModel",
    "Question",
    "WhatIf",
    "calibrate",
    "calibrate_from_server",
    "calibrated_threads",
    "default_kv_format",
    "default_token_budget",
    "find_device",
    "known_devices",
    "load_calibration",
    "load_planned_model",
    "make_plan",
    "reference_steps",
    "this_machine",
]
