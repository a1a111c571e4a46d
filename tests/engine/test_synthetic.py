"""Device. Acceptance made to order, through the whole engine: rounds keep what their rates say, whatever the text."""

import pytest

from jaxspec import SamplingParams
from tests.lossless.engines import draft_model, make_engine
from tests.oracle.folders import write_llama

K = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a drafter that agree on nothing."""
    root = tmp_path_factory.mktemp("synthetic")
    return write_llama(root / "target", seed=1), write_llama(root / "drafter", seed=2)


@pytest.mark.heavy
def test_rounds_keep_drafts_at_the_rates_given(folders):
    target, drafter = folders
    more = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
    engine = make_engine(target, draft_model(K, drafter, **more))
    params = [SamplingParams(temperature=t, max_tokens=12, ignore_eos=True) for t in (0.0, 1.0)]
    requests = [engine.core.add_request(str(i), {"prompt_token_ids": [3, 4, 5]}, one) for i, one in enumerate(params)]
    while engine.core.has_work:
        engine.core.step()
    # Three tokens a round: two drafts and what the target says after them.
    assert [request.sequences[0].stats.histogram for request in requests] == [[0, 0, 4, 0]] * 2
