"""Writes the small files of tests/data/torch with PyTorch itself (the `parity` extra), for the reader that has none.

Values are whole numbers counted from 0, so that tests know them without PyTorch.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, … in row-major order."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def main(folder: Path) -> None:
    """Write every file."""
    folder.mkdir(parents=True, exist_ok=True)
    base = counted(4, 6)
    dtypes = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
    newer = ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    torch.save(OrderedDict((name, counted(2, 3, dtype=getattr(torch, name))) for name in dtypes), folder / "dtypes.pt")
    torch.save({name: counted(2, 3, dtype=getattr(torch, name)) for name in newer}, folder / "newer_dtypes.pt")
    views = {
        "whole": base,
        "transposed": base.T,
        "column": base[:, 2],
        "block": base[1:3, 2:5],
        "every_other": base.reshape(-1)[1::2],
        "scalar": base[1, 1],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(counted(3)),
    }
    torch.save(views, folder / "views.pt")
    torch.save(views, folder / "protocol4.pt", pickle_protocol=4)
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "module.pt")
    torch.save({"whole": base}, folder / "before_1_6.pt", _use_new_zipfile_serialization=False)
    torch.save({"model": {"whole": base}, "epoch": 3}, folder / "training.pt")
    torch.save(torch.nn.Linear(3, 2), folder / "whole_module.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(3, 2)), folder / "torchscript.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
