# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The program behind run_experiment.sh.

| module | what it does |
|---|---|
| `settings.py` | the table of settings |
| `profiles.py` | what else a profile gives to verl |
| `old_names.py` | what to write instead of a name that was a setting |
| `resolve.py`, `drill.py` | the values of a run, and the step of its drill |
| `values.py` | what a value may be |
| `options.py` | the command line |
| `usage.py` | `--help`, and the settings in docs/launching.md |
| `renamed_keys.py` | what later releases of verl call the keys of 0.7.0 |
| `targets.py` | which verl a run is for |
| `command.py` | the command that trains: Hydra overrides and environment |
| `hydra.py` | quoting for Hydra |
| `checks.py` | missing paths; whether verl is patched |
| `faults.py` | the faults that `--fault` plants |
| `set_up.py` | the embedded profile's virtual environment, model and data |
| `installer.py` | uv, or pip in its place |
| `outcome.py` | what the embedded profile says at the end of a run |
| `processes.py` | signals, and the end of every process of a run |
| `log.py`, `errors.py` | progress, and errors that are one sentence |
| `run.py` | a run that is about to start |
| `cluster.py`, `embedded.py` | a run in each profile, from its start to its end |
| `main.py` | the program: command line, errors, exit codes |
"""
