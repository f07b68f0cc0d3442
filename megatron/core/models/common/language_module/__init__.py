"""What models that end in a vocabulary share."""
