"""The HTTP side: metrics for Prometheus, and health for the program that starts and stops a broker.

Owns everything that speaks HTTP. The rules: it is a client of the broker like any other, in a
process of its own, so that a request takes neither the broker's interpreter lock nor its memory; it
asks the broker once a second at most, however many clients ask; each connection, request and label
has a bound. Source: ARCHITECTURE.md, "The HTTP side"; deploy/metrics.md.
"""
