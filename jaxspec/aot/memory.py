"""Host. What fits in the memory of one device, and how many requests of which length."""

from dataclasses import dataclass

from jaxspec.aot.cost import ModelShape
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ITEM_BYTES, LOGITS_AT_ONCE, ResolvedConfig

DEFAULT_SHARE = 0.9  # of an accelerator's memory, as `resolve` plans with


@dataclass(frozen=True)
class Fit:
    """Bytes of one device. tables, temporaries: with max_num_seqs rows; page: of the target's pool and the drafter's.

    is_compiled: whether the temporaries are XLA's figure or an estimate.
    """

    memory_bytes: int
    plan_bytes: int
    target_bytes: int
    draft_bytes: int
    table_bytes: int
    temp_bytes: int
    is_compiled: bool
    page_bytes: int
    block_size: int
    max_num_seqs: int
    wanted_pages: int  # every row at full length, or as the config says

    @property
    def free_bytes(self) -> int:
        """For pages, with all rows; negative where not even the rest fits."""
        return self.plan_bytes - self.target_bytes - self.draft_bytes - self.table_bytes - self.temp_bytes

    @property
    def pages(self) -> int:
        """That fit beside everything else."""
        return max(self.free_bytes // self.page_bytes, 0)

    def fits(self, context: int, rows: int = 1) -> bool:
        """Whether an engine with max_num_seqs rows can hold so many requests of so many tokens."""
        return self.pages >= rows * -(-context // self.block_size)

    def largest_batch(self, context: int) -> int:
        """Rows of so many tokens each, if tables and temporaries grow with the rows."""
        fixed = self.plan_bytes - self.target_bytes - self.draft_bytes
        row = -(-context // self.block_size) * self.page_bytes
        row += -(-(self.table_bytes + self.temp_bytes) // self.max_num_seqs)
        return max(fixed // row, 0)

    def longest_context(self, rows: int) -> int:
        """Tokens a row, of so many rows."""
        fixed = self.plan_bytes - self.target_bytes - self.draft_bytes
        left = fixed - rows * (-(-(self.table_bytes + self.temp_bytes) // self.max_num_seqs))
        return max(left // (rows * self.page_bytes), 0) * self.block_size


def page_bytes(target: ModelShape, draft: ModelShape | None, block_size: int) -> int:
    """Of one page id in all pools of a device."""
    shapes = [target] if draft is None else [target, draft]
    return block_size * sum(len(shape.windows) * shape.entry_bytes for shape in shapes)


def estimated_temp_bytes(model: ModelConfig, resolved: ResolvedConfig, num_devices: int = 1) -> int:
    """Scratch of the largest program, where none was compiled: the copies of the logits that the verdict makes, and
    the activations of one layer in float32."""
    K, rows = resolved.num_speculative_tokens, resolved.max_num_seqs
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    wide = 2 * model.intermediate_size
    copies = 0
    if model.moe is not None:
        copies = model.moe.num_experts_per_token
        wide = copies * 2 * model.moe.intermediate_size + 2 * copies * model.hidden_size * num_devices
    token_bytes = 4 * (4 * model.hidden_size + -(-(heads + wide) // num_devices))
    if model.moe is not None and resolved.platform == "gpu":
        # XLA has no ragged product there, and repeats what goes into one for every expert (docs/log.md).
        token_bytes += copies * model.moe.num_experts * model.hidden_size * ITEM_BYTES[resolved.dtype]
    logits = LOGITS_AT_ONCE[resolved.implementation] * rows * (K + 1) * -(-model.vocab_size // num_devices) * 4
    return max(rows * (K + 1) * token_bytes + logits, resolved.max_num_batched_tokens * token_bytes)
