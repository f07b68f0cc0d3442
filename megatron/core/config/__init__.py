"""Declaration of flags as metadata of dataclass fields, and the errors that users see."""
