"""Process groups: rank order, creation of groups, and data that their ranks share."""
