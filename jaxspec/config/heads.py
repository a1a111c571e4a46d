"""Host. What a trained draft head is, as data: one description a kind, whatever format its files were in.

A stream is the target's residual stream without a norm: stream i is what enters layer i, stream 0 the embeddings, and
stream n, of a target with n layers, what its final norm reads.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from jaxspec.config.model import ModelConfig


class _Head(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EagleConfig(_Head):
    """EAGLE (1 and 2, which differ by their trees alone) and EAGLE-3: a few decoder layers over the target's states.
    With a mask token it is P-EAGLE: EAGLE-3 with a learned state for the places to fill, all drafts in one pass.

    Of an embedding, a vocabulary head or an id map that the files lack, the target's is meant, and no map.
    """

    kind: Literal["eagle", "eagle3"]
    model: ModelConfig  # the layers; their vocabulary is the one that goes in
    target_hidden_size: int
    draft_vocab_size: int  # what comes out
    aux_streams: tuple[int, ...] = ()  # of the target, concatenated; none: its hidden states after the final norm
    fc_bias: bool = False
    has_embed: bool = False
    has_head: bool = False
    is_head_tied: bool = False  # to the head's own embedding, or the target's in its place
    id_map: Literal["d2t", "token_map"] | None = None  # the tensor that maps draft ids to target ids
    has_first_norm: bool = False  # eagle: layer 0 norms what it attends to, as it does in a few families
    has_final_norm: bool = False  # eagle: the same for a norm behind the last layer, whose output is then fed back
    is_later_norm_hidden_norm: bool = False  # layers from 1 on call their first norm hidden_norm
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over the concatenation
    fc_norm: bool = False  # one norm a stream
    norm_output: bool = False  # what is fed back is normed
    logit_scale: float = 1.0
    mask_token_id: int | None = None


MtpLayout = Literal["nextn", "mtp", "ernie", "mimo"]


class MtpConfig(_Head):
    """Multi-token-prediction modules inside a target's checkpoint: norms, a projection, one layer of its own kind.

    Of several, module k guesses the token k + 2 places after the state that the first one reads.
    """

    kind: Literal["mtp"] = "mtp"
    layout: MtpLayout
    model: ModelConfig  # its layers are those of the modules, one each
    prefix: str  # of the modules' tensors
    first: int = 0  # the number that the first module's tensors bear
    has_embed: bool = False
    has_head: bool = False
    fc_bias: bool = False
    aux_streams: tuple[int, ...] = ()  # none: the hidden states after the final norm

    @property
    def num_modules(self) -> int:
        return self.model.num_layers


class MedusaConfig(_Head):
    """Heads beside the target's: head i guesses the token i + 2 places after the state that all of them read."""

    kind: Literal["medusa"] = "medusa"
    num_heads: int
    num_blocks: int  # residual blocks a head
    hidden_size: int
    draft_vocab_size: int
    has_bias: bool
    own_heads: Literal["each", "one", "none"]  # vocabulary heads in the file; none: the target's
    has_map: bool = False
    logit_scale: float = 1.0
    aux_streams: tuple[int, ...] = ()


class MlpSpeculatorConfig(_Head):
    """A recurrence without attention: state and last token go in, the next token and state come out."""

    kind: Literal["mlp_speculator"] = "mlp_speculator"
    hidden_size: int
    inner_size: int
    num_steps: int
    vocab_size: int
    is_tied: bool = False
    scale_input: bool = False
    aux_streams: tuple[int, ...] = ()


MarkovKind = Literal["vanilla", "gated", "rnn"]


class DflashConfig(_Head):
    """Block diffusion: one pass fills a block of mask tokens, over keys made of the target's streams. A DSpark head is
    one whose drafts also hear of each other: a Markov head adds to each one's logits what the draft before it says.
    """

    kind: Literal["dflash", "dspark"] = "dflash"
    model: ModelConfig  # its vocabulary is the embedding's, which may hold more tokens than the target's
    target_hidden_size: int
    aux_streams: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab_size: int
    is_causal: tuple[bool, ...]  # one a layer, inside the block
    sample_from_anchor: bool = False  # the block's first place, the token that is known, makes the first draft
    value_scale: float = 1.0
    logit_scale: float = 1.0
    has_embed: bool = False
    has_head: bool = False
    has_map: bool = False
    has_mask_embedding: bool = False  # a vector among the tensors that stands for the mask token
    markov: MarkovKind | None = None
    markov_rank: int = 0


HeadConfig = EagleConfig | MtpConfig | MedusaConfig | MlpSpeculatorConfig | DflashConfig
