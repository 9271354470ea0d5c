"""Makes the exceptions that Horovod names importable from Horovod's module path."""

from ringjax.errors import HorovodInternalError as HorovodInternalError
from ringjax.errors import HorovodVersionMismatchError as HorovodVersionMismatchError
from ringjax.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from ringjax.horovod.functions import (
    get_version_mismatch_message as get_version_mismatch_message,
)
