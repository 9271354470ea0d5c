"""What the settings of ringjax and of Horovod are called in the environment.

The settings themselves are `ringjax.config`.
"""
