"""Monitoring: what is exported, and what is made from it.

    metric_names   the table of metrics: name, kind, help text, labels, buckets, meaning of label values
    endpoint       an HTTP server for `/metrics` and `/health`
    board          a Grafana dashboard, made from the table
    rules          Prometheus alert rules, with a runbook line each
    page           the reference page (docs/metrics.md), made from the table and the rules
    scrape         reads metrics endpoints, for `longshore top`

`longshore.metrics` exports the values.
"""
