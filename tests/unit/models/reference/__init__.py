"""Other implementations that models are compared with."""
