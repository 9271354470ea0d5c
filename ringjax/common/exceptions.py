"""Horovod's place for its exceptions; only hands them on."""

from ringjax.errors import HorovodInternalError as HorovodInternalError
from ringjax.errors import HorovodVersionMismatchError as HorovodVersionMismatchError
from ringjax.errors import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from ringjax.horovod.functions import (
    get_version_mismatch_message as get_version_mismatch_message,
)
