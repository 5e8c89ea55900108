"""Files in deploy/, checked against the code: their commands run, with small sizes, in place of vLLM a stand-in."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import environments
from longshore.config import Config
from longshore.doctor import _SAMPLES
from longshore.engines.kv_transfer_config import read_extra_config
from longshore.tiers.file.format import VERSION
from longshore.tiers.remote import format as remote_format
from longshore.tiers.remote import parse_url

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "longshore-vllm@.service"
MODEL, PORT = "some/model", "8123"

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())
POD: dict[str, Any] = KUBERNETES["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def _unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return parser


def _scripts() -> dict[str, list[str]]:
    """The command of each file, as the shell gets it."""
    start = shlex.split(_unit()["Service"]["ExecStart"].replace("%i", "engine"))
    return {
        "compose": [part.replace("$$", "$") for part in COMPOSE["services"]["vllm"]["command"]],
        "kubernetes": [*CONTAINER["command"], *CONTAINER["args"]],
        "systemd": [part.replace("$$", "$") for part in start],
    }


def _start(name: str, scratch: Path, size: str = "8MiB") -> tuple[subprocess.CompletedProcess[str], list[str] | None]:
    """Run a command with `size` in place of sizes; what vLLM was started with, `None` if it was not."""
    told, program = scratch / "told", scratch / "vllm"
    program.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv, open({str(told)!r}, 'w'))\n")
    program.chmod(0o755)
    shell, flag, script = _scripts()[name]
    script = re.sub(r"(--host-size|--file-size) \d+GiB", rf"\1 {size}", script)
    script = re.sub(r"--file-path /\S+", f"--file-path {scratch / 'kv'}", script)
    names = {"MODEL": MODEL, "PORT": PORT, "HOST_SIZE": size, "FILE_SIZE": size}
    path = f"{scratch}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [shell, flag, script]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=scratch, env={**os.environ, **names, "PATH": path}, check=False
    )
    return done, json.loads(told.read_text()) if told.exists() else None


def _after(name: str, argv: list[str]) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("name", ["compose", "kubernetes", "systemd"])
def test_vllm_is_started_with_a_configuration_that_it_reads(name: str, tmp_path: Path) -> None:
    done, argv = _start(name, tmp_path)
    assert argv is not None, done.stderr
    assert argv[1:3] == ["serve", MODEL]
    printed = json.loads(_after("--kv-transfer-config", argv))
    assert printed["kv_connector"] == "LongshoreConnector"
    config = read_extra_config(printed["kv_connector_extra_config"], 1)
    assert (config.host_size, config.file_size, config.file_path) == (8 << 20, 8 << 20, tmp_path / "kv")


@pytest.mark.parametrize("name", ["compose", "kubernetes", "systemd"])
def test_vllm_is_not_started_when_a_size_is_refused(name: str, tmp_path: Path) -> None:
    done, argv = _start(name, tmp_path, "900PiB")
    assert done.returncode != 0 and "900.0 PiB" in done.stderr
    assert argv is None


@pytest.mark.parametrize("name", ["compose", "kubernetes", "systemd"])
def test_the_shell_gives_way_to_vllm_which_gets_the_signals(name: str) -> None:
    *_, script = _scripts()[name]
    assert re.search(r"&&\s+exec vllm serve ", script)


def test_what_stops_the_engine_waits_longer_than_the_engine(tmp_path: Path) -> None:
    grace = {
        "compose": int(COMPOSE["services"]["vllm"]["stop_grace_period"].removesuffix("s")),
        "kubernetes": POD["terminationGracePeriodSeconds"],
        "systemd": int(_unit()["Service"]["TimeoutStopSec"]),
    }
    for name, seconds in grace.items():
        _, argv = _start(name, tmp_path)
        assert argv is not None and int(_after("--shutdown-timeout", argv)) < seconds, name
        page = (ROOT / "docs" / "deployment.md").read_text()
        assert f"{_after('--shutdown-timeout', argv)} s and {seconds} s" in page


def test_every_file_says_that_it_is_untried() -> None:
    files = ("Dockerfile", "compose.yaml", "prometheus.yml", "kubernetes.yaml", UNIT.name)
    for name in files:
        assert re.search(r"(?i)\buntried\b", (DEPLOY / name).read_text().partition("\n\n")[0][:600]), name
        assert f"`deploy/{name}`" in (ROOT / "docs" / "deployment.md").read_text(), name


# ---------------------------------------------------------------------- the image


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_base_image_is_pinned_with_a_supported_python() -> None:
    (base,) = (rest for word, rest in _instructions() if word == "FROM")
    found = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+", base)
    assert found
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {found[1]}" in project["classifiers"]


def test_vllm_is_installed_as_tested_and_commands_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (found[1] for _, rest in _instructions() if (found := re.search(r'python -c "(.*)"$', rest)))
    made: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(environments, "make_environment", lambda where, more: made.append((where, more)))
    exec(code, {})  # noqa: S102 - our own file
    ((where, more),) = made
    assert more == environments.dependencies()
    assert f"PATH={where}/bin:$PATH" in [rest for word, rest in _instructions() if word == "ENV"]


def test_image_copies_existing_files_and_everything_needed() -> None:
    copied = [part for word, rest in _instructions() if word == "COPY" for part in rest.split()[:-1]]
    for path in copied:
        assert (ROOT / path).exists(), path
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for path in (project["readme"], *project["license-files"], "pyproject.toml", "src/longshore"):
        assert any(Path(path).is_relative_to(each) for each in copied), path


def test_the_command_of_the_image_runs(tmp_path: Path) -> None:
    (command,) = (json.loads(rest) for word, rest in _instructions() if word == "CMD")
    small = [part.replace("4GiB", "8MiB") for part in command]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        small, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_directory_of_files_belongs_to_the_images_user() -> None:
    words = dict(_instructions())
    made = next(rest for word, rest in _instructions() if word == "RUN" and "install -d" in rest)
    assert f"-o {words['USER']} " in made and "-m 0700 /kv" in made
    for volume in COMPOSE["services"]["vllm"]["volumes"]:  # one that the image does not have would be root's
        target = volume.split(":")[1]
        assert re.search(rf"install -d -o {words['USER']} [^&]*{re.escape(target)}(?: |$)", made), target


# ---------------------------------------------------------------------- compose


def test_the_services_name_each_other() -> None:
    services = COMPOSE["services"]
    *_, script = _scripts()["compose"]
    found = re.search(r"remote=(\S+?)\)", script)
    assert found
    store = parse_url(found[1])
    assert store.host in services and store.port == 6379
    build = services["vllm"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    named = {each.partition(":")[0] for service in services.values() for each in service.get("volumes", ())}
    assert {name for name in named if not name.startswith(".")} == set(COMPOSE["volumes"])


def test_images_of_other_services_are_pinned() -> None:
    for name, service in COMPOSE["services"].items():
        assert "build" in service or re.search(r":v?\d+\.\d+(\.\d+)?$", service["image"]), name


def test_prometheus_scrapes_what_vllm_exports() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["metrics_path"] == "/metrics"  # vLLM's, as docs/vllm.md says
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    *_, script = _scripts()["compose"]
    assert host in COMPOSE["services"] and f"--port {port}" in script
    assert COMPOSE["services"]["prometheus"]["volumes"] == ["./:/etc/prometheus:ro"]


def test_the_server_evicts_as_the_doctor_asks() -> None:
    command = COMPOSE["services"]["valkey"]["command"]
    assert _after("--maxmemory-policy", command) == "allkeys-lru"
    assert int(_after("--maxmemory-samples", command)) >= _SAMPLES
    assert re.fullmatch(r"[1-9]\d*[mg]b", _after("--maxmemory", command))


# ---------------------------------------------------------------------- Kubernetes, systemd


def test_the_pod_has_room_for_what_its_engine_takes() -> None:
    *_, script = _scripts()["kubernetes"]
    sizes = {name: int(size) for name, size in re.findall(r"--(host-size|file-size) (\d+)GiB", script)}
    volumes = {each["name"]: each for each in POD["volumes"]}

    def gib(text: str) -> int:
        return int(text.removesuffix("Gi"))

    shared = gib(volumes["shm"]["emptyDir"]["sizeLimit"])
    limits = CONTAINER["resources"]["limits"]
    assert sizes["host-size"] + shared < gib(limits["memory"])
    assert sizes["file-size"] < gib(volumes["kv"]["emptyDir"]["sizeLimit"]) <= gib(limits["ephemeral-storage"])
    mounted = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mounted.keys() == volumes.keys()
    found = re.search(r"--file-path (\S+)", script)
    assert found and str(Path(found[1]).parent) == mounted["kv"]  # a sub-directory, which gets its own mode
    assert KUBERNETES["spec"]["strategy"] == {"type": "Recreate"}


def test_the_unit_is_one_that_systemd_understands() -> None:
    service = _unit()["Service"]
    assert (service["LimitMEMLOCK"], service["LimitNOFILE"], service["KillMode"]) == ("infinity", "65536", "mixed")
    names = set(re.findall(r"\$\$([A-Z_]+)", service["ExecStart"]))
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert names == set(re.findall(r"^    ([A-Z_]+)=", page, re.MULTILINE))
    if program := shutil.which("systemd-analyze"):
        done = subprocess.run([program, "verify", UNIT], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------- what the pages say


def test_the_page_on_upgrades_names_the_versions_of_the_formats() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert f"reads and writes version {VERSION} of the format" in page
    assert f"expected format version {VERSION}, got N" in page
    assert f"a version of its own, {remote_format.VERSION}." in page


def test_the_sizes_of_the_documented_unit_are_valid() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    sizes = dict(re.findall(r"^    (HOST_SIZE|FILE_SIZE)=(\S+)$", page, re.MULTILINE))
    Config.make(host_size=sizes["HOST_SIZE"], file_path="/nvme/longshore/engine", file_size=sizes["FILE_SIZE"])
