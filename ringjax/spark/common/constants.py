"""Horovod's names for the format of a column in a file; no format changes here."""

ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
BYTES_PER_GIB = 1 << 30
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
