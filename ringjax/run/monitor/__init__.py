"""Monitoring in ringrun: collects samples of the ranks for reports, metrics and `top`.

Ranks send samples through the agents of their hosts (hosts/telemetry_relay.py), and
only while a report, a metrics endpoint or a viewer needs them. ringjax.monitor computes
the values that are shown. An error in this package never ends the job.
"""
