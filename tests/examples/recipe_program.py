"""Run recipes of the documentation on this rank, one after the other."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch.nn.functional import mse_loss

import engine


def error_of(variables: dict[str, Any]) -> float:
    """Return the mean error over all samples, in evaluation mode."""
    model, (inputs, targets) = variables["model"], variables["data"][:]
    model.eval()
    with torch.no_grad():
        error = mse_loss(model(inputs), targets).item()
    model.train()
    return error


def run(beginning: str, recipes: dict[str, str]) -> dict[str, Any]:
    """Return for each recipe the error before and after it and some of its variables, or the traceback."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, recipe in recipes.items():
        variables: dict[str, Any] = {}
        try:
            exec(compile(beginning, f"<beginning of {name}>", "exec"), variables)
            before = error_of(variables)
            exec(compile(recipe, f"<{name}>", "exec"), variables)
            parameters = {
                f"{part}.{each}": value
                for part, module in variables.items()
                if isinstance(module, torch.nn.Module)
                for each, value in module.named_parameters()
            }
            engine.check_consistency(parameters)
        except Exception:
            found[name] = traceback.format_exc()
            break
        found[name] = {
            "before": before,
            "after": error_of(variables),
            "lr": variables["optimizer"].param_groups[0]["lr"],
            "begin": variables.get("begin"),
            "samples": float(variables.get("samples", 0)),
            "finite": all(bool(value.isfinite().all()) for value in parameters.values()),
        }
        engine.shutdown()
    return found
