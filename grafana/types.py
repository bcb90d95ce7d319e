"""Type check of each panel as a `Panel` of @grafana/schema by `tsc --strict`: `python -m grafana.types`.

Needs node and npm. Packages from npm are kept in build/grafana-types.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "grafana-types"
PACKAGES = ("@grafana/schema@13.2.3", "typescript@6.0.3")
DEADLINE = 300  # maximum seconds of npm and of tsc
# By the name of the kind in Grafana: prefix of its types, and whether its fields have settings of their own.
KINDS = {
    "stat": ("Stat", False),
    "timeseries": ("TimeSeries", True),
    "heatmap": ("Heatmap", True),
    "state-timeline": ("StateTimeline", True),
    "table": ("Table", False),
}
TYPES = "@grafana/schema/dist/esm/raw/composable/{}/panelcfg/x/{}PanelCfg_types.gen"
HEAD = """\
import type { Dashboard, Panel, RowPanel } from '@grafana/schema';
%s
// The members of an enumeration are in JSON as their text.
type Text<T> = T extends string ? `${T}` : T extends (infer E)[] ? Text<E>[]
  : T extends object ? { [K in keyof T]: Text<T[K]> } : T;
"""


class Unavailable(Exception):
    """Error if node is missing, or npm cannot fetch the packages."""


def make_program(dashboards: list[dict[str, Any]]) -> str:
    """Return the program with the dashboards, as parsed from their files, that the compiler has to accept."""
    names = [name for name, _ in KINDS.values()]
    imports = [f"import type * as {name} from '{TYPES.format(name.lower(), name)}';" for name in names]
    lines = [HEAD % "\n".join(imports)]
    for board in dashboards:
        name = board["uid"].replace("-", "_")
        # Panels follow below. Variables and annotations have keys of the SDK and of the data source that these types
        # lack.
        whole = {**board, "panels": [], "templating": {"list": []}, "annotations": {"list": []}}
        lines.append(f"export const {name}: Text<Partial<Dashboard>> = {json.dumps(whole)};")
        for panel in board["panels"]:
            const, kind = f"{name}_{panel['id']}", panel["type"]
            lines.append(f"// {board['title']}: {panel['title']}")
            if kind == "row":
                lines.append(f"export const {const}: Text<RowPanel> = {json.dumps(panel)};")
                continue
            module, custom = KINDS[kind]
            lines.append(f"export const {const}: Text<Panel> = {json.dumps(panel)};")
            lines.append(
                f"export const {const}_options: Text<Partial<{module}.Options>> = {json.dumps(panel['options'])};"
            )
            if custom:
                own = json.dumps(panel["fieldConfig"]["defaults"]["custom"])
                lines.append(f"export const {const}_custom: Text<Partial<{module}.FieldConfig>> = {own};")
    return "\n".join(lines) + "\n"


def compile_strictly(program: str) -> str:
    """Compile the program and return its errors, empty if there are none; raise `Unavailable` without a compiler."""
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder's commands have deadlines
        _fetch_packages()
        (WORK / "panels.ts").write_text(program)
        options = ["--strict", "--noEmit", "--skipLibCheck", "--target", "es2022"]
        options += ["--module", "esnext", "--moduleResolution", "bundler"]
        done = subprocess.run(
            ["node", "node_modules/typescript/bin/tsc", *options, "panels.ts"],
            cwd=WORK, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE,
        )  # fmt: skip
        return done.stdout if done.returncode else ""


def _fetch_packages() -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        raise Unavailable("no node and npm on PATH")
    wanted = {name: version for name, _, version in (package.rpartition("@") for package in PACKAGES)}
    try:
        found = {
            name: json.loads((WORK / "node_modules" / name / "package.json").read_text())["version"] for name in wanted
        }
    except (OSError, ValueError):
        found = {}
    if found == wanted:
        return
    (WORK / "package.json").write_text('{"private": true}\n')
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-save", *PACKAGES]
    try:
        subprocess.run(command, cwd=WORK, check=True, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"npm install: {error.stderr.strip().rpartition(chr(10))[2]}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"npm install takes more than {DEADLINE} s") from error


def main() -> int:
    boards = [json.loads(path.read_text()) for path in sorted((ROOT / "grafana/dashboards").glob("*.json"))]
    try:
        said = compile_strictly(make_program(boards))
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(said or f"{sum(len(board['panels']) for board in boards)} panels are of their types")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main())
