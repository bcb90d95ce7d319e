"""Backend of torch.distributed: every program that calls `init_process_group("engine")` runs on the engine.

Nothing of torch is linked: a process group is a Python subclass of torch's `ProcessGroup`.
"""

NAME = "engine"
