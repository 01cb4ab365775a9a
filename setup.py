"""Everything declarative is in pyproject.toml; this adds the one thing that it cannot say.

`integrations/` at the top of the repository is installed as the package `swa_pass.integrations`. A `package_dir`
mapping does that for wheels, and setuptools' editable finder honours it too.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["swa_pass", "swa_pass.*"]),
        "swa_pass.integrations",
        *(f"swa_pass.integrations.{name}" for name in find_packages("integrations")),
    ],
    package_dir={"swa_pass.integrations": "integrations"},
)
