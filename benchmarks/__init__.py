"""Comparisons with other libraries. Not installed; see README.md here."""
