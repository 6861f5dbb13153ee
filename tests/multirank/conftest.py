"""verl 0.9 takes a CPU for one of its devices if the embedded profile's module says so, in the ranks as well."""

import os

import trees

if trees.TARGET and not trees.TARGET.startswith("0.7."):
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "embedded")
