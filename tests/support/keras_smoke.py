"""The tests of ringjax.keras that execute code of a backend's adapter.

Backends that do not run all tests of tests/support/keras_*_checks.py run these tests.
The tests reach every line of ringjax/keras/backends, the only code that differs between
backends.
"""

from support.keras_callback_checks import (
    test_broadcast_keeps_local_variables,
    test_fit_continues_after_a_failure,
)
from support.keras_checks import (
    hvd,
    keras,
    test_collectives_on_values,
    test_custom_compression,
    test_custom_training_loop,
    test_groups_of_variables,
    test_local_layers,
    test_options,
    test_process_sets,
)
from support.keras_fit_checks import (
    test_fit_equals_one_process_on_the_whole_batch,
    test_infinite_gradients_on_a_rank_skip_the_step_on_all,
    test_several_passes_per_step,
)
from support.keras_parameter_checks import test_a_missing_broadcast_causes_one_warning

__all__ = [
    "hvd",
    "keras",
    "test_a_missing_broadcast_causes_one_warning",
    "test_broadcast_keeps_local_variables",
    "test_collectives_on_values",
    "test_custom_compression",
    "test_custom_training_loop",
    "test_fit_continues_after_a_failure",
    "test_fit_equals_one_process_on_the_whole_batch",
    "test_groups_of_variables",
    "test_infinite_gradients_on_a_rank_skip_the_step_on_all",
    "test_local_layers",
    "test_options",
    "test_process_sets",
    "test_several_passes_per_step",
]
