"""What a run was asked to do, as frozen sections."""
