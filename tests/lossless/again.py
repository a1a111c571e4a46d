"""Host. The same requests once more, with all the ways in which an answer may begin or be interrupted."""

import itertools

from jaxspec.engine.engine import Engine
from jaxspec.engine.outputs import RequestOutput


def ask_again(engine: Engine, requests, outputs: list[RequestOutput], is_certain: list[bool]) -> None:
    """Ask what was answered before: answers and acceptance are the same when the cache holds what a prompt begins with,
    and when sequences lose their rows and pages between rounds, so that the drafter's state is right both times.

    Args:
        requests: (token ids, params) pairs that this engine answered.
        is_certain: whose answers no tie may change.
    """
    prompts, params = [{"prompt_token_ids": ids} for ids, _ in requests], [one for _, one in requests]
    # The last first: of what was answered longest ago the pages have been taken by others.
    again = engine.generate(prompts[::-1], params[::-1], use_tqdm=False)[::-1]
    _compare(again, outputs, is_certain)
    cached = [output.num_cached_tokens for output in again]
    size = engine.config.block_size
    if engine.core.scheduler.limits.lookahead is not None:
        ahead = max(1, engine.core.scheduler.limits.lookahead)
        # Whole pages, but for what is left to prefill.
        most = [max(0, len(ids) - 1 - ahead) // size * size for ids, _ in requests]
        assert all(one <= limit for one, limit in zip(cached, most, strict=True))
        assert sum(cached) > 4 * size

    core, scheduler = engine.core, engine.core.scheduler
    running = [core.add_request(f"again-{index}", *one) for index, one in enumerate(zip(prompts, params, strict=True))]
    num_preempted = 0
    for step in itertools.count():
        core.step()
        scheduler.audit()
        if not core.has_work:
            break
        if step % 3 == 2 and scheduler.decoding:
            scheduler.preempt(scheduler.decoding[step % len(scheduler.decoding)])
            num_preempted += 1
        if step % 20 == 19:
            scheduler.preempt_all()
    assert num_preempted > 1  # a right drafter of many tokens leaves few steps
    _compare([request.output() for request in running], outputs, is_certain)
    assert scheduler.num_used == 0


def _compare(again, outputs, is_certain) -> None:
    for one, other, certain in zip(again, outputs, is_certain, strict=True):
        if certain:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            figures, wanted = one.metrics.speculative_decoding, other.metrics.speculative_decoding
            assert figures["acceptance_histogram"] == wanted["acceptance_histogram"]
