"""The hosts of a job: which there are, who starts ranks on them, and how they talk."""
