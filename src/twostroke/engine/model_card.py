"""Facts about an engine's model, which servers and commands read."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.core.sampling import SamplingDefaults

if TYPE_CHECKING:
    from twostroke.engine.chat.conversation import Chat
    from twostroke.model.program.cost import CostModel
    from twostroke.model.tokenizer import Tokenizer


class ModelCard(Frozen):
    """Facts about an engine's model, which servers and commands read.

    Attributes:
        format: the number formats of the weights.
        context_length: tokens that a prompt and its answer may have together.
        file_bytes: the size of the model's files.
        created_s: the time of loading, in seconds since 1970.
        chat_template: the chat template; None without one.
        cost: gives the work of a step.
        pooling: the pooling of embeddings that the model's files name, if any.
        container: the type of the files, "gguf" or "safetensors".
        identity: the `weights_identity` of the files.
        sampling: default values of the sampling fields.
        parses_special: whether the text of a special token in a raw prompt becomes that token by
            default. In chat messages it never does.
    """

    name: str
    architecture: str
    format: str
    context_length: int
    file_bytes: int
    created_s: int
    licence: str | None
    tokenizer: Tokenizer
    chat_template: Chat | None
    cost: CostModel
    pooling: str | None = None
    container: str = "gguf"
    identity: str = ""
    sampling: SamplingDefaults = SamplingDefaults()
    parses_special: bool = True

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template that can be compiled."""
        return self.chat_template is not None and self.chat_template.refusal is None

    @property
    def num_parameters(self) -> int:
        """The number of values in all weights of the model."""
        return sum(map(prod, self.cost.program.weight_shapes.values()))

    @property
    def embedding_width(self) -> int:
        """The number of values in one of the model's embedding vectors."""
        program = self.cost.program
        return program.value_widths[program.last_states]
