"""What every process shares: settings, logs, metrics, health, errors, lifecycle, registry."""
