"""Host. PyTorch files written by hand, byte by byte, so that a test can write what PyTorch never would."""

import io
import struct
import zipfile
from pathlib import Path

PROTO, STOP = b"\x80\x02", b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    """LONG1, which holds any."""
    raw = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def run_of(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def integers(values) -> bytes:
    return run_of(*(integer(value) for value in values))


def find(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def storage(key="0", num_values=6, kind="FloatStorage", module="torch") -> bytes:
    identity = run_of(text("storage"), find(module, kind), text(key), text("cpu"), integer(num_values))
    return identity + b"Q"


def tensor(stored=None, offset=0, shape=(2, 3), strides=(3, 1)) -> bytes:
    hooks = find("collections", "OrderedDict") + b")R"
    arguments = run_of(stored or storage(), integer(offset), integers(shape), integers(strides), b"\x89", hooks)
    return find("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def state(**tensors: bytes) -> bytes:
    """The pickle of a dictionary."""
    return PROTO + b"}(" + b"".join(text(name) + value for name, value in tensors.items()) + b"u" + STOP


def pack(pickle: bytes, extra=(), compression=zipfile.ZIP_STORED, root="archive", data=bytes(range(24))) -> bytes:
    """A zip as PyTorch lays it out; `extra` entries replace its own of the same name."""
    entries = {"data.pkl": pickle, "byteorder": b"little", "data/0": data, "version": b"3\n"} | dict(extra)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, value in entries.items():
            archive.writestr(f"{root}/{name}", value)
    return content.getvalue()


def write(folder: Path, content: bytes) -> Path:
    path = folder / "pytorch_model.bin"
    path.write_bytes(content)
    return path
