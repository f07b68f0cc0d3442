"""What happens around a training step besides the step: logs, profiles, exits."""
