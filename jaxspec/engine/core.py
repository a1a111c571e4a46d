"""Host. The engine's loop body: plan, run, commit. One thread drives it; nothing here waits but for the device."""

import logging
import time
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from jaxspec.engine.build import EngineParts
from jaxspec.engine.commit import Progress
from jaxspec.engine.request import Prompt, Request, Sequence, check_prompt_token_ids
from jaxspec.errors import CapacityError, ConfigError, RequestError
from jaxspec.keys import request_key
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.metrics.prometheus import EngineMetrics
from jaxspec.rejection.rows import parse_output
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.table import table_row
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.step import pack
from jaxspec.step.compiles import compile_count
from jaxspec.step.state import Batch
from jaxspec.text.detokenizer import IncrementalDetokenizer
from jaxspec.types import Drafts

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests in, tokens out, over the compiled programs of `parts`."""

    def __init__(self, parts: EngineParts):
        self.parts = parts
        self.config = parts.config
        self._weights = parts.weights
        self.state: Any = parts.state  # taken: whoever else holds `parts.state` finds it donated
        self._programs = parts.programs
        self._host_proposer = parts.host_proposer
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, tuple[Request, Sequence]] = {}
        self._seeds = np.random.default_rng(self.config.seed)
        self.scheduler = Scheduler(
            max_rows=self.config.max_num_seqs,
            num_pages=self.config.num_pages,
            block_size=self.config.block_size,
            max_chunk_tokens=parts.programs.shapes.chunk_tokens[-1],
        )
        self.metrics = EngineMetrics(self.config.served_model_name, self.config.num_speculative_tokens)
        self.compiles_at_ready = compile_count()

    @property
    def compiles_after_ready(self) -> int:
        """Programs compiled since the engine was built; anything but 0 is a fault worth a report."""
        return compile_count() - self.compiles_at_ready

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """A prompt's text (if it has one) and ids.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        tokenizer = self.parts.tokenizer
        text: str | None = None
        if isinstance(prompt, str):
            if tokenizer is None:
                raise RequestError("this model has no tokenizer; send {'prompt_token_ids': [...]}", param="prompt")
            text, ids = prompt, tokenizer.encode(prompt)
        elif (
            isinstance(prompt, dict) and set(prompt) <= {"prompt_token_ids", "prompt"} and "prompt_token_ids" in prompt
        ):
            text, ids = prompt.get("prompt"), prompt["prompt_token_ids"]
        else:
            raise RequestError(
                f"a prompt is a string or {{'prompt_token_ids': [...]}}, got {prompt!r:.80}", param="prompt"
            )
        if params.stop and tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, which this model has not; use stop_token_ids", param="stop"
            )
        model = self.parts.target.config
        ids = check_prompt_token_ids(ids, vocab_size=model.vocab_size, max_model_len=self.config.max_model_len)
        for token_id in params.stop_token_ids or ():
            if not 0 <= token_id < model.vocab_size:
                raise RequestError(
                    f"stop token id {token_id} is outside the vocabulary [0, {model.vocab_size})",
                    param="stop_token_ids",
                )
        return text, ids

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a request.

        Raises:
            RequestError: it is malformed, or its id is in use.
            CapacityError: it can never fit; nothing of it is queued.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; ids must be unique", param="request_id")
        text, ids = self.check(prompt, params)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        request = Request(request_id, text, ids, params, [])
        for index in range(params.n):
            request.sequences.append(self._new_sequence(request, index, request_key(seed, index)))
        try:
            for sequence in request.sequences:
                self._admission(request, sequence)  # refuses what does not fit the tables, before anything is queued
                self.scheduler.add(sequence.state)
        except (RequestError, CapacityError):
            for sequence in request.sequences:
                self.scheduler.finish(sequence.state)
            raise
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._sequences[sequence.state.sequence_id] = (request, sequence)
        return request

    def abort(self, request_id: str) -> Request | None:
        """End a request where it stands; unknown ids are ignored, since it may just have finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if not sequence.is_finished:
                sequence.progress.finish_reason = "abort"
                self._release(sequence)
                self._observe_on_host(request, sequence)
        self._close_if_finished(request)
        self._report_load()
        return request

    def step(self) -> list[Request]:
        """Run one plan; returns the requests that gained tokens or ended."""
        plan = self.scheduler.plan()
        for state in plan.admitted:
            request, sequence = self._sequences[state.sequence_id]
            self.state = self._programs.admit(self.state, self._admission(request, sequence))
        for chunk in plan.chunks:
            state = chunk.sequence
            packed = pack.pack_chunk(
                state.row, chunk.start, chunk.num_tokens, state.pages, self._programs.shapes.pages_per_row
            )
            self.state = self._programs.prefill(self._weights, self.state, packed)
            if state.num_to_prefill == 0:
                request, sequence = self._sequences[state.sequence_id]
                self.metrics.observe_prompt(state.num_prompt_tokens)
                self._observe_on_host(request, sequence)
        touched: dict[str, Request] = {}
        if plan.decoding:
            self._decode([self._sequences[state.sequence_id] for state in plan.decoding], touched)
        self._report_load()
        return list(touched.values())

    def running_batch(self) -> Batch:
        """The batch that the next step would decode, for benchmarks that run it on their own."""
        return self._pack(self.scheduler.decoding)

    def _decode(self, rows: SequenceOf[tuple[Request, Sequence]], touched: dict[str, Request]) -> None:
        states = [sequence.state for _, sequence in rows]
        batch = self._pack(states)
        if self._host_proposer is not None:
            drafts = self._host_drafts([state.sequence_id for state in states], batch.rows_B.shape[0])
            self.state, output = self._programs.verify_commit(self._weights, self.state, batch, drafts)
            packed_RBX = np.asarray(output.packed_BX)[None]
        else:
            # Prompts that wait, or wait for their next chunk, wait for one round at most.
            num_rounds = self._programs.shapes.max_rounds if self.scheduler.only_decodes else 1
            self.state, output = self._programs.decode_rounds(self._weights, self.state, batch, num_rounds)
            packed_RBX = np.asarray(output.packed_BX)
        now = time.monotonic()
        vocab_size = self.parts.target.config.vocab_size
        for packed_BX in packed_RBX[:, : len(rows)]:
            blocks = parse_output(packed_BX[:, :-2].tolist(), vocab_size)
            for (request, sequence), block, (num_drafted, num_accepted) in zip(
                rows, blocks, packed_BX[:, -2:].tolist(), strict=True
            ):
                # Without a token the round did not run; the device may also run on after a stop string.
                if block and not sequence.is_finished:
                    request.first_token_time = request.first_token_time or now
                    touched[request.request_id] = request
                    self._commit(request, sequence, block, num_drafted, num_accepted)
        # The host proposer is told last: should it raise, every row has its tokens.
        for request, sequence in rows:
            self._observe_on_host(request, sequence)

    def _pack(self, states: SequenceOf[SequenceState]) -> Batch:
        shapes = self._programs.shapes
        return pack.pack_batch(
            [state.row for state in states],
            [state.pages for state in states],
            pack.bucket_of(len(states), shapes.batch_rows),
            shapes.guard_row,
            shapes.pages_per_row,
        )

    def _commit(
        self, request: Request, sequence: Sequence, block: list[int], num_drafted: int, num_accepted: int
    ) -> None:
        cut = sequence.commit(block, num_drafted, num_accepted)
        self.metrics.observe_round(num_drafted, num_accepted, len(cut.token_ids))
        if sequence.is_finished:
            self._release(sequence)
            self._close_if_finished(request)

    def _host_drafts(self, sequence_ids: list[str], bucket_rows: int) -> Drafts:
        """What the host proposer guesses, padded; K = 0, the plain program, when it guesses nothing (unless exact)."""
        assert self._host_proposer is not None
        K = self._programs.shapes.num_host_drafts
        guesses = self._host_proposer.propose(sequence_ids)
        if len(guesses) != len(sequence_ids) or any(len(guess) > K for guess in guesses):
            raise ConfigError(
                f"a host proposer must give one list of at most {K} ids for each of {len(sequence_ids)} requests, got "
                f"{guesses!r:.200}; correct its `propose`"
            )
        if not any(guesses) and not self.config.exact:
            K = 0
        token_ids_BK = np.full((bucket_rows, K), -1, np.int32)
        counts_B = np.zeros(bucket_rows, np.int32)
        for index, guess in enumerate(guesses):
            token_ids_BK[index, : len(guess)] = guess
            counts_B[index] = len(guess)
        return Drafts(token_ids_BK=token_ids_BK, counts_B=counts_B)  # pyright: ignore[reportArgumentType]

    def _observe_on_host(self, request: Request, sequence: Sequence) -> None:
        """Tell the host proposer what is committed, or that it was the last."""
        if self._host_proposer is None:
            return
        if sequence.is_finished:
            self._host_proposer.finish(sequence.state.sequence_id)
        else:
            self._host_proposer.observe(
                sequence.state.sequence_id, request.prompt_token_ids, sequence.progress.token_ids
            )

    def _new_sequence(self, request: Request, index: int, key: np.ndarray) -> Sequence:
        params, tokenizer, num_prompt = request.params, self.parts.tokenizer, len(request.prompt_token_ids)
        room = self.config.max_model_len - num_prompt
        max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        detokenizer = None
        if tokenizer is not None and params.detokenize:
            detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        state = SequenceState(f"{request.request_id}-{index}", num_prompt, num_prompt + max_output)
        progress = Progress(params, frozenset(self.parts.target.config.eos_token_ids), max_output, detokenizer)
        return Sequence(index, state, progress, key, AcceptanceStats(self.config.num_speculative_tokens))

    def _admission(self, request: Request, sequence: Sequence):
        params, state = request.params, sequence.state
        eos_ids = () if params.ignore_eos else self.parts.target.config.eos_token_ids
        return pack.pack_admission(
            row=state.row,
            prompt_token_ids=request.prompt_token_ids,
            max_model_len=self.config.max_model_len,
            min_len=state.num_prompt_tokens + params.min_tokens,
            max_len=state.max_len,
            stop_ids=list(dict.fromkeys((*eos_ids, *(params.stop_token_ids or ())))),
            sampling=table_row(params, sequence.key),
        )

    def _report_load(self) -> None:
        self.metrics.set_load(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            cache_usage=self.scheduler.allocator.num_used / self.scheduler.allocator.num_pages,
        )
        self.metrics.set_compiles_after_ready(self.compiles_after_ready)

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence.state)
        del self._sequences[sequence.state.sequence_id]

    def _close_if_finished(self, request: Request) -> None:
        if not request.is_finished:
            return
        del self._requests[request.request_id]
        request.finished_time = time.monotonic()
        first = request.first_token_time
        for sequence in request.sequences:
            self.metrics.observe_finish(
                sequence.progress.finish_reason or "abort",
                request.finished_time - request.arrival_time,
                None if first is None else first - request.arrival_time,
                len(sequence.progress.token_ids),
            )
