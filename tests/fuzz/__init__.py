"""Damaged inputs for everything that reads what others have written."""
