"""Has pytest rewrite the assertions of checks that files of this folder import."""

import pytest

pytest.register_assert_rewrite(
    "support.keras_parameter_checks",
    "support.keras_checks",
    "support.keras_callback_checks",
    "support.keras_fit_checks",
)
