"""Helpers of `ringjax.config`: parsers of settings, and files that settings name."""
