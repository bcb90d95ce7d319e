"""Tables and a picture of `out/autotune.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.autotune.run import HORIZON
from benchmarks.common import environment, paths
from benchmarks.common.tables import Table, duration

NAMES = {
    "ours": "autotune.Tuner",
    "optuna_gp": "Optuna GPSampler",
    "optuna_tpe": "Optuna TPESampler",
    "random": "random",
    "horovod": "Horovod's, re-stated",
}
AIMS = {"3 %": 0.01, "heavy": 0.02}
"""Median regret that is aimed at."""


def tables(content: dict[str, Any]) -> list[Table]:
    """A table for each noise."""
    settings, found = content["settings"], []
    for noise in settings["noises"]:
        table = Table(
            f"{settings['trials']} trials of {settings['steps']} steps, noise {noise}, {settings['seeds']} seeds",
            ["surface", "policy", "regret, median", "90 %", "worst", "default's", "lost, median", "most",
             "worse than default", "processor a trial", f"at most {100 * AIMS[noise]:.0f} %"],
            left=("policy",),
        )  # fmt: skip
        for surface in settings["surfaces"]:
            for contender in settings["contenders"]:
                rows = _rows(content, surface, noise, contender)
                regret, lost = (np.array([row[name] for row in rows]) for name in ("regret", "lost"))
                worse = sum(row["regret"] > row["default_regret"] + 1e-9 for row in rows)
                ours = contender == "ours"
                table.rows.append(
                    [
                        surface,
                        NAMES[contender],
                        *(
                            f"{100 * value:.2f} %"
                            for value in (np.median(regret), np.quantile(regret, 0.9), regret.max())
                        ),
                        f"{100 * np.median([row['default_regret'] for row in rows]):.1f} %",
                        *(f"{100 * value:.2f} %" for value in (np.median(lost), lost.max())),
                        f"{worse} of {len(rows)}",
                        duration(float(np.median([row["seconds_a_trial"] for row in rows]))),
                        ("pass" if np.median(regret) <= AIMS[noise] else "miss") if ours else "",
                    ]
                )
        found.append(table)
    flat = [row for row in content["searches"] if row["surface"] == "flat" and row["contender"] == "ours"]
    found[-1].note = (
        "Regret: what the chosen setting takes longer than the best on a grid. Lost: time of trials beyond the "
        f"default's, as a share of a run of {HORIZON} steps, gains not counted. Where nothing matters our tuner left "
        f"the default in {sum(row['changed'] for row in flat)} of {len(flat)} searches. "
        f"{environment.describe(content['environment'])}"
    )
    return found


def picture(content: dict[str, Any]) -> Path | None:
    """Draw the regrets of all seeds, a panel for each noise."""
    settings = content["settings"]
    surfaces = [surface for surface in settings["surfaces"] if surface != "flat"]
    if not surfaces:
        return None
    figure, panels = plt.subplots(
        1, len(settings["noises"]), figsize=(13, 4.5), squeeze=False, layout="constrained", sharey=True
    )
    width = 0.8 / len(settings["contenders"])
    for axes, noise in zip(panels[0], settings["noises"], strict=True):
        for k, contender in enumerate(settings["contenders"]):
            regrets = [
                [100 * row["regret"] for row in _rows(content, surface, noise, contender)] for surface in surfaces
            ]
            drawn = axes.boxplot(
                regrets, positions=np.arange(len(surfaces)) + (k - 2) * width, widths=0.9 * width, patch_artist=True,
                showfliers=False, medianprops={"color": "black"},
            )  # fmt: skip
            for box in drawn["boxes"]:
                box.set_facecolor(f"C{k}")
            axes.plot([], [], color=f"C{k}", linewidth=6, label=NAMES[contender])
        axes.axhline(100 * AIMS[noise], color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(surfaces)), surfaces)
        axes.set(title=f"noise {noise}", yscale="symlog")
    panels[0][0].set_ylabel(f"regret after {settings['trials']} trials (%)")
    panels[0][0].legend(fontsize="small")
    path = paths.out("autotune.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _rows(content: dict[str, Any], surface: str, noise: str, contender: str) -> list[dict[str, Any]]:
    wanted = (surface, noise, contender)
    return [row for row in content["searches"] if (row["surface"], row["noise"], row["contender"]) == wanted]
