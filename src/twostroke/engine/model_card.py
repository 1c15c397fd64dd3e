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
    """Facts about an engine's model. Sizes are in bytes.

    `parses_special` says whether the texts of special tokens in raw prompts become these tokens,
    unless a request says otherwise; those in messages of a chat never do. `pooling` is how its
    files say that embeddings are made, None if they do not say. `container` is the kind of its
    files, "gguf" or "safetensors". `identity` is its `weights_identity`. `sampling` are the values
    of sampling fields that a request leaves out.
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
        """Whether it has a chat template that can be compiled."""
        return self.chat_template is not None and self.chat_template.refusal is None

    @property
    def num_parameters(self) -> int:
        """Values in all weights."""
        return sum(map(prod, self.cost.program.weight_shapes.values()))

    @property
    def embedding_width(self) -> int:
        """Values in an embedding."""
        program = self.cost.program
        return program.value_widths[program.last_states]
