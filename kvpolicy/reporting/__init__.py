"""The overflow study's report: traces in, one HTML file and the figures out. :func:`kvpolicy.report` is the way in."""
