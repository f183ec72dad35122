"""The overflow study's report: traces in, one HTML file and the figures out. Called through :func:`kvpolicy.report`."""
