"""Device. Whole runs over a tiny target: resumed or split over devices they are the run that was not; what they export
loads here, says what it said in training, and changes no answer."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.config.load import read_yaml
from jaxspec.errors import ConfigError
from jaxspec.train import TrainConfig, train
from jaxspec.train.__main__ import main
from jaxspec.train.data import DataConfig
from jaxspec.train.report import read_log
from jaxspec.weights.checkpoint import open_tensors
from tests.train.conftest import HEADS

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "train"


def params_of(folder):
    with open_tensors(folder) as reader:
        return {name: np.array(reader.read(name)) for name in reader.tensors}


def run(recipe, method="eagle3", **changes):
    stop_after = changes.pop("stop_after", None)
    config = TrainConfig(**(recipe | {"method": method, "head": HEADS[method]} | changes))
    return train(config, show_progress=False, stop_after=stop_after)


@pytest.fixture(scope="session")
def whole(target_folder, corpus_folder, tmp_path_factory):
    """(recipe, report) of a run that nothing interrupted."""
    recipe = {
        "model": str(target_folder), "data": str(corpus_folder),
        "output": str(tmp_path_factory.mktemp("whole") / "run"),
        "num_steps": 4, "batch_size": 4, "max_length": 16, "warmup_steps": 1, "learning_rate": 0.01, "held_out": 4,
        "eval_every": 2, "save_every": 2, "engine_eval_prompts": 0,
    }  # fmt: skip
    return recipe, run(recipe)


def test_a_run_that_was_interrupted_is_the_run_that_was_not(whole, tmp_path):
    recipe, report = whole
    other = recipe | {"output": str(tmp_path / "run")}
    assert run(other, stop_after=2)["step"] == 2
    assert not (tmp_path / "run" / "drafter").exists()
    resumed = run(other)
    assert resumed == report
    wanted, found = (params_of(f"{folder['output']}/drafter") for folder in (recipe, other))
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert tensor.tobytes() == found[name].tobytes(), name
    lines = [[{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_log(Path(r["output"]))]
             for r in (recipe, other)]  # fmt: skip
    assert lines[1] == lines[0]


@pytest.mark.heavy
def test_two_devices_do_what_one_does(whole, tmp_path):
    recipe, report = whole
    assert jax.device_count() >= 2
    split = run(recipe | {"output": str(tmp_path / "run")}, data_parallel=2)
    assert split["held_out"]["kept"] == report["held_out"]["kept"]
    wanted, found = (params_of(f"{folder}/drafter") for folder in (recipe["output"], tmp_path / "run"))
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)


def test_a_run_writes_its_recipe_log_plots_and_report(whole):
    recipe, report = whole
    folder = Path(recipe["output"])
    lines = read_log(folder)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert all(len(line["kept"]) == 3 for line in lines if "loss" in line)
    assert json.loads((folder / "report.json").read_text()) == report
    assert report["step"] == 4
    for name in ("loss.png", "acceptance.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_another_recipe_does_not_go_on_with_this_run(whole):
    recipe, _ = whole
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.01, is 0\.02"):
        run(recipe, learning_rate=0.02)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"head": {"num_step": 3}}, "did you mean 'num_steps'"),
        ({"lr": 1.0}, "unknown train config key 'lr'"),
        ({"batch_size": 3, "data_parallel": 2}, "multiple"),
        ({"method": "eagle9"}, "method"),
        ({"head": {"aux_streams": [1, 2, 3]}}, "begin with 1"),
        ({"head": {"start": "fitt"}}, "fit, random or the folder"),
        ({"head": {"train_head": False}, "weight_decay": 0.1}, "would shrink"),
    ],
)
def test_what_cannot_be_is_refused(recipe, keys, says):
    with pytest.raises(ConfigError, match=says):
        run(recipe, **keys) if "method" not in keys else TrainConfig(**(recipe | keys))


def test_the_command_names_its_fault(recipe, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe | {"method": "medusa", "head": {"heads": 3}}))
    assert main(["--config", str(path)]) == 1
    assert "unknown medusa head key 'heads'" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_sound(path):
    kind = DataConfig if path.stem.endswith("-data") else TrainConfig
    assert kind(**read_yaml(path)).model == "smollm2-135m-instruct"
