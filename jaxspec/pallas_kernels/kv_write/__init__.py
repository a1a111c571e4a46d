"""Device. Writing new keys and values into a page pool."""

from jaxspec.pallas_kernels.kv_write.api import kv_write as kv_write
