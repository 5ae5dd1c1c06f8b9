"""Lists the packages below the four folders that pyproject.toml maps into ``cowrec``; setuptools does not find them."""

from setuptools import find_packages, setup

FOLDERS = ("trainer", "models", "sparse_opt", "data_pipeline")

setup(
    packages=[
        f"cowrec.{name}" for name in find_packages(include=[f"{top}{rest}" for top in FOLDERS for rest in ("", ".*")])
    ]
)
