"""The models that a server has, by name: each with its engine, and where it is."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.engine.status import Health
from twostroke.server.http.model_names import ModelNames
from twostroke.server.models.grammar_compiler import Compiler
from twostroke.server.models.model_pool import ModelPool
from twostroke.server.models.residency import ModelResidency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.options import ServeOptions

_NEVER_S: Final = 100 * 365 * 86_400.0  # after which a model would leave the memory


class ServedModel:
    """A model: its name, its engine, and what compiles constraints for it."""

    def __init__(
        self,
        name: str,
        engine: ServedEngine,
        compile_timeout_s: float,
        *,
        parses_special: bool = True,
    ) -> None:
        """Serve the model of `engine` as `name`; `parses_special` is for its card."""
        self.name, self.engine = name, engine
        self._parses_special = parses_special
        self.compiler = Compiler(
            engine.compile, compile_timeout_s, self._is_ready, lambda: engine.facts
        )

    @property
    def card(self) -> ModelCard:
        """The model's facts."""
        card = self.engine.card
        return card if self._parses_special else replace(card, parses_special=False)

    def _is_ready(self) -> bool:
        return self.engine.health is not Health.RECOVERING


class ModelRegistry:
    """All models of a server: one under each of its names, or several of a roster."""

    def __init__(self, engine: ServedEngine, options: ServeOptions) -> None:
        """Serve `engine`'s model, or those of a roster; the first is the default."""
        timeout_s = options.limits.compile_timeout_s
        serve = partial(ServedModel, parses_special=options.parses_special)
        self.roster = roster = engine if isinstance(engine, ModelPool) else None
        if roster is not None:
            self._models = {
                name: serve(name, served_engine, timeout_s)
                for name, served_engine in roster.engines.items()
            }
        else:
            names = options.model_names or (engine.card.name,)
            self._models = dict.fromkeys(names, serve(names[0], engine, timeout_s))
        self.names = ModelNames(tuple(self._models), options.any_model)

    def __iter__(self) -> Iterator[tuple[str, ServedModel]]:
        """Yield all names and their models."""
        return iter(self._models.items())

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none."""
        return self._models[self.names.served_names[0]]

    def find(self, asked: str | None) -> tuple[str, ServedModel]:
        """Return the name for the response, and the model.

        Raises:
            ModelNotFoundError: there is no such model.
        """
        return self.names.find(asked), self._models[self.names.served_name(asked)]

    def choose(
        self, asked: str | None, served: ServedRequest, keep_s: float | None
    ) -> tuple[str, ServedModel]:
        """Do as `find`, and note the model in the served request, for `note`."""
        name, model = self.find(asked)
        served.known_model, served.keep_s = model.name, keep_s
        return name, model

    def state(self, name: str) -> str:
        """Return where a model is, in one word."""
        return (self.roster.engines[name].residence if self.roster else ModelResidency.IN).value

    def num_bytes(self, name: str) -> int:
        """Return what a model takes in memory."""
        return (
            self.roster.engines[name].num_bytes
            if self.roster
            else self._models[name].card.file_bytes
        )

    def expires_at(self, name: str) -> float:
        """Return when a model that nobody asks for will be unloaded, in Unix time."""
        left_s = self.roster.engines[name].expires_s if self.roster else _NEVER_S
        return time.time() + min(left_s, _NEVER_S)

    def note(self, served: ServedRequest, *, is_empty: bool) -> None:
        """Do what a request says about its model's stay; one that asks for nothing loads it."""
        if self.roster is None or not served.known_model:
            return
        engine = self.roster.engines[served.known_model]
        if is_empty and served.keep_s != 0:
            engine.want()
        if served.keep_s is not None:
            engine.keep(served.keep_s)
