"""The launcher's side of a job whose ranks come and go: what is started, and when."""
