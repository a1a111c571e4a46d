"""Host. Many devices as one: the mesh, and which axis of what is split along it."""

from jaxspec.distributed.mesh import make_mesh as make_mesh
from jaxspec.distributed.mesh import mesh_of as mesh_of
from jaxspec.distributed.rules import Layout as Layout
from jaxspec.distributed.rules import Split as Split
