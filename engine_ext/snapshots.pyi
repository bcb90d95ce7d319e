from typing import Any

def judge_steps(steps: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Judge steps one after the other by the rule of a rank; return a dict for each late one, else None. For tests.

    A step has times in nanoseconds, `input`, `compute`, `gc`, `cpu` and `wait`, and `others_late`, by how much `rank`
    was late; missing ones are 0, and no rank. `device`: whether there were tensors on a GPU; `elsewhere`: whether
    another thread was blocked in the engine; `far`: whether ranks on several hosts took part.
    """
