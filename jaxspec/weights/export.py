"""Host. A GGUF checkpoint as a Hugging Face folder would have it: tensors by those names, and a config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.config.hf import model_config_from_hf
from jaxspec.config.model import ModelConfig, RopeConfig
from jaxspec.errors import WeightsError
from jaxspec.weights.load import shape_of
from jaxspec.weights.names import NameTable, TensorSource, Transform
from jaxspec.weights.reader import Reader, TensorInfo, check_readable

# model_type of a GGUF file's ModelConfig -> the architecture its folder names
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Llama 3.1 and 3.2: GGUF files hold the divisors that these give, config.json the numbers they come from.
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What two descriptions of one model may differ in: names of the form, and how rope scaling is said.
_FORM_FIELDS = {"model_type", "dtype", "rope"}
REMEDY = "convert the model's Hugging Face folder instead, or load the GGUF file as it is"


class RenamedReader:
    """A Reader over another: each tensor under its new name, turned as the original's name table says."""

    def __init__(self, reader: Reader, places: Mapping[str, tuple[str, Transform | None]]):
        """places: new name -> (name in `reader`, what its values go through)."""
        self._reader, self._places = reader, dict(places)
        self.tensors = {}
        for name, (original, transform) in self._places.items():
            info = reader.tensors[original]
            shape = shape_of(TensorSource((original,), (transform,)), [info])
            self.tensors[name] = TensorInfo(shape, info.dtype, info.is_quantized)

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """One tensor, cast to `dtype` if given.

        Raises:
          WeightsError: no such tensor, or the reader is closed.
        """
        check_readable("the renamed checkpoint", True, name, self.tensors)
        original, transform = self._places[name]
        if transform is None:
            return self._reader.read(original, dtype)
        array = np.asarray(transform(self._reader.read(original)))
        return array if dtype is None else array.astype(dtype, copy=False)

    def release(self, name: str) -> None:
        """Lets the tensor's pages leave memory; views of it stay valid."""
        self._reader.release(self._places[name][0])

    def close(self) -> None:
        """Lets go of the files; arrays already read stay valid."""
        self._reader.close()

    def __enter__(self) -> "RenamedReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def renamed(reader: Reader, found: NameTable, wanted: NameTable) -> RenamedReader:
    """The tensors of a GGUF file under their Hugging Face names.

    Args:
      reader: the open file.
      found, wanted: the family's name tables for "gguf" and for "hf".

    Raises:
      WeightsError: the two do not store the model tensor by tensor in the same pieces.
    """
    places: dict[str, tuple[str, Transform | None]] = {}
    for path, source in found.sources.items():
        target = wanted.sources.get(path)
        if target is None or len(target.names) != len(source.names) or any(target.transforms):
            raise WeightsError(f"{path} is stored in other pieces in Hugging Face folders than in GGUF files; {REMEDY}")
        for index, (name, original) in enumerate(zip(target.names, source.names, strict=True)):
            places[name] = (original, source.transform_of(index))
    return RenamedReader(reader, places)


def hf_configs(config: ModelConfig, tensor_names: Mapping[str, TensorInfo]) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json of a model read from a GGUF file, checked by reading them back.

    Raises:
      WeightsError: the model has something that these files have no words for, which is named.
    """
    window = next((window for window in config.sliding_window_layers if window is not None), None)
    model_type = "mistral" if config.model_type == "llama" and window is not None else config.model_type
    if model_type not in _ARCHITECTURES:
        raise WeightsError(f"models of type {model_type!r} cannot be written as a Hugging Face folder yet; {REMEDY}")
    eos = list(config.eos_token_ids)
    values = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": window,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_token_id,
        "torch_dtype": config.dtype,
        **_rope_values(config.rope, config.head_dim),
    }
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": eos or None, "pad_token_id": config.pad_token_id}
    read_back = model_config_from_hf(values, generation, tensor_names)
    lost = sorted(
        name
        for name, value in config.model_dump().items()
        if name not in _FORM_FIELDS and read_back.model_dump()[name] != value
    )
    if lost:
        raise WeightsError(f"config.json of a {model_type} model has no words for its {', '.join(lost)}; {REMEDY}")
    return values, generation


def _rope_values(rope: RopeConfig | None, head_dim: int) -> dict[str, Any]:
    if rope is None:
        raise WeightsError(f"learned positions cannot be written to config.json yet; {REMEDY}")
    scaling: dict[str, Any] | None = None
    if rope.divisors is not None:
        scaling = {"rope_type": "llama3", "factor": _llama3_factor(rope, head_dim), **_LLAMA3}
    elif rope.kind == "linear":
        scaling = {"rope_type": "linear", "factor": rope.factor}
    elif rope.kind != "default":
        raise WeightsError(f"rope scaling {rope.kind!r} cannot be written to config.json yet; {REMEDY}")
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _llama3_factor(rope: RopeConfig, head_dim: int) -> float:
    """The factor whose rule gives the file's divisors. Source: the wavelength rule of Llama 3.1's release."""
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0.0, 1.0)
    for factor in _LLAMA3_FACTORS:
        if np.allclose(np.asarray(rope.divisors), 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return factor
    raise WeightsError(f"the rope divisors are not Llama 3's rule for any factor of {_LLAMA3_FACTORS}; {REMEDY}")
