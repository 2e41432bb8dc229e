"""``TrainingRecipe`` and ``RunConfig``: what a configuration file says beside the model's sizes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dsa_dispatch._run_config.shape import ModelShape, NotNegative, Positive

Fraction = Annotated[float, Field(gt=0, lt=1)]
Magnitude = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TrainingRecipe(BaseModel):
    """How a small language model is trained and sampled. Lengths are in tokens unless they say bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: NotNegative = 0
    steps: Positive
    batch: Positive
    sequence: Positive
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    indexer_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """The indexers follow a teacher that moves with ``learning_rate``; they need to be the faster ones."""
    warmup_steps: NotNegative = 0
    weight_decay: Magnitude = 0.0
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm, held for the language model and for the indexers each by itself."""
    indexer_loss_coeff: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    sparse_loss: bool = True
    """The indexer's teacher over the selected keys only; False is over every key a row may see."""
    vocabulary: Annotated[int, Field(gt=256, strict=True)]
    """Tokens: 256 single bytes and the most frequent pieces of the training text."""
    corpus_bytes: Positive
    """How much of the standard library's source is read where no text is given."""
    held_out_fraction: Fraction = 0.05
    held_out_batches: Positive = 4
    cuda_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the matrix products and of what the kernels get on a CUDA device; on a CPU it is float32."""
    prompt_tokens: Positive = 24
    new_tokens: Positive = 48
    temperature: Magnitude = 0.6
    """0 takes the likeliest token each time."""
    threads: Positive = 1
    """CPU threads. With tensors this small a second one saves a third where the machine is idle, and costs many times
    that where it is not, as the threads wait for each other at every product. Results depend on the number."""

    @model_validator(mode="after")
    def _fits(self) -> TrainingRecipe:
        if self.sequence < 2:
            raise ValueError("sequence must be at least 2, a token and the one to predict")
        if self.prompt_tokens > self.sequence:
            raise ValueError(f"prompt_tokens {self.prompt_tokens} exceed sequence {self.sequence}")
        return self


class RunConfig(BaseModel):
    """A whole configuration file. A model preset has no ``training`` section and describes shapes only.

    ``kernels`` holds fields of ``DSAConfig`` as they were written; ``DSAConfig`` itself judges them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    model: ModelShape
    training: TrainingRecipe | None = None
    kernels: dict[str, object] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _trainable(self) -> RunConfig:
        if self.training is not None and self.training.sequence > self.model.context:
            raise ValueError(
                f"training.sequence {self.training.sequence} exceeds model.context {self.model.context}"
            )
        return self
