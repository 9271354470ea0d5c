"""Makes the functions of process sets importable from Horovod's module path."""

from ringjax.runtime import ProcessSet as ProcessSet
from ringjax.runtime import add_process_set as add_process_set
from ringjax.runtime import global_process_set as global_process_set
from ringjax.runtime import remove_process_set as remove_process_set
