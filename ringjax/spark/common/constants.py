"""Horovod's names for a column's format in a file; ringjax changes no format."""

ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
BYTES_PER_GIB = 1 << 30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
