"""Parameters: records of global name, shape and sharding, and initialization."""
