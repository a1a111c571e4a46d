"""Device. Attention of a few queries a row over that row's pages."""

from jaxspec.pallas_kernels.paged_attention.api import paged_attention as paged_attention
