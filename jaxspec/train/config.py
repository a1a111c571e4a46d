"""Host. What a training run is: `TrainConfig`, and what each method says of its drafter."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxspec.config.base import StrictConfig
from jaxspec.errors import ConfigError


class Eagle3Head(StrictConfig):
    """An EAGLE-3 head, and how far it is unrolled in training."""

    TITLE: ClassVar[str] = "eagle3 head"

    intermediate_size: int | None = Field(None, ge=1, description="width of its MLP; the target's")
    aux_streams: tuple[int, ...] | None = Field(
        None, min_length=1, strict=False, description="the target's streams it reads; 2, n/2 and n-3 of n layers"
    )
    draft_vocab_size: int | None = Field(
        None, ge=2, description="tokens it can draft, the commonest of the corpus; all of the target's"
    )
    num_steps: int = Field(5, ge=1, description="guesses a chain in training; about as many as will be drafted")
    step_decay: float = Field(0.8, gt=0.0, le=1.0, description="a guess counts this share of the one before")
    rope_theta: float = Field(10000.0, gt=0.0, description="base of its rotation; published heads have 10000")
    num_kv_heads: int | None = Field(
        None, ge=1, description="key heads, which the next token is seen through; the target's"
    )
    fc_norm: bool = Field(False, description="norm each stream (EAGLE-3.1)")
    start: str = Field(
        "fit",
        description="fit: vocabulary head as the target's, the layer fitted to its states by least squares; random; or "
        "the folder of a drafter of this shape, whose tokens are then drafted",
    )
    train_head: bool = Field(True, description="train the vocabulary head too")
    layout: Literal["eagle", "speculators"] = Field("eagle", description="whose files the export looks like")

    @model_validator(mode="after")
    def _starts_somewhere(self) -> "Eagle3Head":
        if self.start not in ("fit", "random") and not Path(self.start).is_dir():
            raise ConfigError(f"head: start must be fit, random or the folder of a drafter, got {self.start!r}")
        return self


class EagleHead(StrictConfig):
    """An EAGLE head, and how far it is unrolled in training."""

    TITLE: ClassVar[str] = "eagle head"

    num_layers: int = Field(1, ge=1, description="layers over embedding and state")
    intermediate_size: int | None = Field(None, ge=1, description="width of their MLPs; the target's")
    num_steps: int = Field(3, ge=1, description="guesses a chain in training; about as many as will be drafted")
    step_decay: float = Field(0.8, gt=0.0, le=1.0, description="a guess counts this share of the one before")
    token_weight: float = Field(0.1, gt=0.0, description="of the tokens' loss beside the states'")
    rope_theta: float = Field(10000.0, gt=0.0, description="base of its rotation; published heads have 10000")


class DflashHead(StrictConfig):
    """A DFlash head: a block of masks filled in one pass."""

    TITLE: ClassVar[str] = "dflash head"

    num_layers: int = Field(2, ge=1, description="layers over the block")
    intermediate_size: int | None = Field(None, ge=1, description="width of their MLPs; the target's")
    aux_streams: tuple[int, ...] | None = Field(
        None, min_length=1, strict=False, description="the target's streams it reads; 2, n/2 and n-3 of n layers"
    )
    draft_vocab_size: int | None = Field(
        None, ge=2, description="tokens it can draft, with a head of its own; all of the target's, with the target's"
    )
    block_size: int = Field(8, ge=2, description="the known token and the masks, one fewer drafts")
    mask_token_id: int | None = Field(None, ge=0, description="stands for a mask; the vocabulary's last")
    anchor_stride: int = Field(4, ge=1, description="a block begins at every so many tokens, from a drawn one on")
    place_decay: float = Field(0.8, gt=0.0, le=1.0, description="a place counts this share of the one before")
    rope_theta: float = Field(1e6, gt=0.0, description="base of its rotation")


class DraftModelHead(StrictConfig):
    """A smaller Llama of the target's width, made of some of its layers."""

    TITLE: ClassVar[str] = "draft_model head"

    num_layers: int = Field(4, ge=1, description="layers; the target's first and last and those evenly between")


class MedusaHead(StrictConfig):
    """Medusa's heads, over the target's own vocabulary head."""

    TITLE: ClassVar[str] = "medusa head"

    num_heads: int = Field(4, ge=1, description="heads; head i guesses the token i + 2 places after its state")
    num_blocks: int = Field(1, ge=1, description="residual blocks a head")
    loss_vocab_size: int | None = Field(
        None, ge=2, description="loss over the corpus's commonest tokens alone, which is cheaper; over all of them"
    )
    head_decay: float = Field(0.8, gt=0.0, le=1.0, description="a head counts this share of the one before")


class MlpSpeculatorHead(StrictConfig):
    """An MLP speculator: no attention, a state that a token carries on."""

    TITLE: ClassVar[str] = "mlp_speculator head"

    num_steps: int = Field(3, ge=1, description="tokens it guesses, each with weights of its own unless tied")
    inner_size: int | None = Field(None, ge=1, description="width of its state; the target's")
    tie_weights: bool = Field(False, description="one set of weights for all steps, but for the first projection")
    scale_input: bool = Field(False, description="norm the target's state and halve its square")
    step_decay: float = Field(0.8, gt=0.0, le=1.0, description="a guess counts this share of the one before")


HEADS: dict[str, type[StrictConfig]] = {
    "eagle3": Eagle3Head,
    "eagle": EagleHead,
    "dflash": DflashHead,
    "draft_model": DraftModelHead,
    "medusa": MedusaHead,
    "mlp_speculator": MlpSpeculatorHead,
}
Method = Literal["eagle3", "eagle", "dflash", "draft_model", "medusa", "mlp_speculator"]


class TrainConfig(StrictConfig):
    """What `python -m jaxspec.train --config FILE` trains."""

    TITLE: ClassVar[str] = "train config"

    method: Method = Field(description="the drafter: eagle3, eagle, dflash, draft_model, medusa or mlp_speculator")
    model: str = Field(description="the frozen target: alias, hub name, folder or .gguf file")
    data: str = Field(description="folder of token shards (jaxspec.train.data)")
    output: str = Field(description="folder of the run: checkpoints, log, plots, the exported drafter")
    seen: str | None = Field(
        None, description="folder for what the target sees of the corpus, which runs may share; output/seen"
    )
    head: dict[str, Any] = Field({}, description="the method's own keys, see docs/training.md")
    num_steps: int = Field(1000, ge=1, description="optimiser steps")
    batch_size: int = Field(8, ge=1, description="conversations a gradient")
    accumulate: int = Field(1, ge=1, description="gradients averaged an optimiser step")
    loss_on: Literal["answers", "all"] = Field(
        "answers", description="all: prompts teach too; the model wrote most of them itself"
    )
    max_length: int = Field(256, ge=8, description="tokens a conversation is cut to")
    learning_rate: float = Field(5e-4, gt=0.0, description="of AdamW, at its peak")
    warmup_steps: int = Field(20, ge=0, description="steps in which the rate rises; a cosine then lowers it to a tenth")
    weight_decay: float = Field(0.0, ge=0.0, description="of AdamW")
    beta2: float = Field(0.95, gt=0.0, lt=1.0, description="of AdamW; beta1 is 0.9")
    clip_norm: float = Field(0.5, gt=0.0, description="largest norm of a gradient")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of products; weights are kept in float32")
    seed: int = Field(0, ge=0, lt=2**31, description="root of the data's order and of random weights")
    data_parallel: int = Field(1, ge=1, description="devices that share a batch's rows; divides batch_size")
    max_records: int | None = Field(None, ge=2, description="conversations to train on; null: all there are")
    held_out: int = Field(32, ge=1, description="conversations kept back for evaluation, spread over the corpus")
    eval_every: int = Field(100, ge=1, description="steps between evaluations on held-out conversations")
    save_every: int = Field(100, ge=1, description="steps between checkpoints")
    log_every: int = Field(1, ge=1, description="steps between lines of the log")
    engine_eval_prompts: int = Field(
        8, ge=0, description="held-out prompts that the engine answers with the finished drafter; 0: none"
    )

    @model_validator(mode="after")
    def _fits(self) -> "TrainConfig":
        if self.batch_size % self.data_parallel:
            raise ConfigError(
                f"batch_size={self.batch_size} must be a multiple of data_parallel={self.data_parallel}; change either"
            )
        head = self.head_config()
        if self.weight_decay and not getattr(head, "train_head", True):
            raise ConfigError(
                f"weight_decay={self.weight_decay} would shrink the head that train_head: false leaves alone; set it "
                "to 0, or train the head"
            )
        return self

    def head_config(self) -> Any:
        """`head`, checked: the method's own config."""
        return HEADS[self.method](**self.head)
