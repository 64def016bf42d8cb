"""Which versions a run is made with. Imports none of the packages."""

import importlib.metadata
import platform


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures of a run."""
    packages = ("wholebatch", "torch", "transformers", "tokenizers")
    return {"python": platform.python_version()} | {package: installed_version(package) for package in packages}


def installed_version(package: str) -> str:
    """The version of an installed package; a source tree that was never installed has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
