"""vLLM's own scheduler as a simulator: the real `Scheduler` and KV cache on a virtual clock, without model or device.

:class:`kvpolicy_vllm.simulator.engine.VllmScheduler` is the way in; importing the package loads no engine.
"""
