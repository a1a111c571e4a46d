"""Host. Grammars: what an answer's text may be, as masks of the ids allowed next; the parsing is llguidance's."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import llguidance
import numpy as np
import tokenizers

from jaxspec.errors import RequestError
from jaxspec.sampling.edit_table import MASK_BITS, mask_words, pack_mask
from jaxspec.sampling.grammar_source import grammar_source, refusal
from jaxspec.sampling.structured_outputs import StructuredOutputsParams
from jaxspec.text.tokenizer import Tokenizer

MAX_GRAMMARS = 64  # compiled ones that are kept, those used last

# What one grammar may cost: about 20 ms to build its lexer, 15 ms a mask.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Stands for all ids that end an answer, so that a grammar needs to know neither which they are nor how many.
_END = "<|jaxspec: end of grammar|>"


class GrammarCompiler:
    """Compiles one engine's grammars and keeps some. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        """vocab_size: the model's, which may be larger than the tokenizer's; the ids between are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size, self._eos_token_ids = vocab_size, tuple(eos_token_ids)
        # Made when first needed, since it takes up to a second; an error is kept too.
        self._vocabulary: _Vocabulary | ValueError | None = None
        self._kept: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._making, self._keeping = threading.Lock(), threading.Lock()

    def compile(self, spec: StructuredOutputsParams) -> "Grammar":
        """The grammar of a request.

        Raises:
            RequestError: there is no such grammar; llguidance's own words say why.
        """
        with self._keeping:
            grammar = self._kept.get(spec)
            if grammar is not None:
                self._kept.move_to_end(spec)
                return grammar
        # Outside the lock: who needs another grammar does not wait for this one.
        grammar = Grammar(self._get_vocabulary(spec.param), spec, self._begins_after(spec))
        with self._keeping:
            self._kept[spec] = grammar
            while len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _get_vocabulary(self, param: str) -> "_Vocabulary":
        with self._making:
            if self._vocabulary is None:
                try:
                    self._vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                except ValueError as error:
                    self._vocabulary = error
        if isinstance(self._vocabulary, ValueError):
            raise RequestError(
                f"{param}: grammars cannot work with this model's kind of tokenizer ({self._vocabulary!s:.200}); "
                f"leave {param} out",
                param=param,
            )
        return self._vocabulary

    def _begins_after(self, spec: StructuredOutputsParams) -> int | None:
        if spec.reasoning_end_str is None:
            return None
        token_id = self._tokenizer.backend.token_to_id(spec.reasoning_end_str)
        if token_id is None or token_id in self._eos_token_ids:
            raise RequestError(
                f"{spec.param}: reasoning_end_str {spec.reasoning_end_str!r:.80} must be one token of this model's "
                "vocabulary that does not end the answer; give the text of that token",
                param=spec.param,
            )
        return token_id


class _Vocabulary:
    """The tokenizer as llguidance reads it, with an id of its own for the end of a grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        """Raises: ValueError for a tokenizer that llguidance cannot read."""
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        backend.add_special_tokens([tokenizers.AddedToken(_END, special=True, normalized=False)])
        end_id = backend.token_to_id(_END)
        assert end_id is not None
        assert tokenizer.id_to_token(end_id) is None
        num_ids = max(vocab_size, backend.get_vocab_size(with_added_tokens=True), end_id + 1)
        self.tokens = llguidance.LLTokenizer(backend.to_str(), n_vocab=num_ids, eos_token=end_id)
        self.vocab_size, self.end_id = vocab_size, end_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self.eos_U = pack_mask(sorted(self.eos_token_ids), vocab_size)
        # The model's ids but for those that end an answer, which a grammar might take for text.
        self.text_U = pack_mask([v for v in range(vocab_size) if v not in {end_id, *eos_token_ids}], vocab_size)


class Grammar:
    """A compiled grammar. `start` gives an answer its own state of it."""

    def __init__(self, vocabulary: _Vocabulary, spec: StructuredOutputsParams, begins_after: int | None):
        """begins_after: the token of an answer after which the grammar holds; None: from the first on.

        Raises:
            RequestError: it cannot be compiled, or no token can begin it.
        """
        self.vocabulary, self.param, self.begins_after = vocabulary, spec.param, begins_after
        source = grammar_source(spec)
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            source, vocabulary.tokens, limits=_LIMITS
        )
        # A warning is of something that would be left out.
        if is_error or messages:
            raise refusal(spec, f"cannot be compiled: {'; '.join(messages)}")
        self._first = llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=_LIMITS)
        self._check_beginning(spec)

    def start(self, *, ignore_eos: bool = False) -> "GrammarState":
        """The state of an answer without a token."""
        return GrammarState(self, ignore_eos=ignore_eos)

    def _check_beginning(self, spec: StructuredOutputsParams) -> None:
        matcher = self.first_matcher()
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self.vocabulary.text_U)]
        ids = np.flatnonzero(_bits(words & self.vocabulary.text_U))
        if matcher.is_error() or len(ids) == 0:
            raise refusal(spec, f"allows no token at its beginning {_first_line(matcher)}")
        if matcher.try_consume_tokens([int(ids[0])]) != 1:
            raise refusal(spec, f"cannot be followed beyond its beginning {_first_line(matcher)}")

    def first_matcher(self) -> llguidance.LLMatcher:
        return self._first.deep_copy()


class GrammarState:
    """Where one answer stands in its grammar. Only `commit` moves it.

    Where nothing can follow, `has_ended` is true, and the answer ends there, whatever ignore_eos and min_tokens say.
    Where the text may end or go on, the ids that end an answer are among those allowed, unless ignore_eos asks for it
    to go on.
    """

    def __init__(self, grammar: Grammar, *, ignore_eos: bool = False):
        self._grammar, self._ignore_eos = grammar, ignore_eos
        self._matcher = grammar.first_matcher()
        self._has_begun = grammar.begins_after is None
        self._committed: list[int] = []  # since it began

    @property
    def has_ended(self) -> bool:
        """Whether what is committed is complete and nothing can be added."""
        return self._has_begun and self._matcher.is_stopped() and not self._matcher.is_error()

    def commit(self, token_id: int) -> None:
        """Move on by a token of the answer.

        Raises:
            RequestError: the grammar does not allow it, which is so where other parameters left nothing that it does.
        """
        if not self._has_begun:
            self._has_begun = token_id == self._grammar.begins_after
            return
        if not self._consume(token_id):
            if self._matcher.is_error():
                raise self._failure()
            raise RequestError(
                f"{self._where()}: the grammar, this model's vocabulary and the request's other parameters "
                "(allowed_token_ids, bad_words, min_tokens, logit_bias, logits processors) together left no token to "
                "emit; allow more",
                param=self._grammar.param,
            )
        self._committed.append(token_id)

    def fill_masks(self, draft_ids: Sequence[int], mask_JU: np.ndarray) -> None:
        """Write the ids allowed after the first j drafts into row j.

        Rows after a draft that is not allowed stay as they are, since that draft is rejected; rows after the grammar's
        end do too, since the answer is cut there.

        Args:
            draft_ids: up to K.
            mask_JU: u32, all bits set.

        Raises:
            RequestError: nothing can follow what is committed, or finding out takes too long.
        """
        has_begun, num_consumed = self._has_begun, 0
        for j in range(len(draft_ids) + 1):
            if has_begun:
                if self._matcher.is_stopped():
                    break
                allowed_U = self.allowed()
                if allowed_U is None:
                    if num_consumed == 0:
                        raise self._failure()
                    break
                mask_JU[j] = allowed_U
            if j == len(draft_ids):
                break
            if not has_begun:
                has_begun = draft_ids[j] == self._grammar.begins_after
            elif _has_bit(mask_JU[j], draft_ids[j]) and self._consume(draft_ids[j]):
                num_consumed += 1
            else:
                break
        self._go_back(num_consumed)

    def allowed(self) -> np.ndarray | None:
        """u32[U], the ids allowed next; None: the matcher fails, at a dead end or at one of its limits."""
        vocabulary = self._grammar.vocabulary
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            return None
        allowed_U = words[: mask_words(vocabulary.vocab_size)] & vocabulary.text_U
        if _has_bit(words, vocabulary.end_id) and not (self._ignore_eos and allowed_U.any()):
            allowed_U |= vocabulary.eos_U
        return allowed_U

    def _consume(self, token_id: int) -> bool:
        vocabulary = self._grammar.vocabulary
        if token_id not in vocabulary.eos_token_ids:
            return self._matcher.try_consume_tokens([token_id]) == 1
        return self.has_ended or self._matcher.try_consume_tokens([vocabulary.end_id]) == 1

    def _go_back(self, num_drafts: int) -> None:
        """To what is committed, from so many drafts further on."""
        if not self._matcher.is_error():
            if num_drafts:
                self._matcher.rollback(num_drafts)
            return
        # A failed matcher stays so, and drafts must not cost what is committed.
        self._matcher = self._grammar.first_matcher()
        for token_id in self._committed:
            self._consume(token_id)

    def _where(self) -> str:
        return f"{self._grammar.param}: at token {len(self._committed)} of the constrained text"

    def _failure(self) -> RequestError:
        return RequestError(
            f"{self._where()} the grammar cannot go on {_first_line(self._matcher)}; make it simpler, and let it ask "
            "only for text that this model has tokens for",
            param=self._grammar.param,
        )


def _first_line(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with it, in brackets."""
    return f"({matcher.get_error().strip().partition(chr(10))[0]:.200})"


def _bits(words: np.ndarray) -> np.ndarray:
    """The words' bits, that of id 0 first."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def _has_bit(words: np.ndarray, token_id: int) -> bool:
    """Whether a mask holds the id; what is no id, it does not hold."""
    if not 0 <= token_id < len(words) * MASK_BITS:
        return False
    return bool(words[token_id // MASK_BITS] >> np.uint32(token_id % MASK_BITS) & np.uint32(1))
