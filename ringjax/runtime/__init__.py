"""The job as this process sees it: init, ranks, process sets, groups, elastic requests.

Functions for all jobs are in lifecycle.py, functions for elastic jobs in
elastic_requests.py, functions for groups of processes in groups.py.
"""

from __future__ import annotations

from ringjax.runtime.elastic_requests import check_updates as check_updates
from ringjax.runtime.elastic_requests import confirm as confirm
from ringjax.runtime.elastic_requests import elastic as elastic
from ringjax.runtime.elastic_requests import epoch_info as epoch_info
from ringjax.runtime.elastic_requests import has_run_solo as has_run_solo
from ringjax.runtime.elastic_requests import is_newcomer as is_newcomer
from ringjax.runtime.elastic_requests import last_contributors as last_contributors
from ringjax.runtime.elastic_requests import leave_at_next_pause as leave_at_next_pause
from ringjax.runtime.elastic_requests import pause as pause
from ringjax.runtime.elastic_requests import (
    private_communicator as private_communicator,
)
from ringjax.runtime.elastic_requests import request_admission as request_admission
from ringjax.runtime.elastic_requests import restart as restart
from ringjax.runtime.elastic_requests import solo_mode as solo_mode
from ringjax.runtime.groups import between_groups as between_groups
from ringjax.runtime.groups import group_rank as group_rank
from ringjax.runtime.groups import group_size as group_size
from ringjax.runtime.groups import refuse_groups as refuse_groups
from ringjax.runtime.groups import replica_set as replica_set
from ringjax.runtime.lifecycle import ProcessSet as ProcessSet
from ringjax.runtime.lifecycle import add_process_set as add_process_set
from ringjax.runtime.lifecycle import communicator as communicator
from ringjax.runtime.lifecycle import config as config
from ringjax.runtime.lifecycle import cross_rank as cross_rank
from ringjax.runtime.lifecycle import cross_size as cross_size
from ringjax.runtime.lifecycle import current as current
from ringjax.runtime.lifecycle import global_process_set as global_process_set
from ringjax.runtime.lifecycle import init as init
from ringjax.runtime.lifecycle import is_homogeneous as is_homogeneous
from ringjax.runtime.lifecycle import is_initialized as is_initialized
from ringjax.runtime.lifecycle import lane as lane
from ringjax.runtime.lifecycle import local_rank as local_rank
from ringjax.runtime.lifecycle import local_size as local_size
from ringjax.runtime.lifecycle import observed as observed
from ringjax.runtime.lifecycle import on_fresh_start as on_fresh_start
from ringjax.runtime.lifecycle import on_init as on_init
from ringjax.runtime.lifecycle import on_shutdown as on_shutdown
from ringjax.runtime.lifecycle import rank as rank
from ringjax.runtime.lifecycle import remove_process_set as remove_process_set
from ringjax.runtime.lifecycle import shutdown as shutdown
from ringjax.runtime.lifecycle import size as size
from ringjax.world.epoch_info import EpochInfo as EpochInfo
