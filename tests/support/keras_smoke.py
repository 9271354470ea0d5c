"""The tests of ringjax.keras that execute code of a backend's adapter.

Backends that do not run all tests of tests/support/keras_*_checks.py run these tests.
The tests reach every line of ringjax/keras/backends, the only code that differs between
backends.
"""

from support.keras_callback_checks import (
    test_broadcast_leaves_local_variables_alone,
    test_fit_goes_on_after_a_failure,
)
from support.keras_checks import (
    hvd,
    keras,
    test_a_compression_of_ones_own,
    test_a_loop_of_ones_own,
    test_groups_of_variables,
    test_local_layers,
    test_options,
    test_process_sets,
    test_values,
)
from support.keras_fit_checks import (
    test_all_skip_a_step_whose_gradients_are_infinite_on_one,
    test_fit_is_that_of_one_process_on_the_whole_batch,
    test_several_passes_for_one_step,
)
from support.keras_parameter_checks import test_who_forgets_the_broadcast_is_told_once

__all__ = [
    "hvd",
    "keras",
    "test_a_compression_of_ones_own",
    "test_a_loop_of_ones_own",
    "test_all_skip_a_step_whose_gradients_are_infinite_on_one",
    "test_broadcast_leaves_local_variables_alone",
    "test_fit_goes_on_after_a_failure",
    "test_fit_is_that_of_one_process_on_the_whole_batch",
    "test_groups_of_variables",
    "test_local_layers",
    "test_options",
    "test_process_sets",
    "test_several_passes_for_one_step",
    "test_values",
    "test_who_forgets_the_broadcast_is_told_once",
]
