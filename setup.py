"""Builds the one C extension; everything else is in pyproject.toml."""

import shlex
import subprocess

from setuptools import Extension, setup


def pkg_config(option: str) -> list[str]:
    found = subprocess.run(["pkg-config", option, "fuse3"], check=True, capture_output=True, text=True)
    return shlex.split(found.stdout)


setup(
    ext_modules=[
        Extension(
            "cachefs.mount._passthrough",
            ["cachefs/mount/_passthrough.c"],
            extra_compile_args=["-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", *pkg_config("--cflags")],
            extra_link_args=["-Wl,--no-as-needed", *pkg_config("--libs")],
        )
    ]
)
