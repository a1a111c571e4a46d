"""Host. T17: what `speculative_config` names is found, checked against its files, and started or refused."""

import pytest

from jaxspec import ConfigError, Engine, SamplingParams
from jaxspec.config.methods import METHODS
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.engine.drafts import find_draft
from jaxspec.weights.checkpoint import open_checkpoint
from tests.lossless.engines import make_engine
from tests.oracle.folders import TINY


@pytest.fixture(scope="module")
def target():
    with open_checkpoint(TINY / "llama") as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("name", ["eagle3", "medusa", "my.draft", "plain"])
def test_a_whole_model_is_a_draft_model_whatever_its_folder_is_called(target, tmp_path, name):
    (tmp_path / name).symlink_to(TINY / "llama")
    found = find_draft(SpeculativeConfig(model=str(tmp_path / name), num_speculative_tokens=2), target)
    assert (found.method, found.path, found.num_tokens) == ("draft_model", tmp_path / name, None)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle3-speculators", "medusa", "mlp-speculator", "dflash"])
def test_a_head_is_not_a_draft_model_whatever_its_folder_is_called(target, tmp_path, name):
    (tmp_path / "draft_model").symlink_to(TINY / name)
    with pytest.raises(ConfigError, match=r"'draft_model' was asked for, but .* holds a .* drafter"):
        find_draft(
            SpeculativeConfig(method="draft_model", model=str(tmp_path / "draft_model"), num_speculative_tokens=2),
            target,
        )


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.is_built])
def test_a_method_that_is_not_built_is_refused_by_name(method):
    with pytest.raises(ConfigError, match=f"{method.replace('+', '.')}' is not supported yet"):
        Engine(str(TINY / "llama"), speculative_config={"method": method, "model": "m", "num_speculative_tokens": 3})


STARTS = {"ngram": {}, "suffix": {}, "draft_model": {"model": "drafter"}, "ngram+draft_model": {"model": "drafter"}}


def test_every_method_without_a_head_starts_an_engine(spoken, drafter):
    """Heads have targets of their own, in their own tests; custom proposers in test_custom.py."""
    built = {name for name, method in METHODS.items() if method.is_built and method.needs in ("context", "model")}
    assert set(STARTS) == built - {"ngram+model"}  # which its files tell to be one of these
    params = SamplingParams(temperature=0, max_tokens=6)
    said = set()
    for method, more in STARTS.items():
        given = {"method": method, "num_speculative_tokens": 2} | more
        if more.get("model") == "drafter":
            given["model"] = str(drafter)
        engine = make_engine(spoken, given, max_num_seqs=1)
        assert engine.config.speculative_config.method == method
        (output,) = engine.generate("hello hello", params, use_tqdm=False)
        said.add(tuple(output.outputs[0].token_ids))
    assert len(said) == 1


def test_no_draft_at_all():
    assert find_draft(None, None) == (None, None, None)
    with pytest.raises(ConfigError, match="'draft_model' needs 'model'"):
        SpeculativeConfig(method="draft_model", num_speculative_tokens=3)
