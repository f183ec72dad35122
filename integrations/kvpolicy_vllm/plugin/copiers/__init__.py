"""Moving KV blocks between the device and the host pool: the workers' side, and the only one that needs torch."""
