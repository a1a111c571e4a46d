"""Host. The strict loader: what fills what, and one error that names everything that does not fit."""

import ml_dtypes
import numpy as np
import pytest

from jaxspec.errors import WeightsError
from jaxspec.types import ArraySpec
from jaxspec.weights.load import load
from jaxspec.weights.names import NameTable, TensorSource
from jaxspec.weights.reader import TensorInfo


class MemoryReader:
    """A Reader over a dict that notes which tensors were read."""

    def __init__(self, arrays):
        self.arrays, self.reads = arrays, []

    @property
    def tensors(self):
        return {name: TensorInfo(array.shape, array.dtype) for name, array in self.arrays.items()}

    def read(self, name, dtype=None, index=None):
        self.reads.append(name)
        array = self.arrays[name] if index is None else self.arrays[name][index]
        return array if dtype is None else array.astype(dtype)

    def release(self, name):
        pass

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass


def spec(*shape, dtype=np.float32):
    return ArraySpec(shape=shape, dtype=dtype, axes=("x",) * len(shape))


SPECS = {
    "embed": spec(6, 4),
    "layers": [{"qkv": spec(8, 4), "norm": spec(4)}, {"qkv": spec(8, 4), "norm": spec(4)}],
    "head": spec(6, 4),
}


def sources(layer):
    names = tuple(f"h.{layer}.{part}" for part in "qkv")
    return {
        f"layers.{layer}.qkv": TensorSource(names),
        f"layers.{layer}.norm": TensorSource((f"h.{layer}.n",)),
    }


TABLE = NameTable(
    {"embed": TensorSource(("wte",)), "head": TensorSource(("wte",)), **sources(0), **sources(1)},
    ignored=(r"h\.\d+\.inv_freq",),
)


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    found = {"wte": normal(6, 4), "h.0.inv_freq": normal(2)}
    for layer in range(2):
        found |= {f"h.{layer}.q": normal(4, 4), f"h.{layer}.k": normal(2, 4), f"h.{layer}.v": normal(2, 4)}
        found[f"h.{layer}.n"] = normal(4)
    return found


def test_fills_the_tree_of_the_specs(arrays):
    reader, seen = MemoryReader(arrays), []
    tree = load(reader, SPECS, TABLE, put=lambda parameter: seen.append(parameter.path) or np.array(parameter.read()))
    assert list(tree) == ["embed", "layers", "head"]
    assert seen == ["embed", "layers.0.qkv", "layers.0.norm", "layers.1.qkv", "layers.1.norm", "head"]
    np.testing.assert_array_equal(tree["embed"], arrays["wte"])
    np.testing.assert_array_equal(tree["head"], arrays["wte"])
    for layer, weights in enumerate(tree["layers"]):
        joined = np.concatenate([arrays[f"h.{layer}.{part}"] for part in "qkv"])
        np.testing.assert_array_equal(weights["qkv"], joined)
        np.testing.assert_array_equal(weights["norm"], arrays[f"h.{layer}.n"])
    assert "h.0.inv_freq" not in reader.reads


def test_arrays_are_on_the_device_in_the_dtype_of_their_spec(arrays):
    tree = load(MemoryReader({"w": arrays["wte"]}), {"w": spec(6, 4, dtype=ml_dtypes.bfloat16)},
                NameTable({"w": TensorSource(("w",))}))  # fmt: skip
    assert tree["w"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(tree["w"]), arrays["wte"].astype(ml_dtypes.bfloat16))


def test_transforms_see_full_precision_and_may_change_shapes():
    values = np.arange(6, dtype=np.float32).reshape(2, 3) + np.float32(1e-3)
    table = NameTable({"w": TensorSource(("a", "b"), (lambda array: (array - 1).T, None))})
    arrays = {"a": values, "b": np.ones((1, 2), np.float32)}
    tree = load(
        MemoryReader(arrays), {"w": spec(4, 2, dtype=ml_dtypes.bfloat16)}, table, put=lambda parameter: parameter.read()
    )
    expected = np.concatenate([(values - 1).T, arrays["b"]]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(tree["w"], expected)


def failure(arrays, specs=SPECS, table=TABLE):
    """The message, after checking that no weight was touched before it."""
    reader = MemoryReader(arrays)
    with pytest.raises(WeightsError) as caught:
        load(reader, specs, table, put=lambda parameter: pytest.fail(f"{parameter.path} was loaded"))
    assert reader.reads == []
    return str(caught.value)


def without(arrays, *names):
    return {name: array for name, array in arrays.items() if name not in names}


def test_everything_wrong_is_named_at_once(arrays):
    arrays["h.1.n"] = np.zeros(5, np.float32)
    arrays["h.1.extra"] = np.zeros((2, 3), np.float32)
    message = failure(without(arrays, "h.0.k", "wte"))
    assert "missing: wte (for embed [6, 4]); h.0.k (for layers.0.qkv [8, 4]); wte (for head [6, 4])" in message
    assert "unexpected: h.1.extra [2, 3]" in message
    assert "misshaped: h.1.n [5] float32 cannot fill layers.1.norm [4]" in message


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("h.0.q", np.zeros((4, 5), np.float32), ["h.0.q [4, 5]", "layers.0.qkv [8, 4]"]),
        ("h.0.k", np.zeros((3, 4), np.float32), ["h.0.k [3, 4]", "layers.0.qkv [8, 4]"]),
        ("h.0.v", np.zeros((2,), np.float32), ["h.0.v [2]", "layers.0.qkv"]),
        ("h.0.v", np.zeros((), np.float32), ["h.0.v []", "layers.0.qkv"]),
        ("wte", np.zeros((4, 6), np.float32), ["wte [4, 6]", "embed [6, 4]", "head [6, 4]"]),
        ("wte", np.zeros((6, 4), np.int32), ["wte [6, 4] int32", "embed", "float32"]),
        ("wte", np.zeros((6, 4), np.bool_), ["wte [6, 4] bool", "embed", "float32"]),
        ("h.0.q", np.zeros((4, 4), np.uint8), ["h.0.q [4, 4] uint8", "float32"]),
    ],
)
def test_wrong_shapes_and_kinds(arrays, name, array, words):
    message = failure(arrays | {name: array})
    assert all(word in message for word in words), message
    assert "missing" not in message
    assert "unexpected" not in message


def test_a_transform_that_cannot_take_the_shape_is_a_wrong_shape(arrays):
    table = NameTable({"w": TensorSource(("wte",), (lambda array: array.reshape(5, -1),))})
    message = failure({"wte": arrays["wte"]}, {"w": spec(6, 4)}, table)
    assert "misshaped: wte [6, 4] float32 cannot fill w [6, 4]" in message


def test_ignored_names_are_matched_in_full(arrays):
    assert "unexpected: h.0.inv_freq_scaled [2]" in failure(arrays | {"h.0.inv_freq_scaled": np.zeros(2, np.float32)})


def test_tables_and_specs_that_disagree_are_caught(arrays):
    table = NameTable(without(TABLE.sources, "head") | {"tail": TensorSource(("wte",))}, TABLE.ignored)
    message = failure(arrays, table=table)
    assert "for head [6, 4]" in message
    assert "the source of tail" in message


def test_long_lists_are_cut_with_their_number():
    arrays = {f"t.{index}": np.zeros(1, np.float32) for index in range(100)}
    message = failure(arrays, {"w": spec(1)}, NameTable({"w": TensorSource(("w",))}))
    assert "and 60 more" in message
    assert len(message) < 2000
