"""Parsers, files and names of the settings, which are `ringjax.config`."""
