"""Host. T17: what `speculative_config` names is found, checked against its files, and started or refused."""

import dataclasses

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


def test_a_method_that_is_not_built_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(METHODS, "medusa", dataclasses.replace(METHODS["medusa"], is_built=False))
    with pytest.raises(ConfigError, match="'medusa' is not supported yet"):
        Engine(str(TINY / "llama"), speculative_config={"method": "medusa", "model": "m", "num_speculative_tokens": 3})


STARTS = {"ngram": {}, "suffix": {}, "draft_model": {"model": "drafter"}, "ngram+draft_model": {"model": "drafter"}}


@pytest.mark.heavy
def test_every_method_without_a_head_starts_an_engine(spoken, drafter):
    """Heads have targets of their own, in their own tests, as models that fill masks; custom proposers in
    test_custom.py."""
    built = {name for name, method in METHODS.items() if method.is_built and method.needs in ("context", "model")}
    # Of the lookup before "model" its files tell which of these it is.
    assert set(STARTS) == built - {"ngram+model", "pard", "ngram+pard"}
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


def test_a_mask_token_is_for_models_that_fill_masks(target):
    """The config's or the user's; a plain model has none, and cannot be asked to fill masks without."""
    given = {"model": str(TINY / "llama"), "num_speculative_tokens": 2}
    found = find_draft(SpeculativeConfig(**given, parallel_drafting=True, mask_token_id=9), target)
    assert (found.method, found.mask_token_id) == ("pard", 9)
    with pytest.raises(ConfigError, match=r"mask token, and its config.json has none of .*pard_token"):
        find_draft(SpeculativeConfig(**given, method="pard"), target)
    with pytest.raises(ConfigError, match="mask_token_id says nothing to method 'draft_model'"):
        find_draft(SpeculativeConfig(**given, mask_token_id=9), target)
    with pytest.raises(ConfigError, match=r"the mask token 4096 must be one of the draft's \d+ tokens"):
        Engine(str(TINY / "llama"), speculative_config=given | {"method": "pard", "mask_token_id": 4096})
    with pytest.raises(ConfigError, match="needs the tensor 'mask_hidden'"):
        Engine(str(TINY / "llama-7layer"), speculative_config={
            "model": str(TINY / "eagle3"), "num_speculative_tokens": 2, "parallel_drafting": True,
        })  # fmt: skip


def test_no_draft_at_all():
    assert find_draft(None, None) == (None, None, None, None)
    with pytest.raises(ConfigError, match="'draft_model' needs 'model'"):
        SpeculativeConfig(method="draft_model", num_speculative_tokens=3)
