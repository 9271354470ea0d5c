"""Lets pytest rewrite the assertions in the check modules that these tests import."""

import pytest

pytest.register_assert_rewrite(
    "support.keras_parameter_checks",
    "support.keras_checks",
    "support.keras_callback_checks",
    "support.keras_fit_checks",
)
