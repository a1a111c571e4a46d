"""Host. `Engine`: prompts in, answers out, in the caller's own thread."""

import atexit
import functools
import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from tqdm import tqdm

from jaxspec.config.engine import EngineConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.engine.build import build
from jaxspec.engine.core import EngineCore
from jaxspec.engine.journal import open_journal
from jaxspec.engine.outputs import RequestOutput
from jaxspec.engine.request import Prompt, Request
from jaxspec.engine.trace import RoundTrace, TracingPrograms, trace_request
from jaxspec.errors import ConfigError, RequestError
from jaxspec.proposers.base import HostProposer, Proposer
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import LogitsProcessor
from jaxspec.text.tokenizer import Tokenizer


class Engine:
    """A model with its drafter, compiled and ready.

    >>> engine = Engine("smollm2-135m-instruct", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    ... # doctest: +SKIP
    >>> engine.generate("Once upon a time", SamplingParams(max_tokens=32))[0].outputs[0].text  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        proposer: Proposer | HostProposer | None = None,
        logits_processors: SequenceOf[LogitsProcessor] = (),
        use_tqdm: bool = True,
        **config: Any,
    ):
        """Load and compile; ready when it returns.

        Args:
            model: alias, hub name, folder or .gguf file of the target.
            speculative_config: vLLM's keys (see `jaxspec.config.speculative.SpeculativeConfig`); None decodes plainly.
            proposer: your own drafter, with method "custom".
            logits_processors: your own edits of the target's logits, compiled into every round, in this order.
            use_tqdm: draw a bar while compiling.
            config: any other field of `jaxspec.config.engine.EngineConfig`.

        Raises:
            ConfigError, WeightsError, CapacityError.
        """
        settings = EngineConfig(model=model, speculative_config=speculative_config, **config)  # type: ignore[arg-type]
        processors = tuple(logits_processors)
        parts = build(settings, custom_proposer=proposer, logits_processors=processors, show_progress=use_tqdm)
        has_own_code = proposer is not None or bool(processors)
        journal = None
        if not parts.is_follower:
            journal = open_journal(settings, parts, has_own_code=has_own_code, startup_probe_tokens=0)
        if parts.hosts is not None:
            atexit.register(parts.hosts.end)
        self._core = EngineCore(parts, journal)
        self._ids = itertools.count()

    @property
    def config(self) -> ResolvedConfig:
        return self._core.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._core.parts.tokenizer

    @property
    def core(self) -> EngineCore:
        """The loop underneath, for benchmarks and tests."""
        return self._core

    @property
    def compiles_after_ready(self) -> int:
        return self._core.compiles_after_ready

    @property
    def is_follower(self) -> bool:
        """Whether process 0 of the job, another one, takes the requests; here `follow` is to be called."""
        return self._core.parts.is_follower

    def follow(self) -> None:
        """In every process of a job but 0: run what process 0 runs, until that one ends or calls `shutdown`.

        When a process of the job fails, goes or stalls, this one says so and ends with status 1.
        """
        if not self.is_follower:
            raise ConfigError("only processes other than 0 of a job follow; ask this one with `generate`")
        self._core.parts.follow()

    def shutdown(self) -> None:
        """In process 0 of a job: let the others end. At the process's end this happens by itself."""
        if self._core.parts.hosts is not None:
            self._core.parts.hosts.end()

    def get_metrics(self) -> dict[str, Any]:
        """Every counter and gauge by its Prometheus name."""
        self._core.metrics.set_compiles_after_ready(self.compiles_after_ready)
        return self._core.metrics.snapshot()

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | SequenceOf[int] = 0,
    ) -> list[RequestOutput]:
        """Answer prompts, batched as they fit.

        Args:
            prompts: one or many; a prompt is a string or {"prompt_token_ids": [...]}, in which "cache_salt" may say
                with whom it shares what the cache holds of it: with requests of the same salt.
            sampling_params: one for all, or one a prompt.
            use_tqdm: draw a bar with input and output tokens a second.
            priority: one for all, or one a prompt; lower ones run first, where scheduling_policy is "priority".

        Returns:
            One finished output a prompt, in the prompts' order.

        Raises:
            RequestError, CapacityError: a prompt cannot be served; then none of them was started.
            Exception: whatever a request's own logits processor raised; the other requests are aborted.
        """
        prompts, params = _paired(prompts, sampling_params)
        priorities = [priority] * len(prompts) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(prompts):
            raise RequestError(
                f"priority must be one for all or one a prompt; got {len(priorities)} for {len(prompts)} prompts",
                param="priority",
            )
        requests: list[Request] = []
        try:
            for prompt, one, own in zip(prompts, params, priorities, strict=True):
                requests.append(self._core.add_request(self._next_id(), prompt, one, own))
            self._run(requests, use_tqdm)
        except BaseException:
            for request in requests:
                self._core.abort(request.request_id)
            raise
        return [request.output() for request in requests]

    def chat(
        self,
        messages: SequenceOf[Any],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer conversations. messages: one conversation (a list of {"role", "content"}) or a list of them."""
        if self.tokenizer is None:
            raise RequestError(
                "chat needs a tokenizer with a chat template, which this model has not", param="messages"
            )
        tokenizer = self.tokenizer
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        texts = [
            tokenizer.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, **template_kwargs)
            for turns in conversations
        ]
        # A template writes its own special tokens.
        prompts = [
            {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one prompt, yielding after every round that added tokens; closing the iterator aborts the request."""
        request = self._core.add_request(self._next_id(), prompt, sampling_params or SamplingParams())
        try:
            is_open = True
            while is_open:
                if not request.is_finished:  # whoever else steps this engine may have brought it to its end
                    self._core.step()
                if request.error is not None:
                    raise request.error
                is_open = not request.is_finished
                if not is_open or any(sequence.token_ids_delta for sequence in request.sequences):
                    yield request.output()
        finally:
            self._core.abort(request.request_id)

    def trace(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[RoundTrace]:
        """Answer one prompt alone and keep every round: drafts, the target's and the drafter's distributions, the
        verdict. For research: it compiles programs of its own on first use and copies logits to the host."""
        self._core.parts.check_one_host("traces")
        return trace_request(self._core, self._tracing, prompt, sampling_params or SamplingParams())

    @functools.cached_property
    def _tracing(self) -> TracingPrograms:
        return TracingPrograms(self._core.parts)

    def _run(self, requests: SequenceOf[Request], use_tqdm: bool) -> None:
        num_prompt = sum(len(request.prompt_token_ids) for request in requests)
        with tqdm(total=len(requests), desc="requests", disable=not use_tqdm, dynamic_ncols=True) as bar:
            running = set(requests)
            while running:
                self._core.step()
                done = {request for request in running if request.is_finished}
                for request in done:
                    if request.error is not None:
                        raise request.error
                running -= done
                bar.update(len(done))
                if done:
                    num_output = sum(len(s.progress.token_ids) for request in requests for s in request.sequences)
                    seconds = max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{num_prompt / seconds:.1f} in, {num_output / seconds:.1f} out tokens/s")

    def _next_id(self) -> str:
        return f"request-{next(self._ids)}"


def _paired(
    prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
) -> tuple[list[Prompt], list[SamplingParams]]:
    listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return listed, [params or SamplingParams()] * len(listed)
    params = list(params)
    if len(params) != len(listed):
        raise RequestError(
            f"sampling_params must be one for all prompts or one a prompt; got {len(params)} for {len(listed)} prompts",
            param="sampling_params",
        )
    return listed, params
