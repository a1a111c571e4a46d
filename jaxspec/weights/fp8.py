"""Host. Float8 checkpoints: their weights multiplied by their scales as they are read, block row by block row."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import ConfigError, WeightsError
from jaxspec.weights.reader import Index, Reader, TensorInfo

logger = logging.getLogger(__name__)

# What follows a weight's name. Both are factors: DeepSeek's "inv" is the inverse of what the weight was divided by.
SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Scales of what flows through a layer, which is not quantised here.
_UNREAD = ("input_scale", "activation_scale", "k_scale", "v_scale", "output_scale")
_FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
DEFAULT_BLOCK = (128, 128)


def is_float8(reader: Reader) -> bool:
    """Whether any tensor is stored in eight-bit floats."""
    return any(info.dtype in _FLOAT8 for info in reader.tensors.values())


def weight_block(quantization_config: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns) that share a scale, where scales come in blocks.

    Raises:
      ConfigError: the config names another way of quantising, or no two positive sizes.
    """
    method = quantization_config.get("quant_method")
    if method not in ("fp8", "compressed-tensors", "modelopt"):
        raise ConfigError(f"checkpoints quantised by {method!r:.50} are not supported; use a full or an fp8 one")
    block = quantization_config.get("weight_block_size")
    if block is None:
        return DEFAULT_BLOCK
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise ConfigError(
            f"weight_block_size must be two whole numbers above 0, got {block!r:.50}; correct config.json"
        )
    return block[0], block[1]


class Float8Reader:
    """A Reader over another one: each float8 weight is given as float32, times its scale, and scales are not listed."""

    def __init__(self, reader: Reader, block: tuple[int, int] = DEFAULT_BLOCK):
        """Pairs every float8 weight with its scale.

        Raises:
          WeightsError: a weight without a scale, or a scale whose shape fits neither blocks nor rows nor the whole.
        """
        self._reader, self._block = reader, block
        self._scales = {name: _scale_of(reader, name) for name, info in reader.tensors.items() if info.dtype in _FLOAT8}
        for name, scale in self._scales.items():
            _spread(reader.tensors[scale].shape, reader.tensors[name].shape, block, f"{scale} (for {name})")
        unread = [name for name in reader.tensors if name.rpartition(".")[2] in _UNREAD]
        if unread:
            logger.info("%d scales of activations stay unread: layers compute in full precision", len(unread))
        unlisted = {*self._scales.values(), *unread}
        self.tensors = {
            name: TensorInfo(info.shape, np.dtype(np.float32), True) if name in self._scales else info
            for name, info in reader.tensors.items()
            if name not in unlisted
        }

    def read(self, name: str, dtype: np.dtype | None = None, index: Index | None = None) -> np.ndarray:
        """One tensor or the part at `index`, cast to `dtype` if given; a float8 weight is a fresh array.

        Raises:
          WeightsError: no such tensor, or the reader is closed.
        """
        if name not in self._scales:
            return self._reader.read(name, dtype, index)
        shape = self.tensors[name].shape
        if index is not None and len(shape) != 2:
            return self.read(name, dtype)[index]  # experts in one stack, with one scale
        values = self._reader.read(name, None, index)
        scale = np.asarray(self._reader.read(self._scales[name], np.dtype(np.float32)))
        rows, columns = _spread(scale.shape, shape, self._block, name)
        out = np.empty(values.shape, np.float32 if dtype is None else dtype)
        if not out.size:
            return out
        width = shape[-1] if shape else 1
        first, _, _ = (slice(None) if index is None else index[0]).indices(math.prod(shape) // width)
        columns_wanted = slice(None) if index is None else index[1]
        scale = scale.reshape(-1, scale.shape[-1] if columns < width else 1)
        columns_read = len(range(width)[columns_wanted])
        rows_in, rows_out = values.reshape(-1, columns_read), out.reshape(-1, columns_read)
        end = first + len(rows_in)
        for block in range(first // rows, -(-end // rows)):
            # A lone scale is the last one for all rows.
            factors = np.repeat(scale[min(block, len(scale) - 1)], columns)[:width][columns_wanted]
            part = slice(max(block * rows - first, 0), (block + 1) * rows - first)
            rows_out[part] = rows_in[part].astype(np.float32) * factors
        return out

    def release(self, name: str) -> None:
        """Lets the tensor's pages leave memory; views of it stay valid."""
        self._reader.release(name)

    def close(self) -> None:
        """Lets go of the files; arrays already read stay valid."""
        self._reader.close()

    def __enter__(self) -> "Float8Reader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _scale_of(reader: Reader, name: str) -> str:
    for suffix in SCALE_SUFFIXES:
        info = reader.tensors.get(name + suffix)
        if info is not None and info.dtype.name in ("float32", "bfloat16", "float16"):
            return name + suffix
    info = reader.tensors[name]
    raise WeightsError(
        f"float8 tensor {name} {list(info.shape)} needs a scale, and there is no float {name}{SCALE_SUFFIXES[0]} or "
        f"{name}{SCALE_SUFFIXES[1]}; fetch the checkpoint again"
    )


def _spread(
    scale_shape: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int], label: str
) -> tuple[int, int]:
    """(rows, columns) that one scale stands for: a block, a row, or everything."""
    size = math.prod(scale_shape)
    if len(shape) == 2:
        num_blocks = tuple(-(-length // width) for length, width in zip(shape, block, strict=True))
        if scale_shape == num_blocks:
            return block
        if scale_shape in ((shape[0],), (shape[0], 1)):
            return 1, shape[1]
    if size == 1:
        return DEFAULT_BLOCK[0], shape[-1] if shape else 1
    raise WeightsError(
        f"scale {label} has shape {list(scale_shape)}; for a weight {list(shape)} it must be one number, one "
        f"a row or one for each block of {list(block)}: fetch the checkpoint again"
    )
