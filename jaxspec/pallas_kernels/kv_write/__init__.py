"""Device. Writing new keys and values into a page pool, as they are or rounded to integers."""

from jaxspec.pallas_kernels.kv_write.api import kv_write as kv_write
from jaxspec.pallas_kernels.kv_write.api import round_entries as round_entries
