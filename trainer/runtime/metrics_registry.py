"""The registry of a process's Prometheus metrics: memory, CPU time and open files of the process, and its versions."""

from prometheus_client import CollectorRegistry, Info, ProcessCollector

from .environment import library_versions


def metrics_registry() -> CollectorRegistry:
    """Makes a registry with ``process_*`` and ``cowrec_build_info``."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Info("cowrec_build", "Versions of cowrec and its libraries.", registry=registry)
    build.info({name.replace("-", "_"): version for name, version in library_versions().items()})
    return registry
