"""What Horovod has beside its operations, for `ringjax.common` and `ringjax.runner`."""
