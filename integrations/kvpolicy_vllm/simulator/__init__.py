"""vLLM's own scheduler as a simulator: the real `Scheduler` and KV cache on a virtual clock, without model or device.

The entry point is :class:`kvpolicy_vllm.simulator.engine.VllmScheduler`. Importing the package loads no engine.
"""
