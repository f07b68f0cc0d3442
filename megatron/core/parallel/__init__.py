"""Process groups: how ranks are arranged, which groups exist, and what they share."""
