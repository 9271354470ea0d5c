"""Modules at Horovod's paths; they import shared classes and functions of ringjax."""
