"""The models of a server by name, each with its engine and its grammar compiler."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.engine.resumption import ResumptionLimits
from twostroke.engine.status import Health
from twostroke.server.http.model_names import ModelNames
from twostroke.server.models.grammar_compiler import GrammarCompiler
from twostroke.server.models.model_pool import ModelPool
from twostroke.server.models.residency import ModelResidency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.options import ServeOptions

_MAX_KEEP_S: Final = 100 * 365 * 86_400.0  # the time of a model that is never unloaded


class ServedModel:
    """One model of a server: its name, its engine, and the compiler of its constraints."""

    def __init__(
        self,
        name: str,
        engine: ServedEngine,
        compile_timeout_s: float,
        *,
        parses_special: bool = True,
    ) -> None:
        """Register the model of `engine` under `name`.

        `compile_timeout_s` limits the compilation of a constraint. With `parses_special`, the
        spelling of a special token in a text, such as `<s>`, becomes that token.
        """
        self.name = name
        self.engine = engine
        self._parses_special = parses_special
        self.compiler = GrammarCompiler(
            engine.compile, compile_timeout_s, self._is_ready, lambda: engine.facts
        )

    @property
    def card(self) -> ModelCard:
        """The model's facts, such as its tokenizer and context length."""
        card = self.engine.card
        return card if self._parses_special else replace(card, parses_special=False)

    def _is_ready(self) -> bool:
        return self.engine.health is not Health.RECOVERING


class ModelRegistry:
    """All models of a server: one model with several names, or the models of a pool."""

    def __init__(self, engine: ServedEngine, options: ServeOptions) -> None:
        """Register the model of `engine`, or all models of a pool; the first is the default."""
        timeout_s = options.limits.compile_timeout_s
        limits = ResumptionLimits(options.resume_attempts, options.resume_wait_s)
        serve = partial(ServedModel, parses_special=options.parses_special)
        self.pool = pool = engine if isinstance(engine, ModelPool) else None
        if pool is not None:
            self._models = {
                name: serve(name, served_engine, timeout_s)
                for name, served_engine in pool.engines.items()
            }
        else:
            names = options.model_names or (engine.card.name,)
            self._models = dict.fromkeys(names, serve(names[0], engine, timeout_s))
        for model in self._models.values():
            model.engine.limit_resumption(limits)
        self.names = ModelNames(tuple(self._models), options.any_model)

    def __iter__(self) -> Iterator[tuple[str, ServedModel]]:
        """Yield all served names with their models."""
        return iter(self._models.items())

    @property
    def default(self) -> ServedModel:
        """The model of requests that name no model."""
        return self._models[self.names.served_names[0]]

    def find(self, requested_name: str | None) -> tuple[str, ServedModel]:
        """Find the model that a request names; return the name for its response, and the model.

        `requested_name` is None for the default model.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        return self.names.find(requested_name), self._models[self.names.served_name(requested_name)]

    def choose(
        self, requested_name: str | None, served_request: ServedRequest, keep_s: float | None
    ) -> tuple[str, ServedModel]:
        """Find the model that a request names, and note it in `served_request`.

        Returns the name for the response, and the model. `keep_s` is how many seconds the model
        stays loaded after the request, which `note` applies later; None if the request does not
        say.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        name, model = self.find(requested_name)
        served_request.known_model = model.name
        served_request.keep_s = keep_s
        return name, model

    def state(self, name: str) -> str:
        """Return whether a model is loaded, as the text of a `ModelResidency`."""
        residency = self.pool.engines[name].residency if self.pool else ModelResidency.LOADED
        return residency.value

    def num_bytes(self, name: str) -> int:
        """Return the memory in bytes that a model uses."""
        if self.pool:
            return self.pool.engines[name].num_bytes
        return self._models[name].card.file_bytes

    def expires_at(self, name: str) -> float:
        """Return the Unix time at which a model is unloaded if no request arrives."""
        left_s = self.pool.engines[name].expires_s if self.pool else _MAX_KEEP_S
        return time.time() + min(left_s, _MAX_KEEP_S)

    def note(self, served_request: ServedRequest, *, is_empty: bool) -> None:
        """Set how long a request's model stays loaded, if the request says so.

        An empty request (`is_empty`) also loads the model, as Ollama's clients expect.
        """
        if self.pool is None or not served_request.known_model:
            return
        engine = self.pool.engines[served_request.known_model]
        if is_empty and served_request.keep_s != 0:
            engine.request_load()
        if served_request.keep_s is not None:
            engine.set_keep_s(served_request.keep_s)
