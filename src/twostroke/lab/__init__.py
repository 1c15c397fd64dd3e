"""The laboratory: plans, simulates, measures, compresses and trains models.

`plan` computes speed, memory and cost of a model on a device; `simulate` serves a workload under
virtual time. `profile` times the operations of a step; `compare` measures divergences from expected
logits. `quantize` writes a model with fewer bits, `distill` trains a smaller model, and
`train_heads` trains heads for speculation; the last two need the extra `[train]`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `twostroke/__init__.py`: `typing` takes long to import

if TYPE_CHECKING:
    from twostroke.lab.compress.distill import distill as distill
    from twostroke.lab.compress.quantize import quantize as quantize
    from twostroke.lab.measure.compare import compare_models as compare
    from twostroke.lab.measure.profile import profile as profile
    from twostroke.lab.planner.plan import make_plan as plan
    from twostroke.lab.simulator.simulation import simulate as simulate
    from twostroke.lab.train.run import train_heads as train_heads

    __all__ = ["compare", "distill", "plan", "profile", "quantize", "simulate", "train_heads"]

# Module and function of each public name. No public name is also a module of this package:
# importing the module would replace the name.
_FUNCTIONS = {
    "plan": ("twostroke.lab.planner.plan", "make_plan"),
    "simulate": ("twostroke.lab.simulator.simulation", "simulate"),
    "profile": ("twostroke.lab.measure.profile", "profile"),
    "compare": ("twostroke.lab.measure.compare", "compare_models"),
    "quantize": ("twostroke.lab.compress.quantize", "quantize"),
    "distill": ("twostroke.lab.compress.distill", "distill"),
    "train_heads": ("twostroke.lab.train.run", "train_heads"),
}
if not TYPE_CHECKING:
    __all__ = list(_FUNCTIONS)


def __getattr__(name: str) -> object:
    """Import a public function of the laboratory when it is first used.

    Its module may need NumPy, PyTorch or a server, which take long to import.
    """
    if name not in _FUNCTIONS:
        raise AttributeError(f"module 'twostroke.lab' has no attribute '{name}'")
    import importlib

    module, function = _FUNCTIONS[name]
    return getattr(importlib.import_module(module), function)


def __dir__() -> list[str]:
    """Return all public names of this package, whether they are imported yet or not."""
    return sorted(__all__)
