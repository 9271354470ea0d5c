"""Horovod's module path of its exceptions; it only imports them."""

from ringjax.errors import HorovodInternalError as HorovodInternalError
from ringjax.errors import HorovodVersionMismatchError as HorovodVersionMismatchError
from ringjax.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from ringjax.horovod.functions import (
    get_version_mismatch_message as get_version_mismatch_message,
)
