"""Tables and the plot of `out/autotune.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.autotune import drift
from benchmarks.autotune.problems import RECORDED
from benchmarks.autotune.run import HORIZON
from benchmarks.autotune.surfaces import NOISES, SURFACES
from benchmarks.common import environment, paths
from benchmarks.common.tables import Table, format_duration

NAMES = {
    "ours": "autotune.Tuner",
    "optuna_gp": "Optuna GPSampler",
    "optuna_tpe": "Optuna TPESampler",
    "random": "random",
    "horovod": "Horovod's, re-stated",
}
AIMS = {"3 %": 0.01, "heavy": 0.02}
"""Target of the median regret, on synthetic surfaces."""
TITLES = {RECORDED: "recorded on jobs"}


def build_tables(content: dict[str, Any]) -> list[Table]:
    """Return a table for each noise, and tables of drifts."""
    settings, found = content["settings"], []
    for noise in _list_noises(content):
        aimed = [f"at most {_format_percent(AIMS[noise], 0)}"] if noise in AIMS else []
        table = Table(
            f"{settings['trials']} trials of {settings['steps']} steps, {TITLES.get(noise, f'noise {noise}')}",
            ["surface", "policy", "regret, median", "90 %", "worst", "default's", "lost, median", "most",
             "worse than default", "processor a trial", *aimed],
            left=("policy",),
        )  # fmt: skip
        for surface in _list_surfaces(content, noise):
            there = [contender for contender in NAMES if _select_rows(content, surface, noise, contender)]
            table.rows += [_format_row(content, surface, noise, contender) for contender in there]
        found.append(table)
    if found:
        found[-1].note = _format_note(content)
    return [*found, *_build_drift_tables(content)]


def _format_row(content: dict[str, Any], surface: str, noise: str, contender: str) -> list[str]:
    rows = _select_rows(content, surface, noise, contender)
    regret, lost = (np.array([row[name] for row in rows]) for name in ("regret", "lost"))
    worse = sum(row["regret"] > row["default_regret"] + 1e-9 for row in rows)
    verdict = ("pass" if np.median(regret) <= AIMS[noise] else "miss") if noise in AIMS and contender == "ours" else ""
    return [
        surface,
        NAMES[contender],
        *(_format_percent(value) for value in (np.median(regret), np.quantile(regret, 0.9), regret.max())),
        _format_percent(float(np.median([row["default_regret"] for row in rows])), 1),
        *(_format_percent(value) for value in (np.median(lost), lost.max())),
        f"{worse} of {len(rows)}",
        format_duration(float(np.median([row["seconds_a_trial"] for row in rows]))),
        *([verdict] * (noise in AIMS)),
    ]


def _format_note(content: dict[str, Any]) -> str:
    flat = [row for row in content["searches"] if row["surface"] == "flat" and row["contender"] == "ours"]
    left = (
        f"Where nothing matters our tuner left the default in {sum(row['changed'] for row in flat)} of {len(flat)} "
        "searches. "
    )
    runs = "; ".join(f"`{run['command']}`, {run['revision']}, {run['seconds']:.0f} s" for run in content["runs"])
    return (
        "Regret: what the chosen setting takes longer than the best on a grid. Lost: time of trials beyond the "
        f"default's, as a share of a run of {HORIZON} steps, gains not counted. {left * bool(flat)}"
        f"{environment.describe(content['environment'])}" + f". Merged: {runs}" * (len(content["runs"]) > 1)
    )


def _build_drift_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables about changing surfaces and about false alarms."""
    drifts, observed = content["drifts"], content["settings"]["observed"]
    if not drifts:
        return []
    changes = Table(
        "a drift after the search",
        ["surface", "noise", "change", "noticed", "after steps, median", "most",
         "trials then, median", "regret before them, median", "and after, median", "90 %", "worst", "lost, most"],
        left=("noise", "change"),
    )  # fmt: skip
    alarms = Table(
        f"false alarms where nothing changes, in {observed} observed steps",
        ["surface", "noise", "alarms", "jobs with any"],
        left=("noise",),
    )
    cases = dict.fromkeys((row["surface"], row["noise"], row["kind"]) for row in drifts)
    for surface, noise, kind in cases:
        rows = [row for row in drifts if (row["surface"], row["noise"], row["kind"]) == (surface, noise, kind)]
        if kind == "none":
            found = [len(row["alarms"]) for row in rows]
            alarms.rows.append([surface, noise, str(sum(found)), f"{sum(map(bool, found))} of {len(rows)}"])
            continue
        noticed = [row for row in rows if row["noticed"] is not None]
        regret, before = (np.array([row[name] for row in rows]) for name in ("regret", "regret_before"))
        steps = [row["noticed"] for row in noticed] or [np.nan]
        changes.rows.append(
            [
                surface,
                noise,
                f"{drift.CHANGE:.0%} {kind}",
                f"{len(noticed)} of {len(rows)}",
                f"{np.median(steps):.0f}",
                f"{np.max(steps):.0f}",
                f"{np.median([row['trials'] for row in noticed] or [np.nan]):.0f}",
                *map(_format_percent, (np.median(before), np.median(regret), np.quantile(regret, 0.9), regret.max())),
                _format_percent(max((row["lost"] for row in noticed), default=0.0)),
            ]
        )
    shown = [table for table in (changes, alarms) if table.rows]
    shown[-1].note = (
        "autotune.Tuner alone: no other policy here notices a drift, and each would be left with the regret before the "
        f"new trials. Steps are observed in batches of {drift.BATCH}; the change comes after {drift.QUIET} of them, or "
        f"at once. Where it is not noticed in {observed} steps, the regret stays. Lost: time of new trials beyond what "
        f"stood, as a share of {HORIZON} steps."
    )
    return shown


def draw_figure(content: dict[str, Any]) -> Path | None:
    """Draw the regrets of all seeds, a panel for each noise."""
    shown = {
        noise: [each for each in _list_surfaces(content, noise) if each != "flat"] for noise in _list_noises(content)
    }
    shown = {noise: surfaces for noise, surfaces in shown.items() if surfaces}
    if not shown:
        return None
    figure, panels = plt.subplots(
        1, len(shown), figsize=(6.5 * len(shown), 4.5), squeeze=False, layout="constrained", sharey=True
    )
    contenders = [each for each in NAMES if any(row["contender"] == each for row in content["searches"])]
    width = 0.8 / len(contenders)
    for axes, (noise, surfaces) in zip(panels[0], shown.items(), strict=True):
        for k, contender in enumerate(contenders):
            regrets = {
                place: [100 * row["regret"] for row in _select_rows(content, surface, noise, contender)]
                for place, surface in enumerate(surfaces)
            }
            regrets = {place: values for place, values in regrets.items() if values}
            if not regrets:
                continue
            drawn = axes.boxplot(
                list(regrets.values()), positions=np.array(list(regrets)) + (k - (len(contenders) - 1) / 2) * width,
                widths=0.9 * width, patch_artist=True, showfliers=False, medianprops={"color": "black"},
            )  # fmt: skip
            for box in drawn["boxes"]:
                box.set_facecolor(f"C{k}")
            axes.plot([], [], color=f"C{k}", linewidth=6, label=NAMES[contender])
        if noise in AIMS:
            axes.axhline(100 * AIMS[noise], color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(surfaces)), surfaces)
        axes.set(title=TITLES.get(noise, f"noise {noise}"), yscale="symlog")
    panels[0][0].set_ylabel(f"regret after {content['settings']['trials']} trials (%)")
    panels[0][0].legend(fontsize="small")
    path = paths.get_output_path("autotune.png")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _list_noises(content: dict[str, Any]) -> list[str]:
    there = {row["noise"] for row in content["searches"]}
    return [noise for noise in (*(noise.name for noise in NOISES), RECORDED) if noise in there]


def _list_surfaces(content: dict[str, Any], noise: str) -> list[str]:
    """Return the surfaces with this noise: the synthetic ones in their order, then the recorded ones."""
    there = {row["surface"] for row in content["searches"] if row["noise"] == noise}
    return [*(surface for surface in SURFACES if surface in there), *sorted(there - set(SURFACES))]


def _select_rows(content: dict[str, Any], surface: str, noise: str, contender: str) -> list[dict[str, Any]]:
    wanted = (surface, noise, contender)
    return [row for row in content["searches"] if (row["surface"], row["noise"], row["contender"]) == wanted]


def _format_percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"
