# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The program behind make_patch.sh.

| module | what it does |
|---|---|
| `new_checkout.py` | `--init`: a development checkout |
| `regenerate.py` | `--repo` and `--sources`: brings sources and checkout together, and writes patches/ |
| `parts.py` | the parts of a patch: package, hooks and fixes; which edit is which; `--release` |
| `check.py` | `--check`: patches/ is what the sources produce |
| `sources.py` | which folders are installed where in verl; the three-way merge |
| `page_files.py` | a web page's files as a Python module, and back |
| `patch_text.py` | the text of a patch |
| `released_verl.py` | verl as released, from pip or a clone |
| `project.py` | the pin and the files of this project |
| `scratch_git.py` | git without the user's settings |
| `messages.py` | output, and errors that are one sentence |
"""
