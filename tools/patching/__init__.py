# SPDX-FileCopyrightText: 2026 The GradLoc Authors
# SPDX-License-Identifier: Apache-2.0
"""The program behind make_patch.sh.

| module | what it does |
|---|---|
| `new_checkout.py` | `--init`: a development checkout |
| `regenerate.py` | `--repo`: brings sources and checkout together, and writes patches/ |
| `other_targets.py` | the patches of the targets that there is no checkout of |
| `check.py` | `--check`: patches/ is what the sources produce |
| `sources.py` | which folders are installed where in verl; the three-way merge |
| `page_files.py` | a web page's files as a Python module, and back |
| `patch_text.py` | the text of a patch, and of hooks.patch |
| `released_verl.py` | verl as released, from pip or a clone |
| `project.py` | the pin and the files of this project |
| `scratch_git.py` | git without the user's settings |
| `messages.py` | output, and errors that are one sentence |
"""
