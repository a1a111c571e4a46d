"""Host. The one table of speculative_config's keys, vLLM's and a few of ours: honoured, accepted with a note, or
refused with a reason."""

import logging
from typing import Any, Literal, NamedTuple

from jaxspec.config.methods import METHODS, PARALLEL, drafter_of, looks_up
from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)

_WITH_MODEL = tuple(name for name, method in METHODS.items() if method.needs != "context")
_WITH_DRAFT = tuple(name for name, method in METHODS.items() if method.needs in ("model", "head"))
_LOOKS_UP = tuple(name for name in METHODS if looks_up(name))
_IN_TARGET = tuple(name for name, method in METHODS.items() if method.needs == "target")

_FILLS_MASKS = tuple(name for name in METHODS if name in PARALLEL.values())
_READS_STREAMS = tuple(name for name in METHODS if drafter_of(name) in ("eagle3", "p_eagle", "dflash", "dspark"))


class Key(NamedTuple):
    """status: what becomes of a value that asks for something. neutral: the value that does not, vLLM's default.

    note: why it is refused, or what it comes to here. methods: who reads an honoured key, where not all do; vLLM takes
    it from any, so from others it is accepted with a note.
    """

    status: Literal["honoured", "noted", "refused"]
    neutral: Any = None
    note: str = ""
    methods: tuple[str, ...] = tuple(METHODS)


KEYS: dict[str, Key] = {
    "method": Key("honoured"),
    "model": Key("honoured", methods=(*_WITH_MODEL, "ngram")),  # ngram and self refuse it
    "num_speculative_tokens": Key("honoured"),
    "num_speculative_tokens_per_batch_size": Key("honoured"),
    "prompt_lookup_max": Key("honoured", methods=_LOOKS_UP),
    "prompt_lookup_min": Key("honoured", methods=_LOOKS_UP),
    "prompt_lookup_match": Key("honoured", "earliest", methods=_LOOKS_UP),  # ours
    "eagle_aux_hidden_state_layer_ids": Key("honoured", methods=_READS_STREAMS),  # ours
    "mask_token_id": Key("honoured", methods=_FILLS_MASKS),  # ours
    "exit_layer": Key("honoured", methods=tuple(name for name in METHODS if drafter_of(name) == "self")),  # ours
    "suffix_decoding_max_tree_depth": Key("honoured", 24, methods=("suffix",)),
    "suffix_decoding_max_cached_requests": Key("honoured", 10000, methods=("suffix",)),
    "suffix_decoding_max_spec_factor": Key("honoured", 1.0, methods=("suffix",)),
    "suffix_decoding_min_token_prob": Key("honoured", 0.1, methods=("suffix",)),
    "draft_sample_method": Key("honoured", "greedy", methods=_WITH_MODEL),
    "rejection_sample_method": Key("honoured", "standard"),
    "synthetic_acceptance_rates": Key("honoured"),
    "synthetic_acceptance_length": Key("honoured"),
    "synthetic_acceptance_rate": Key("honoured"),
    "max_model_len": Key("honoured", methods=(*_WITH_DRAFT, *_IN_TARGET)),
    "draft_tensor_parallel_size": Key("honoured", methods=_WITH_DRAFT),
    "use_heterogeneous_vocab": Key("honoured", False),
    "parallel_drafting": Key("honoured", False),
    "enforce_eager": Key("noted", None, "every program is compiled before the engine is ready; there is no eager mode"),
    "moe_backend": Key(
        "noted", None, "it names a kernel of vLLM's; the engine's implementation goes for the draft too"
    ),
    "attention_backend": Key("noted", None, "it names a kernel of vLLM's; the engine's goes for the draft too"),
    "disable_padded_drafter_batch": Key("noted", False, "rows are padded to a fixed size always; drafts are the same"),
    "disable_eagle_block_drop": Key("noted", False, "no block is dropped"),
    "use_local_argmax_reduction": Key(
        "noted", False, "it is about speed alone, and always so where the vocabulary is split"
    ),
    "quantization": Key("refused", None, "a draft is read as its files say"),
    "kv_cache_dtype": Key("refused", None, "a draft's pages have the target's dtype"),
    "draft_load_config": Key("refused", None, "a draft is read from whatever format its folder holds"),
    "revision": Key("refused", None, "no revision of a hub repository can be chosen yet; download it, give the folder"),
    "code_revision": Key("refused", None, "no code from a model's repository is ever run"),
    "index_share_for_mtp_iteration": Key("refused", None, "sparse-attention indices are not built"),
    "enable_adaptive_verification": Key("refused", False, "dspark's confidence head is not read yet"),
    "dspark_draft_topk": Key("refused", None, "dspark drafts one token a position"),
}


def apply_keys(data: dict[str, Any], method: str | None) -> dict[str, Any]:
    """The honoured keys of `data`, and the unknown ones, which are refused elsewhere; notes are logged.

    Args:
        method: None where it is not known yet.

    Raises: ConfigError for a refused key that asks for something.
    """
    kept = {}
    for name, value in data.items():
        key = KEYS.get(name)
        asks = key is not None and value is not None and (value != key.neutral or type(value) is not type(key.neutral))
        if key is None or key.status == "honoured":
            kept[name] = value
            if asks and key is not None and method is not None and method not in key.methods:
                logger.warning("speculative_config key %r says nothing to method %r", name, method)
        elif asks and key.status == "refused":
            raise ConfigError(f"speculative_config key {name!r} is refused, got {value!r}: {key.note}; leave it out")
        elif asks and value != "auto":
            logger.warning("speculative_config key %r is accepted and changes nothing: %s", name, key.note)
    return kept
