"""`model.fit` on the backend torch, on three ranks."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("keras_checks", "keras_fit_checks")

from keras_fit_checks import (  # noqa: E402
    hvd,
    keras,
    test_all_skip_a_step_whose_gradients_are_infinite_on_one,
    test_fit_is_that_of_one_process_on_the_whole_batch,
)

__all__ = [
    "hvd",
    "keras",
    "test_all_skip_a_step_whose_gradients_are_infinite_on_one",
    "test_fit_is_that_of_one_process_on_the_whole_batch",
]

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.launch("keras-torch"),
    pytest.mark.ranks(3, env={"KERAS_BACKEND": "torch"}),
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(120),
]
