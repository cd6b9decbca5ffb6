"""The live page of a run. It reads the run directory and nothing else: no Ray, no driver."""

from cluster.dashboard.serve import DashboardHandle, run_dashboard, start_dashboard

__all__ = ["DashboardHandle", "run_dashboard", "start_dashboard"]
