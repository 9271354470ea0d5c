"""The launcher's side of elastic jobs: which workers are started, and when."""
