"""`enginerun dashboards export DIR` writes the files that Prometheus and Grafana need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.launch.cli import main
from engine.metrics import dashboards

from .prometheus_server import ROOT, Programs

NAMES = {
    *(f"dashboards/enginerun-{name}.json" for name in ("overview", "ranks", "engine", "autotune")),
    *("rules/recording.yml", "rules/alerts.yml", "prometheus.yml"),
    *("provisioning/datasources/prometheus.yml", "provisioning/dashboards/enginerun.yml"),
}


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_writes_all_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "monitoring"
    assert main(["dashboards", "export", str(target)]) == 0
    assert files(target) == NAMES and (target / "runs").is_dir()
    output = capsys.readouterr().out
    assert all(f"wrote {target / name}\n" in output for name in NAMES)
    assert f"--config.file={target / 'prometheus.yml'}" in output
    provider = yaml.safe_load((target / "provisioning/dashboards/enginerun.yml").read_text())
    assert provider["providers"][0]["options"]["path"] == str(target / "dashboards")


def test_a_second_time_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboards", "export", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["dashboards", "export", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "wrote" not in output and f"{len(NAMES)} files were there already" in output


def test_refuses_to_write_over_other_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prometheus.yml").write_text("mine")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/my.yml").write_text("mine")
    assert main(["dashboards", "export", str(tmp_path)]) == 2
    assert "files with other content: prometheus.yml; --force" in capsys.readouterr().err
    assert files(tmp_path) == {"prometheus.yml", "rules/my.yml"}
    assert main(["dashboards", "export", str(tmp_path), "--force"]) == 0
    assert files(tmp_path) == NAMES | {"rules/my.yml"}
    assert (tmp_path / "rules/my.yml").read_text() == "mine" != (tmp_path / "prometheus.yml").read_text()


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_a_directory_that_cannot_be_one_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], force: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["dashboards", "export", str(tmp_path / "file"), *force]) == 2
    assert "enginerun: error: cannot write" in capsys.readouterr().err


def test_a_directory_in_the_place_of_a_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prometheus.yml").mkdir()
    assert main(["dashboards", "export", str(tmp_path)]) == 2
    assert "other content" in capsys.readouterr().err
    assert main(["dashboards", "export", str(tmp_path), "--force"]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_name_that_grafana_would_read_otherwise_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "export", str(tmp_path / "$HOME")]) == 2
    assert "has a character" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [[], ["export"], ["import", "x"], ["export", "a", "b"], ["export", "a", "--forced"]]
)
def test_arguments_that_make_no_sense(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["dashboards", *arguments])
    assert "usage: enginerun dashboards" in capsys.readouterr().err


def test_a_program_called_dashboards_can_be_run(tmp_path: Path) -> None:
    program = tmp_path / "dashboards"
    program.write_text("#!/bin/sh\necho it is $1\n")
    program.chmod(0o755)
    job = subprocess.run(
        [sys.executable, "-m", "engine.launch", "-np", "1", program, "export"],
        cwd=tmp_path, text=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert "it is export" in job.stdout, job.stderr


def test_the_files_are_those_of_the_sources() -> None:
    sources = {name: (ROOT / "grafana" / name).read_text() for name in NAMES}
    assert dashboards.read_dashboards() == sources


def test_they_are_found_by_the_sources_that_were_never_installed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from engine.metrics import dashboards as d; "
        "print(*d.read_dashboards())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, ROOT], cwd=tmp_path, text=True, capture_output=True)
    assert len(done.stdout.split()) > 8, done.stderr
    assert all((ROOT / "grafana" / name).is_file() for name in done.stdout.split())


def test_an_installation_without_them_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboards, "PARTS", (*dashboards.PARTS, "nonsense"))
    assert main(["dashboards", "export", str(tmp_path)]) == 2
    assert "this installation has no dashboards" in capsys.readouterr().err


def test_prometheus_accepts_the_configuration_by_file_and_by_http(prometheus: Programs, tmp_path: Path) -> None:
    dashboards.export(tmp_path)
    config = tmp_path / "prometheus.yml"
    assert "SUCCESS" in prometheus.tool("check", "config", config)
    text = config.read_text()
    config.write_text(text.replace("    # http_sd", "    http_sd").replace("    #   ", "      "))
    (job,) = yaml.safe_load(config.read_text())["scrape_configs"]
    assert job["http_sd_configs"][0]["url"].endswith("/sd") and job["file_sd_configs"]
    assert "SUCCESS" in prometheus.tool("check", "config", config)


def test_the_datasource_and_the_dashboards_fit() -> None:
    contents = dashboards.read_dashboards()
    (source,) = yaml.safe_load(contents["provisioning/datasources/prometheus.yml"])["datasources"]
    scraped = yaml.safe_load(contents["prometheus.yml"])["global"]["scrape_interval"]
    assert source["type"] == "prometheus" and source["jsonData"]["timeInterval"] == scraped
    for name, text in contents.items():
        if name.endswith(".json"):
            assert json.loads(text)["templating"]["list"][0]["query"] == source["type"]
