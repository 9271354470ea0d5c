"""Monitoring in ringrun: collects samples of the ranks for reports, metrics and `top`.

While a report, a metrics endpoint or a viewer needs samples, ranks send samples through
the agents of their hosts (hosts/telemetry_relay.py). ringjax.monitor computes the
values that ringrun prints. An error in this package never ends the job.
"""
