"""Monitoring in ringrun: collects samples of the ranks for reports, metrics and `top`.

Ranks send samples through the agents of their hosts (hosts/telemetry_relay.py) while a
report, a metrics endpoint or a viewer needs samples. ringjax.monitor computes the
values that ringrun shows. An error in this package never ends the job.
"""
